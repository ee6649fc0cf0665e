"""Utilities without knowledge of training."""
