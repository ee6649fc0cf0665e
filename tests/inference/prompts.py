"""Prompts of different lengths, and the greedy tokens after them."""

from collections.abc import Sequence

from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.inference.logits import NextLogits

PROMPTS = ["def main(", "", "a much longer prompt, so that the others are padded", "class"]


def byte_tokenizer() -> Tokenizer:
    return build_tokenizer(TokenizerSection())


def tokens_of(
    next_logits: NextLogits, prompts: Sequence[Sequence[int]], count: int, vocab_size: int
) -> list[list[int]]:
    """Returns the greedy tokens after each prompt, without regard to separators."""
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(count):
        for sequence, token in zip(sequences, next_logits(sequences)[:, :vocab_size].argmax(-1).tolist(), strict=True):
            sequence.append(token)
    return sequences
