"""Tokenized data sources and deterministic, resumable batches."""
