"""Time of collectives over the links of a cluster. Does not import torch."""

from dataclasses import dataclass

from titanlike.tools.planning.collectives import Collective
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job


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
        """Whether some of its ranks are on different nodes."""
        size, distance = self.group(collective)
        last = 2 if collective.kind in ("send", "receive") else size
        return (last - 1) * distance >= self.hardware.gpus_per_node

    def seconds(self, collective: Collective) -> float:
        """Returns the time of all its calls."""
        size, distance = self.group(collective)
        if size == 1 or not collective.calls:
            return 0.0
        hardware = self.hardware
        bandwidth = hardware.node_gb_per_second * hardware.node_fraction * 1e9
        latency = hardware.node_latency_us * 1e-6
        if self.spans_nodes(collective):
            # A ring enters and leaves each node once, over the network links of all its ranks there.
            local = max(1, min(size, hardware.gpus_per_node // distance))
            network = local * hardware.network_gb_per_second * hardware.network_fraction * 1e9
            bandwidth = min(bandwidth, network)
            latency += (-(-size // local) - 1) * hardware.network_latency_us * 1e-6
            if collective.axis == "expert":  # each rank sends what leaves the node over its own network link
                outside = (size - local) / size / (network / local)
                return collective.calls * latency + collective.bytes * max(outside, (local - 1) / size / bandwidth)
        if collective.kind in ("send", "receive"):
            return collective.calls * hardware.node_latency_us * 1e-6 + collective.bytes / bandwidth
        rounds = 2 if collective.kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        return collective.calls * latency + rounds * collective.bytes * (size - 1) / size / bandwidth
