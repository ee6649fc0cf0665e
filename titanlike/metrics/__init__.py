"""What a run tells of itself: rates from measured time, and where they are shown and kept."""

from titanlike.metrics.monitor import Monitor

__all__ = ["Monitor"]
