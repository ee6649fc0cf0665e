"""Training metrics: measurement, console output, files and traces."""

from titanlike.metrics.monitor import Measured, Monitor

__all__ = ["Measured", "Monitor"]
