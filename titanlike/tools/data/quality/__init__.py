"""What documents are worth training on: duplicates, filters and repeated lines, as stages of `titanlike data prepare`."""
