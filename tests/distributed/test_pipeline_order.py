"""The order of point-to-point operations of the pipeline schedules, which must not deadlock with NCCL."""

import pytest
import torch

from tests import nccl
from tests.decoder import Batch, Decoder
from tests.pool import Ranks
from tests.training import mesh_of
from titanlike.config.layout import SCHEDULES
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.utils import compat

NUM_GROUPS = 2 if compat.has_gradient_group() else 1


def _operations(cases: list[tuple[str, int, list[int]]]) -> list[dict[str, list[nccl.Batch]]]:
    """Returns what this rank issues for each schedule, number of stages per rank and numbers of micro-batches: in a training step,
    in validation and in a forward pass for generation."""
    mesh = mesh_of("cpu", pipeline=torch.distributed.get_world_size()).pipeline
    found = []
    for schedule, stages_per_rank, counts in cases:
        num_stages = stages_per_rank * mesh.size()
        model = Pipeline(Decoder(num_stages), mesh, schedule=schedule, split=[1] * num_stages, dtype=torch.float32)
        operations = {}
        for count in counts:
            batches = [Batch(torch.zeros(1, 2, dtype=torch.long)) for _ in range(count)]
            with nccl.recorded() as operations[f"{schedule}, {stages_per_rank} stages, step of {count}"]:
                model.forward_backward(batches, lambda loss: loss)
            with nccl.recorded() as operations[f"{schedule}, {stages_per_rank} stages, validation of {count}"]:
                model.evaluate(batches)
        with nccl.recorded() as operations[f"{schedule}, {stages_per_rank} stages, generation"]:
            model(tokens=batches[0].inputs["tokens"])
        found.append(operations)
    return found


def _cases(num_ranks: int) -> list[tuple[str, int, list[int]]]:
    cases = []
    for name, schedule in SCHEDULES.items():
        for stages in [schedule.stages_per_rank] if schedule.fixed else [2, 3]:
            fewest = num_ranks * (stages if name == "dualpipev" else 1)
            few = [1, 3] if name in ("gpipe", "zbv") else []
            cases.append((name, stages, [*few, fewest, 2 * fewest, 3 * fewest]))
    return cases


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_schedule_deadlocks_with_nccl(ranks: Ranks, num_ranks: int) -> None:
    by_rank = ranks(num_ranks).run(_operations, _cases(num_ranks))
    for (_, _, counts), *of_case in zip(_cases(num_ranks), *by_rank, strict=True):
        for name in of_case[0]:
            operations = [of_rank[name] for of_rank in of_case]
            assert all(operations), name
            assert nccl.blocked(operations) == {}, name
        first = f"step of {counts[0]}"
        for of_rank in of_case:
            (step,) = (batches for name, batches in of_rank.items() if name.endswith(first))
            connected = {transfer for batch in step[:NUM_GROUPS] for transfer in batch}
            used = {transfer for batches in of_rank.values() for batch in batches for transfer in batch}
            # Before the schedule starts, in both directions, by one batch per communicator. Ranks that exchange the gradients of a
            # tied weight do so on the first one.
            assert used <= connected
            assert {(transfer.sends, transfer.peer) for transfer in used} == {
                (transfer.sends, transfer.peer) for transfer in connected
            }


@pytest.mark.skipif(NUM_GROUPS == 1, reason="torch exchanges activations and gradients on one communicator")
def test_activations_and_gradients_have_a_communicator_each(ranks: Ranks) -> None:
    schedules = [(name, schedule.stages_per_rank) for name, schedule in SCHEDULES.items() if not schedule.v_shaped]
    # The second of two equal steps, in which stages neither connect nor exchange shapes.
    by_rank = ranks(4).run(_operations, [(name, stages, [4, 4]) for name, stages in schedules])
    for rank, of_rank in enumerate(by_rank):
        for operations in of_rank:
            (step,) = (batches for name, batches in operations.items() if "step of" in name)
            if rank in (0, 3):
                assert len(step.pop()) == 2  # of the tied weight
            (activations,) = (transfer.group for transfer in step[0])
            groups = set()
            for transfer in (transfer for batch in step for transfer in batch):
                goes_forward = transfer.sends == ((transfer.peer - rank) % 4 == 1)
                assert (transfer.group == activations) == goes_forward
                groups.add(transfer.group)
            assert len(groups) == NUM_GROUPS


def test_an_order_that_blocks_is_found() -> None:
    """Two ranks that exchange by a send before a receive each: in order, this blocks for ever; as a batch, it does not."""
    exchange = [[(nccl.Transfer(sends, 1 - rank),) for sends in (True, False)] for rank in range(2)]
    assert nccl.blocked(exchange) == {0: "send to 1", 1: "send to 0"}
    assert nccl.blocked([[(*first, *second)] for first, second in exchange]) == {}
    assert nccl.blocked([exchange[0], exchange[1][::-1]]) == {}
