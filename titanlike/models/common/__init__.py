"""What the model families share."""
