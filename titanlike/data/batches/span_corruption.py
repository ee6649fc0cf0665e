"""Span corruption: sentinels replace spans of a text, and the target has what they replace.

Which spans depends on the seed and the sequence. As T5 does it, all sequences have the same number of spans and of tokens in them:
inputs have no padding, and targets only to a multiple of a few tokens. Texts begin with what is not replaced.
No torch.
"""

import numpy as np

from titanlike.config import UserError
from titanlike.config.seq2seq import Spans
from titanlike.data.batches.derived_source import DerivedSource
from titanlike.data.batches.packed_dataset import BatchSource, SequenceBatch
from titanlike.data.tokens.arrays import Flags, Numbers
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.losses import IGNORE
from titanlike.utils.counter_rng import token_bits


def sentinels(tokenizer: Tokenizer, number: int, vocab_size: int) -> Numbers:
    """Returns the tokens that replace spans, in order: `<extra_id_0>`, ... of a tokenizer or, if it has none, the last rows of the
    embedding, from the end."""
    special, encoding = tokenizer.codec.special, tokenizer.section.encoding
    names = [f"<extra_id_{index}>" for index in range(number)]
    if names[0] in special:
        if missing := [name for name in names if name not in special]:
            raise UserError(
                f"tokenizer.encoding = {encoding!r} has no {missing[0]}, but sequences have {number} spans; increase "
                "seq2seq.mean_noise_span_length, or reduce training.seq_len"
            )
        tokens = np.array([special[name] for name in names])
        if tokens.max() >= vocab_size:
            raise UserError(f"sequences have {tokenizer.outside_model(int(tokens.max()))}")
        return tokens
    if vocab_size - number < tokenizer.vocab_size:
        raise UserError(
            f"tokenizer.encoding = {encoding!r} has no sentinels such as <extra_id_0>, and model.vocab_size = {vocab_size} has no "
            f"row for each of {number}; {tokenizer.remedy(tokenizer.codec.vocab_size + number)}"
        )
    return vocab_size - 1 - np.arange(number)


def shifted_right(labels: Numbers, start: int) -> Numbers:
    """Returns what the decoder reads (N, T) to predict labels (N, T). Padding becomes `start`."""
    first = np.full((len(labels), 1), start)
    return np.concatenate([first, np.where(labels == IGNORE, start, labels)[:, :-1]], axis=1)


class SpanCorruptedSource(DerivedSource):
    """Sequences of another source, with corrupted spans. The other source has sequences of `spans.raw_len` - 1 tokens and a last
    label, of all of which the text consists."""

    def __init__(
        self, source: BatchSource, spans: Spans, sentinels: Numbers, *, eos: int, start: int, target_len: int, seed: int
    ) -> None:
        """`start` is the token that the decoder starts with."""
        super().__init__(source, spans.input_len)
        self.spans, self.sentinels = spans, sentinels
        self.eos, self.start, self.target_len, self.seed = eos, start, target_len, seed

    def describe(self, steps: int) -> str:
        spans = self.spans
        return f"{self.source.describe(steps)}, {spans.num_noise} of {spans.raw_len} tokens in {spans.num_spans} spans"

    def read(self, step: int, rows: range) -> SequenceBatch:
        batch = self.source.read(step, rows)
        if batch.loss_mask is not None:
            raise UserError(
                "the data has prompts, which are excluded from the loss, but span corruption replaces any token; use text without "
                "prompts or, for pairs of texts, data.source = 'text' and data.prompt_field"
            )
        # A sequence has another id each time it is read, so that other spans are corrupted in each epoch.
        is_noise = self.noise(batch.sequence_ids)
        starts = np.diff(is_noise, axis=1, prepend=~is_noise[:, :1])  # of spans of either kind
        number = np.cumsum(starts & is_noise, axis=1)  # of spans of noise up to each token
        tokens, count = batch.tokens, len(batch.tokens)
        # What each sentinel replaces, and, in the target, the sentinel of the next span in the place of what is between spans.
        inputs = np.where(is_noise, self.sentinels[number - 1], tokens)[~is_noise | starts].reshape(count, -1)
        following = self.sentinels[np.minimum(number, self.spans.num_spans - 1)]
        targets = np.where(is_noise, tokens, following)[is_noise | starts].reshape(count, -1)
        labels = np.full((count, self.target_len), IGNORE, np.int64)
        labels[:, : targets.shape[1]], labels[:, targets.shape[1]] = targets, self.eos
        end = np.full((count, 2), self.eos)  # and a last label, which is not used
        return SequenceBatch(
            batch.sequence_ids,
            np.concatenate([inputs, end], axis=1),
            labels=labels,
            others={"decoder_tokens": shifted_right(labels, self.start)},
        )

    def noise(self, sequence_ids: Numbers) -> Flags:
        """Returns which tokens (N, R) of sequences are replaced."""
        raw_len, num_noise, num_spans = self.spans
        numbers = raw_len - num_noise, num_noise
        lengths = [
            random_segments(token_bits(self.seed, name, sequence_ids, np.arange(number - 1)), num_spans)
            for name, number in zip(("text between spans", "spans"), numbers, strict=True)
        ]
        ends = np.stack(lengths, axis=-1).reshape(len(sequence_ids), -1).cumsum(1)  # of text and span in turns
        starts = np.zeros((len(sequence_ids), raw_len + 1), np.int64)
        np.put_along_axis(starts, ends, 1, axis=1)
        return starts[:, :-1].cumsum(1) % 2 == 1


def random_segments(bits: Numbers, number: int) -> Numbers:
    """Divides M items into `number` segments of at least one; all divisions are equally likely. Returns their lengths (N, number),
    given random bits (N, M - 1)."""
    cuts = np.sort(np.argsort(bits, axis=1, kind="stable")[:, : number - 1], axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=bits.shape[1] + 1)
