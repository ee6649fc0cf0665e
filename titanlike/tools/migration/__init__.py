"""What users bring from other programs: job configs become recipes, and checkpoints become a run's."""
