"""Optimizers, learning-rate schedule, gradient clipping, non-finite steps."""
