"""Starting, checking and resuming a run."""
