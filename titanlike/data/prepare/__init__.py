"""Tokenizing text into token shards."""
