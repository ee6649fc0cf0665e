"""Optimizers, learning-rate schedule, gradient clipping."""
