"""Command-line programs. None imports torch before its arguments are checked."""
