"""Tokenization of text into token shards."""
