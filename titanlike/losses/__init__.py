"""Losses of an LM head. All are computed for a chunk of tokens at a time, together with their gradients: see `chunked.py`."""

IGNORE = -100  # label of a token that does not contribute to the loss
