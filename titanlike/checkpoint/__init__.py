"""Checkpoints: saving and resuming under any parallel layout."""

from titanlike.checkpoint.loader import consolidate, read_whole
from titanlike.checkpoint.saver import CheckpointManager, SaveResult
from titanlike.checkpoint.store import CheckpointMetadata

__all__ = ["CheckpointManager", "CheckpointMetadata", "SaveResult", "consolidate", "read_whole"]
