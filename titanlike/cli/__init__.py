"""The commands. None imports torch before it has something to do."""
