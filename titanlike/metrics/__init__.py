"""Training metrics: measurement, console output, files and traces."""

from titanlike.metrics.monitor import Measured, Monitor
from titanlike.metrics.profiler import Profiler

__all__ = ["Measured", "Monitor", "Profiler"]
