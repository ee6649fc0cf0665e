"""Masked tokens, which an encoder predicts: a function of the seed, the sequence and the position in it."""

from typing import Any

import numpy as np

from titanlike.config import UserError
from titanlike.config.mlm import MaskedTokens
from titanlike.config.sections import Data
from titanlike.data.batches import sources
from titanlike.data.batches.derived_source import DerivedSource
from titanlike.data.batches.packed_dataset import BatchSource, SequenceBatch, separate_documents
from titanlike.data.batches.sources import Sources
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.losses import IGNORE
from titanlike.utils.counter_rng import token_bits

MASKED, RANDOM = 0.8, 0.1  # shares of the predicted tokens: replaced by the mask token, and by a random token
MASK_NAMES = ("[MASK]", "<mask>")


def open_sources(
    section: Data,
    tokenizer: Tokenizer,
    *,
    masking: MaskedTokens,
    model_vocab_size: int,
    seed: int,
    **options: Any,
) -> Sources:
    """Opens text as `sources.open_sources` does, and masks its tokens. The same tokens of held-out text are masked each time."""
    opened = sources.open_sources(section, tokenizer, seed=seed, **options)
    mask = mask_token(tokenizer, masking, model_vocab_size)
    training, validation = (
        source
        and MaskedSource(source, tokenizer, mask, masking.mask_probability, seed=seed, separate=section.document_masks)
        for source in (opened.training, opened.validation)
    )
    assert training
    return Sources(training, validation)


def mask_token(tokenizer: Tokenizer, masking: MaskedTokens, model_vocab_size: int) -> int:
    """Returns the token that replaces others: one of the tokenizer, or the first that it does not have."""
    special, encoding = tokenizer.codec.special, tokenizer.section.encoding
    tokenizer.check_special("mlm.mask_token", masking.mask_token)
    names = (masking.mask_token,) if masking.mask_token else MASK_NAMES
    token = next((special[name] for name in names if name in special), tokenizer.codec.vocab_size)
    if token >= model_vocab_size:
        raise UserError(
            f"tokenizer.encoding = {encoding!r} has no mask token, and model.vocab_size = {model_vocab_size} has no row for one; "
            f"{tokenizer.remedy(token + 1)}, or set mlm.mask_token to one of its special tokens"
        )
    return token


class MaskedSource(DerivedSource):
    """Sequences of another source, with masked tokens as their labels."""

    def __init__(
        self, source: BatchSource, tokenizer: Tokenizer, mask: int, probability: float, *, seed: int, separate: bool
    ) -> None:
        """`separate` gives the sequences the ids of their documents, which are found before tokens are replaced."""
        super().__init__(source, source.seq_len)
        self.tokenizer, self.mask, self.probability = tokenizer, mask, probability
        self.seed, self.separate = seed, separate
        self.kept = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]

    def describe(self, steps: int) -> str:
        return f"{self.source.describe(steps)}, {100 * self.probability:g}% of the tokens masked"

    def read(self, step: int, rows: range) -> SequenceBatch:
        batch = self.source.read(step, rows)
        tokens = batch.tokens[:, :-1]
        documents = batch.document_ids
        if documents is None and self.separate:
            documents = separate_documents(batch.tokens, self.tokenizer.separator)
        # A sequence has another id each time it is read, so that other tokens are masked in each epoch.
        chance, action, replacement = (
            token_bits(self.seed, name, batch.sequence_ids, np.arange(self.seq_len))
            for name in ("masked tokens", "their replacement", "random tokens")
        )
        is_label = (chance < self.probability * 2**32) & ~np.isin(tokens, self.kept)
        if batch.loss_mask is not None:  # prompts are not predicted
            is_label &= batch.loss_mask[:, :-1]
        random = replacement * self.tokenizer.vocab_size >> 32
        changed = np.where(action < (MASKED + RANDOM) * 2**32, random, tokens)
        changed = np.where(action < MASKED * 2**32, self.mask, changed)
        masked = batch.tokens.copy()
        masked[:, :-1] = np.where(is_label, changed, tokens)
        labels = np.where(is_label, tokens, IGNORE)
        return SequenceBatch(batch.sequence_ids, masked, document_ids=documents, labels=labels)
