"""Saving a run and taking it up again."""

from titanlike.checkpoint.loader import consolidate, read_whole
from titanlike.checkpoint.saver import CheckpointManager, Outcome
from titanlike.checkpoint.store import CheckpointMetadata

__all__ = ["CheckpointManager", "CheckpointMetadata", "Outcome", "consolidate", "read_whole"]
