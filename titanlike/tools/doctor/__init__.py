"""`titanlike doctor`: what this machine lacks for training."""
