"""What users bring from other programs: job configs become recipes, and checkpoints those of a run."""
