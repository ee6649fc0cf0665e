"""Collectives of a training step, summed by kind, mesh axis and purpose. Does not import torch."""

from collections import Counter
from dataclasses import dataclass

FLOAT32, INT64 = 4, 8  # bytes of an element


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind, on one mesh axis and for one purpose, in a step of one rank."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send or receive
    axis: str  # mesh axis: replicate, shard, context, tensor, expert, expert_shard or pipeline
    purpose: str  # see `PURPOSES`
    calls: int
    bytes: int  # of the larger of input and output, summed over the calls


PURPOSES = {
    "weights": "gathered by FSDP, for the forward and the backward pass",
    "gradients": "reduced by FSDP",
    "replicated gradients": "of parameters that tensor-parallel ranks replicate, such as those of norms",
    "tied gradients": "of an embedding and an LM head that are tied, but on different pipeline ranks",
    "activations": "of tensor parallelism and between pipeline stages",
    "keys and values": "of the full sequence, with context parallelism",
    "document ids": "of the full sequence, with context parallelism",
    "routed tokens": "sent to the ranks of their experts and back, with expert parallelism",
    "expert counts": "tokens of each expert",
    "loss": "of a vocabulary that tensor-parallel ranks shard",
    "float8 maxima": "of weights and activations, from which scales follow",
    "scalars": "number of tokens, loss and gradient norm",
    "whole matrices": "for Muon, which orthogonalizes each on one rank",
}


class Totals:
    """Sums of calls and bytes by kind, axis and purpose."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, axis: str, purpose: str, calls: int, size: int) -> None:
        """Adds collectives of `size` bytes each."""
        assert purpose in PURPOSES
        self.calls[kind, axis, purpose] += calls
        self.bytes[kind, axis, purpose] += calls * size

    def collectives(self) -> list[Collective]:
        """Returns all sums, those with most bytes first."""
        found = [Collective(*key, calls, self.bytes[key]) for key, calls in self.calls.items() if calls]
        return sorted(found, key=lambda collective: -collective.bytes)
