"""Generation and evaluation, from a run, a checkpoint or a Hugging Face folder, and during training."""
