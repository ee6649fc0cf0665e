"""Saving a run and taking it up again."""

from titanlike.checkpoint.saving import Checkpoints, Outcome
from titanlike.checkpoint.state import consolidate, read_whole
from titanlike.checkpoint.store import Saved

__all__ = ["Checkpoints", "Outcome", "Saved", "consolidate", "read_whole"]
