"""Mixtral and Qwen3-MoE."""
