"""Settings and checkpoints of other training programs."""
