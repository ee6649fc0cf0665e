"""The third layer: tokens as sequences, and sequences as the batches of each step and rank."""
