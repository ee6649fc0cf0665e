"""Test of the nodes of a job: whether their clocks agree, and how fast their links are compared with what is expected of them.

All ranks of the process group take part in a measurement. `titanlike doctor --network` prints the findings on rank 0.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from titanlike.config import UserError
from titanlike.distributed import process_group
from titanlike.tools.doctor.finding import Finding
from titanlike.tools.planning.calibrate import COLLECTIVE_BYTES, link_speed
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.measure import Timer, collective_seconds

SECONDS = 15.0  # limit of a measurement of links, of which there are up to four
EXCHANGES = 20  # messages to each node, of which the fastest one compares the clocks
MAX_SKEW = 0.1  # seconds; NTP synchronizes clocks to milliseconds
MIN_FRACTION = 0.7  # of the expected bandwidth

CLOCK_REMEDY = "synchronize it, for example with timedatectl set-ntp true"
NODE_REMEDY = (
    "look at nvidia-smi topo --matrix and nvidia-smi nvlink --status there, and at NCCL's variables in titanlike doctor"
)
NETWORK_REMEDY = (
    "NCCL_DEBUG=INFO says whether NCCL uses RDMA (NET/IB, NET/OFI) or TCP (NET/Socket), and titanlike doctor checks the devices of "
    "a node"
)
OTHER_NETWORK = "; if this cluster has another network, describe it in a file for --hardware"


@dataclass(frozen=True)
class Clock:
    """How far the clock of a node is ahead of node 0's, in seconds, and the uncertainty."""

    ahead: float
    uncertainty: float


def findings(
    device: torch.device, hardware: Hardware | None, ranks_per_node: int, seconds: float = SECONDS
) -> list[Finding]:
    """Measures clocks and links, and returns the findings, on all ranks. Without `hardware`, nodes are compared with each other.

    `seconds` limits each measurement of links. Raises `UserError` if nodes have different numbers of processes.
    """
    if len(set(process_group.all_gather_object(ranks_per_node))) > 1:
        raise UserError("the nodes have different numbers of processes; start the same number on each, with NPROC")
    names = process_group.all_gather_object(socket.gethostname())[::ranks_per_node]
    nodes = [f"node {number} ({name})" for number, name in enumerate(names)]
    timer = Timer(device, seconds)
    found = list(compare_clocks(clocks(ranks_per_node), nodes))
    within = _speeds(timer, _within_nodes(ranks_per_node), ranks_per_node)
    between = _speeds_between_nodes(timer, ranks_per_node)
    everywhere = _speeds(timer, [range(process_group.world_size())], process_group.world_size()) if between else []
    node_speed, pair_speed, job_speed = expected_speeds(hardware, ranks_per_node)
    if within:
        text = f"bus bandwidth of {ranks_per_node} ranks"
        found += compare_speeds("within nodes", within, nodes, text, node_speed, NODE_REMEDY)
    if between:
        text = "each rank to one of the next node"
        remedy = NETWORK_REMEDY + (OTHER_NETWORK if hardware else "")
        found += compare_speeds("between nodes", between, nodes, text, pair_speed, remedy)
        text = f"bus bandwidth of {process_group.world_size()} ranks"
        found += compare_speeds("all nodes", everywhere[:1], ["the job"], text, job_speed, remedy)
    if not within and not between:
        found.append(Finding("ok", "links", "not measured: one process"))
    return found


def clocks(ranks_per_node: int) -> list[Clock]:
    """Returns the clock of each node, as seen from node 0, on all ranks."""
    rank, found = process_group.rank(), [Clock(0.0, 0.0)]
    for other in range(ranks_per_node, process_group.world_size(), ranks_per_node):
        if rank == 0:
            found.append(min((_exchange(other) for _ in range(EXCHANGES)), key=lambda clock: clock.uncertainty))
        elif rank == other:
            for _ in range(EXCHANGES):
                dist.recv(torch.empty(1, dtype=torch.float64), 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    return process_group.broadcast_object(found)


def _exchange(other: int) -> Clock:
    answer = torch.zeros(1, dtype=torch.float64)
    sent = time.time()
    dist.send(answer, other)
    dist.recv(answer, other)
    received = time.time()
    return Clock(answer.item() - (sent + received) / 2, (received - sent) / 2)


def compare_clocks(found: Sequence[Clock], nodes: Sequence[str]) -> Iterator[Finding]:
    """Names the nodes whose clocks are surely wrong. One node has no finding."""
    is_wrong = [abs(clock.ahead) - clock.uncertainty > MAX_SKEW for clock in found]
    if 2 * sum(is_wrong) > len(found):  # node 0 itself is wrong, or all are
        text = f"the clocks of {sum(is_wrong)} of {len(found)} nodes differ from the clock of {nodes[0]} by"
        times = [abs(clock.ahead) for clock, wrong in zip(found, is_wrong, strict=True) if wrong]
        yield Finding("warning", "clocks", f"{text} {min(times):.3g} to {max(times):.3g} s", CLOCK_REMEDY)
        return
    for node, clock, wrong in zip(nodes, found, is_wrong, strict=True):
        if wrong:
            side = "ahead of" if clock.ahead > 0 else "behind"
            yield Finding("warning", "clocks", f"{node} is {abs(clock.ahead):.3g} s {side} {nodes[0]}", CLOCK_REMEDY)
    if len(found) > 1 and not any(is_wrong):
        limit = max(abs(clock.ahead) + clock.uncertainty for clock in found)
        yield Finding("ok", "clocks", f"{len(found)} nodes agree within {limit * 1e3:.3g} ms")


def compare_speeds(
    subject: str, speeds: Sequence[float], nodes: Sequence[str], measured: str, expected: float, remedy: str
) -> list[Finding]:
    """Names the nodes that are slower than expected. If `expected` is 0, the median of the nodes is expected."""
    reference = expected or median(speeds)
    slow = [number for number, speed in enumerate(speeds) if speed < MIN_FRACTION * reference]
    origin = "expected" if expected else "the median"
    shown = " to ".join(f"{speed:.3g}" for speed in sorted({min(speeds), max(speeds)})) + " GB/s"
    if not slow:
        text = f"{shown}, {measured}" + (f"; {expected:.3g} expected" if expected else "")
        return [Finding("ok", subject, text)]
    if len(slow) == len(speeds) > 1:
        text = f"all {len(nodes)} nodes: {shown}, {measured}; {reference:.3g} {origin}"
        return [Finding("warning", subject, text, remedy)]
    return [
        Finding(
            "warning", subject, f"{nodes[each]}: {speeds[each]:.3g} GB/s, {measured}; {reference:.3g} {origin}", remedy
        )
        for each in slow
    ]


def expected_speeds(hardware: Hardware | None, ranks_per_node: int) -> tuple[float, float, float]:
    """Returns the GB/s that large collectives alone reach within a node, between two nodes and over all; 0 if it is unknown."""
    if hardware is None:
        return 0.0, 0.0, 0.0
    node = hardware.node_gb_per_second * hardware.node_fraction
    if not hardware.has_switch:  # each two GPUs have their own link
        node *= (ranks_per_node - 1) / max(1, hardware.gpus_per_node - 1)
    network = hardware.network_gb_per_second * hardware.network_fraction
    # A ring enters and leaves each node once, over the links of all its ranks.
    everywhere = ranks_per_node * network
    return node, network, min(node, everywhere) if ranks_per_node > 1 else everywhere


def _within_nodes(ranks_per_node: int) -> list[range]:
    return [range(first, first + ranks_per_node) for first in range(0, process_group.world_size(), ranks_per_node)]


def _speeds_between_nodes(timer: Timer, ranks_per_node: int) -> list[float]:
    """Returns, for each node, the speed of its slowest rank with the better of its two neighbours in a ring: a slow node is slow
    with both. Ranks with the same number in neighbouring nodes communicate, all of them at the same time."""
    num_nodes = process_group.world_size() // ranks_per_node
    best = [0.0] * num_nodes
    for pairs in rounds(num_nodes):
        members = [*pairs, *([node] for node in range(num_nodes) if not any(node in pair for pair in pairs))]
        partition = [
            [node * ranks_per_node + rank for node in group] for group in members for rank in range(ranks_per_node)
        ]
        speeds = _speeds(timer, partition, ranks_per_node)
        best = [max(pair) for pair in zip(best, speeds, strict=True)]
    return best if num_nodes > 1 else []


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Returns the pairs of neighbours of a ring, in rounds in which no node has two of them."""
    pairs = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    last = num_nodes - num_nodes % 2
    if num_nodes < 3:
        return [pairs[: num_nodes - 1]] if num_nodes > 1 else []
    return list(filter(None, (pairs[0:last:2], pairs[1:last:2], pairs[last:])))


def _speeds(timer: Timer, partition: Sequence[Sequence[int]], ranks_per_node: int) -> list[float]:
    """Returns the bandwidth of the groups in GB/s: for each node, or each `ranks_per_node` ranks, of the slowest rank. A group
    of one rank has none, and counts as 0."""
    group = process_group.subgroup(partition)
    speed = 0.0
    if group.size() > 1:
        speed = link_speed(collective_seconds(timer, group, COLLECTIVE_BYTES[timer.device.type]), group.size())[0]
    speeds = process_group.all_gather_object(speed)
    found = [min(speeds[first : first + ranks_per_node]) for first in range(0, len(speeds), ranks_per_node)]
    return found if any(found) else []
