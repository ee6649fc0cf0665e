"""Optimizers, learning-rate schedule, gradient clipping, non-finite steps."""

from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import learning_rate, set_learning_rate

__all__ = [
    "NonFiniteGuard",
    "build_optimizer",
    "clip_gradients",
    "gradient_norms",
    "learning_rate",
    "set_learning_rate",
]
