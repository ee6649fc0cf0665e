"""Files, documents and tokenizers."""
