"""`titanlike doctor --network`: wrong clocks and slow nodes are named, and no others."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.launching import free_port, python
from tests.pool import Ranks
from titanlike.tools.doctor import network
from titanlike.tools.doctor.finding import Finding
from titanlike.tools.doctor.network import Clock, compare_clocks, compare_speeds, rounds
from titanlike.tools.planning.hardware import load_hardware

NODES = [f"node {number} (host-{number})" for number in range(4)]


def _findings(ranks_per_node: int, ahead: float, hardware: str = "") -> list[Finding]:
    """The clock of all ranks but those of node 0 is ahead by some seconds."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(network.COLLECTIVE_BYTES, "cpu", (2**12, 2**18))
        patch.setattr(network, "time", SimpleNamespace(time=lambda: time.time() + ahead * (rank >= ranks_per_node)))
        expected = load_hardware(hardware) if hardware else None
        return network.findings(torch.device("cpu"), expected, ranks_per_node, seconds=0.05)


def test_nodes_are_measured_and_a_wrong_clock_is_named(ranks: Ranks) -> None:
    first, *others = ranks(4).run(_findings, 2, 0.0)
    assert all(other == first for other in others)
    assert [each.subject for each in first] == ["clocks", "within nodes", "between nodes", "all nodes"]
    assert first[0].status == "ok"  # the speeds of two nodes may differ on a busy machine
    found = {each.subject: each for each in ranks(4).run(_findings, 2, -30.0, "h100")[0]}
    assert "node 1 (" in found["clocks"].text and " is 30 s behind node 0 (" in found["clocks"].text
    # This machine is no H100: both nodes, and the job, are slower than expected.
    assert {each.status for each in found.values()} == {"warning"} and all(each.remedy for each in found.values())
    assert found["within nodes"].text.startswith("all 2 nodes: ") and "360 expected" in found["within nodes"].text
    assert found["all nodes"].text.startswith("the job: ") and "85 expected" in found["all nodes"].text


def _planted(slow: int) -> list[float]:
    """Groups with this rank are slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "collective_seconds", lambda timer, group, sizes: dist.get_process_group_ranks(group))
        patch.setattr(network, "link_speed", lambda members, size: (1.0 if slow in members else 9.0, 0.0, ""))
        return network._speeds_between_nodes(network.Timer(torch.device("cpu"), 0.1), 1)


def test_a_slow_node_is_told_from_its_neighbours(ranks: Ranks) -> None:
    world_size = 4
    for slow in (0, world_size - 1):
        expected = [1.0 if node == slow else 9.0 for node in range(world_size)]
        assert ranks(world_size).run(_planted, slow)[0] == expected


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 8])
def test_rounds_have_each_pair_of_neighbours_once(num_nodes: int) -> None:
    pairs = [pair for pairs in rounds(num_nodes) for pair in pairs]
    ring = {frozenset((node, (node + 1) % num_nodes)) for node in range(num_nodes)} if num_nodes > 1 else set()
    assert set(map(frozenset, pairs)) == ring and len(pairs) == len(ring)
    for together in rounds(num_nodes):
        nodes = [node for pair in together for node in pair]
        assert len(nodes) == len(set(nodes))


def test_clocks_within_the_uncertainty_agree() -> None:
    def texts(*clocks: tuple[float, float]) -> list[str]:
        return [
            each.text
            for each in compare_clocks([Clock(*clock) for clock in ((0.0, 0.0), *clocks)], NODES[: len(clocks) + 1])
        ]

    assert texts() == []
    assert texts((2e-3, 1e-3), (-5e-4, 1e-4)) == ["3 nodes agree within 3 ms"]
    assert texts((0.5, 0.45)) == ["2 nodes agree within 950 ms"]
    assert texts((0.5, 0.01), (0.0, 0.01)) == ["node 1 (host-1) is 0.5 s ahead of node 0 (host-0)"]
    # The clock of node 0 is wrong.
    text = "the clocks of 3 of 4 nodes differ from the clock of node 0 (host-0) by 9 to 9.01 s"
    assert texts((9.0, 0.01), (9.01, 0.01), (9.0, 0.01)) == [text]


def test_slow_nodes_are_named() -> None:
    def found(speeds: list[float], expected: float) -> list[Finding]:
        return compare_speeds("links", speeds, NODES[: len(speeds)], "measured", expected, "remedy")

    assert found([340.0, 350.0], 360.0) == [Finding("ok", "links", "340 to 350 GB/s, measured; 360 expected")]
    slow = "node 1 (host-1): 120 GB/s, measured; "
    assert found([350.0, 120.0, 340.0], 360.0) == [Finding("warning", "links", slow + "360 expected", "remedy")]
    assert found([350.0, 120.0, 340.0], 0.0) == [Finding("warning", "links", slow + "340 the median", "remedy")]
    assert found([100.0], 0.0) == [Finding("ok", "links", "100 GB/s, measured")]
    text = "all 2 nodes: 100 to 110 GB/s, measured; 360 expected"
    assert found([100.0, 110.0], 360.0) == [Finding("warning", "links", text, "remedy")]


@pytest.mark.slow
def test_one_command_on_each_node(tmp_path: Path) -> None:
    job = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NPROC": "1"}
    words = ("-m", "titanlike.tools.cli.main", "doctor", "--network", "--json")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda node: python(tmp_path, *words, variables=job | {"NODE_RANK": node}), "01")
    waiting = f"launch  1 process on each of 2 nodes, which meet at 127.0.0.1:{job['MASTER_PORT']}\n"
    assert first.stderr.startswith(waiting) and second.stderr.startswith(waiting)
    assert [each["subject"] for each in json.loads(first.stdout)] == ["clocks", "between nodes", "all nodes"]
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, "")  # one report
