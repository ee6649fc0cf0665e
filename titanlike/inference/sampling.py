"""Choice of the next token from logits: greedy, or at random among the likely tokens.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlike.inference.logits import check_finite
from titanlike.utils.counter_rng import derive_seed

MIN_TEMPERATURE = 1e-30  # a float32


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens."""

    temperature: float = 0.0
    """Divides the logits. 0: always the most likely token (greedy)."""
    top_k: int = 0
    """Choose among this many of the most likely tokens. 0: all."""
    top_p: float = 1.0
    """Choose among the fewest of the most likely tokens whose probabilities sum to at least this. 1: all."""


class Sampler:
    """Chooses a token for each sequence of a batch. Each sequence has its own random numbers, independent of the batch."""

    def __init__(self, sampling: Sampling, seed: int, sequence_ids: Sequence[int]) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(derive_seed(seed, f"sample {n}")) for n in sequence_ids]

    def __call__(self, logits: Tensor) -> list[int]:
        """Returns tokens for logits (B, V)."""
        check_finite(logits)
        if not self.sampling.temperature:
            return logits.argmax(-1).tolist()
        probs = next_token_probs(logits, self.sampling).cpu()
        rows = zip(probs, self.generators, strict=True)
        return [int(torch.multinomial(row, 1, generator=generator)) for row, generator in rows]


def next_token_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probabilities (B, V) with which tokens are chosen, for a temperature above 0."""
    logits = logits.float()
    # The difference and the limit avoid infinity divided by infinity at a very low temperature.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, MIN_TEMPERATURE)
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs = logits.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
        # A token is left out if those before it have the probability already.
        is_rest = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(is_rest).scatter(-1, tokens, is_rest), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs
