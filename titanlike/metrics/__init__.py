"""Training metrics: measurement, console output, and files."""

from titanlike.metrics.monitor import Monitor

__all__ = ["Monitor"]
