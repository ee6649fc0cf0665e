"""Qwen2 and Qwen3."""
