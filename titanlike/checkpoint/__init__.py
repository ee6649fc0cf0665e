"""Checkpoints: saving and resuming under any parallel layout."""

from titanlike.checkpoint.saver import CheckpointManager, SaveResult
from titanlike.checkpoint.store import CheckpointMetadata

__all__ = ["CheckpointManager", "CheckpointMetadata", "SaveResult"]
