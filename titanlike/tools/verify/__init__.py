"""A recipe or any module under a layout against one process, numerically."""
