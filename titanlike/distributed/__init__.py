"""The processes of a run: who they are, how they communicate, how they stop."""
