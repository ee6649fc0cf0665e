"""Saving a run and taking it up again."""

from titanlike.checkpoint.store import Checkpoints, Saved

__all__ = ["Checkpoints", "Saved"]
