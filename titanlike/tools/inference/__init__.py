"""Loading a model for generation and evaluation, and its KV cache."""
