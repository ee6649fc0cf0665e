"""Data in three layers, each of which imports only those before it: documents, tokens, batches."""
