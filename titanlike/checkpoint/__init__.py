"""Saving a run and taking it up again."""

from titanlike.checkpoint.saver import Checkpoints, Outcome
from titanlike.checkpoint.loader import consolidate, read_whole
from titanlike.checkpoint.store import Saved

__all__ = ["Checkpoints", "Outcome", "Saved", "consolidate", "read_whole"]
