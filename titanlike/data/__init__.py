"""From text to batches: a tokenizer, a source of tokens, and batches that are a function of the seed and the step."""
