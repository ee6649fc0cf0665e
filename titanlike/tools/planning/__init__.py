"""Memory, communication, time and cost of a run, computed before it starts."""
