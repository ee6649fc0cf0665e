"""Training metrics: measurement, console output, and files."""

from titanlike.metrics.monitor import Measured, Monitor

__all__ = ["Measured", "Monitor"]
