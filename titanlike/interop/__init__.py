"""Weights in and out: Hugging Face folders, and checkpoints to start from. Modules are imported one by one: some need no torch."""
