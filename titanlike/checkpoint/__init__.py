"""Saving a run and taking it up again."""

from titanlike.checkpoint.store import Checkpoints, Saved, read_whole

__all__ = ["Checkpoints", "Saved", "read_whole"]
