"""Gemma 2 and 3."""
