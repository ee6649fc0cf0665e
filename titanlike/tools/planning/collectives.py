"""Collectives of a training step by kind, mesh axis and purpose, and their time over the links. Does not import torch."""

from collections import Counter
from dataclasses import dataclass

from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job

FLOAT32, FLOAT64, INT64 = 4, 8, 8  # bytes of an element


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
    "replicated gradients": "of parameters that tensor-parallel ranks replicate, such as norms",
    "tied gradients": "of an embedding and an LM head that are tied, but on different pipeline ranks",
    "activations": "of tensor parallelism and between pipeline stages",
    "keys and values": "of the full sequence, with context parallelism",
    "document ids": "of the full sequence, with context parallelism",
    "routed tokens": "sent to the ranks of their experts and back, with expert parallelism",
    "expert counts": "tokens of each expert",
    "loss": "of a vocabulary that tensor-parallel ranks shard, and of answers that context-parallel ranks share",
    "float8 maxima": "of weights and activations, from which scales follow",
    "scalars": "number of tokens, loss and gradient norm",
    "attention logits": "the largest one of each head, for QK-clip",
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


@dataclass(frozen=True)
class Links:
    """The links that the collectives of a job use. Ranks are numbered with the axis `tensor` innermost, and fill nodes in order."""

    job: Job
    hardware: Hardware

    def group(self, collective: Collective) -> tuple[int, int]:
        """Returns the number of ranks of a collective, and the distance between two neighbours among them in ranks."""
        layout = self.job.layout
        inner = layout.tensor
        if collective.purpose == "whole matrices" and collective.kind == "all-to-all":
            return self.job.num_shards * layout.tensor, 1
        if collective.axis == "tensor":
            return layout.tensor, 1
        if collective.axis == "expert":
            return layout.expert, inner
        if collective.axis == "expert_shard":
            return self.job.num_expert_shards, inner * layout.expert
        if collective.axis == "context" and collective.purpose in ("keys and values", "document ids", "expert counts"):
            return layout.context, inner
        if collective.axis in ("context", "shard") and collective.purpose != "float8 maxima":
            return self.job.num_shards, inner  # FSDP shards over both
        if collective.axis == "context":
            return layout.context if layout.shard > 1 else self.job.num_shards, inner
        if collective.axis == "shard":
            return self.job.num_shards, inner
        inner *= self.job.num_shards
        return (
            (layout.replicate, inner) if collective.axis == "replicate" else (layout.pipeline, inner * layout.replicate)
        )

    def spans_nodes(self, collective: Collective) -> bool:
        """Whether some of the ranks of a group are on different nodes."""
        size, distance = self.group(collective)
        return size > 1 and size * distance > self.hardware.gpus_per_node

    @property
    def _exchange_fraction(self) -> float:
        """Speed of all-to-alls within a node relative to all-gathers. Kernels that send a token once write to other ranks directly:
        DeepEP publishes 153 of 160 GB/s on H800."""
        return 1.0 if self.job.program.ranks_per_token else self.hardware.exchange_fraction

    def seconds(self, collective: Collective) -> float:
        """Returns the time of all its calls."""
        size, distance = self.group(collective)
        if size == 1 or not collective.calls:
            return 0.0
        if collective.kind in ("send", "receive"):  # between the ends of the pipeline
            return collective.calls * self.transfer_seconds(collective.bytes / collective.calls, 0, size - 1)
        hardware = self.hardware
        bandwidth = hardware.node_gb_per_second * hardware.node_fraction * 1e9
        if not hardware.has_switch:  # each two GPUs have their own link
            local = max(2, min(size, hardware.gpus_per_node // distance))
            bandwidth *= (local - 1) / max(1, hardware.gpus_per_node - 1)
        latency = hardware.node_latency_us * 1e-6
        if self.spans_nodes(collective):
            # A ring enters and leaves each node once, over the network links of all its ranks there.
            local = max(1, min(size, hardware.gpus_per_node // distance))
            fraction = hardware.network_fraction if local > 1 else hardware.single_fraction
            network = local * hardware.network_gb_per_second * fraction * 1e9
            bandwidth = min(bandwidth, network)
            latency += (-(-size // local) - 1) * hardware.network_latency_us * 1e-6
            if collective.axis == "expert":  # each rank sends what leaves the node over its own network link
                outside = (size - local) / size / (network / local)
                inside = (local - 1) / size / (bandwidth * self._exchange_fraction)
                return collective.calls * latency + collective.bytes * max(outside, inside)
        rounds = 2 if collective.kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        moved = float(collective.bytes)
        if not self.spans_nodes(collective):
            moved += min(moved, collective.calls * hardware.node_half_mb * 1e6)
        if collective.kind == "all-to-all":
            bandwidth *= self._exchange_fraction
        return collective.calls * latency + rounds * moved * (size - 1) / size / bandwidth

    def transfer_seconds(self, size: float, sender: int, receiver: int) -> float:
        """Returns the time of a transfer of `size` bytes between two pipeline ranks. Those of some groups are on different nodes
        although those of others are not: the slowest transfer counts."""
        hardware, layout = self.hardware, self.job.layout
        stride = layout.tensor * self.job.num_shards * layout.replicate
        bandwidth = hardware.node_gb_per_second * hardware.node_fraction
        if not hardware.has_switch:
            bandwidth /= max(1, hardware.gpus_per_node - 1)
        nodes = [
            (first + sender * stride, first + receiver * stride) for first in range(min(stride, hardware.gpus_per_node))
        ]
        if any(one // hardware.gpus_per_node != other // hardware.gpus_per_node for one, other in nodes):
            bandwidth = min(bandwidth, hardware.network_gb_per_second * hardware.single_fraction)
        return hardware.node_latency_us * 1e-6 + size / (bandwidth * 1e9)
