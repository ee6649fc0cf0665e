"""The first layer: files in any store, and the documents and conversations in them. No torch."""
