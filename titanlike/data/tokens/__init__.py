"""The second layer: documents and conversations as tokens, and token shards. No torch."""
