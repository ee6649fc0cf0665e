"""The batch-size ramp: sizes, the sequences of each step, refusals, and what counts tokens."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.sequences import counting, open_stream, write
from tests.training import changed
from titanlike.config import UserError
from titanlike.config.layout import BatchSizes, Ramp
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import BatchSource, ShuffledMixture
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_recipe
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import make_plan

recipe = partial(changed, PretrainRecipe())
RAMP: Ramp = ((3, 2), (4, 4))
SIZES = [2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8]


def test_sizes() -> None:
    sizes = BatchSizes(8, RAMP)
    assert [sizes.of(step) for step in range(1, 12)] == SIZES
    assert [sizes.through(step) for step in range(12)] == np.cumsum([0, *SIZES]).tolist()
    assert (sizes.through(10**6), BatchSizes(8).through(7)) == (22 + 8 * (10**6 - 7), 56)
    assert (sizes.divisor(), BatchSizes(12, ((1, 8),)).divisor()) == (2, 4)
    assert sizes.until(5) == [(3, 2), (2, 4)]
    assert BatchSizes(8, ((3, 2), (2, 2), (9, 8))).until(20) == [(5, 2), (15, 8)]


def tokens(source: BatchSource, ramp: Ramp, *, ranks: int = 1, steps: int = len(SIZES)) -> list[list[torch.Tensor]]:
    """Returns the tokens of each step, rank by rank, in micro-batches of two."""
    loaders = [
        BatchLoader(
            source, global_batch_size=8, batch_ramp=ramp, local_batch_size=2, data_rank=rank, num_data_ranks=ranks, seed=0,
            device=torch.device("cpu"),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return [
        [part.inputs["tokens"] for loader in loaders for part in loader.microbatches(step)]
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mixture_is_the_stream_of_sequences_without_a_ramp_cut_at_other_places(ranks: int) -> None:
    data = [counting(50), counting(30, start=1000)]
    ramp = ((2, 4), (21, 8), (1, 16)) if ranks == 2 else RAMP
    mixture = ShuffledMixture(data, [2, 1], seed=3, global_batch_size=8, batch_ramp=ramp)
    found = tokens(mixture, ramp, ranks=ranks, steps=26)
    assert {len(part) for step in found for part in step} == {2}  # micro-batches do not change
    assert [sum(map(len, step)) for step in found[:4]] == [BatchSizes(8, ramp).of(step) for step in range(1, 5)]
    constant = tokens(ShuffledMixture(data, [2, 1], seed=3, global_batch_size=8), (), steps=30)
    whole, expected = (torch.cat([part for step in steps for part in step]) for steps in (found, constant))
    assert torch.equal(whole, expected[: len(whole)])
    again = ShuffledMixture(data, [2, 1], seed=3, global_batch_size=8, batch_ramp=ramp)  # read from the middle
    rows = range(BatchSizes(8, ramp).of(23))
    assert np.array_equal(again.read(23, rows).tokens[:, :-1], torch.cat(found[22]).numpy())


def test_a_stream_repeats_and_skips_nothing_and_resumes_within_the_ramp(tmp_path: Path) -> None:
    files = [write(tmp_path, [50] * 3)]
    source = open_stream(files, global_batch_size=8, batch_ramp=RAMP)
    assert source.num_readers == 2  # divides every size
    read = {step: source.read(step, range(size)) for step, size in enumerate(SIZES, start=1)}
    ids = np.concatenate([batch.sequence_ids for batch in read.values()])
    assert ids.tolist() == list(range(sum(SIZES)))
    # Each reader yields the same sequences as in a run without a ramp, in the same order.
    constant = open_stream(files, global_batch_size=2)
    expected = [constant.read(step, range(2)).tokens for step in range(1, sum(SIZES) // 2 + 1)]
    for reader in range(2):
        parts = [batch.tokens.reshape(2, -1, 17)[reader] for batch in read.values()]
        assert np.array_equal(np.concatenate(parts), np.stack([rows[reader] for rows in expected]))
    first = open_stream(files, global_batch_size=8, batch_ramp=RAMP)
    for step in (1, 2, 3, 4):
        first.read(step, range(SIZES[step - 1]))
    resumed = open_stream(files, global_batch_size=8, batch_ramp=RAMP)
    resumed.load_position(first.position())
    for step in range(5, 12):
        assert np.array_equal(resumed.read(step, range(SIZES[step - 1])).tokens, read[step].tokens)


@pytest.mark.parametrize(
    ("ramp", "parallelism", "problem"),
    [
        (((10, 8), (10, 20)), {}, "a size of 20, which is no multiple of the 8 sequences .*; use 16 or 24, or a smaller"),
        (((10, 8),), dict(pipeline=4, pipeline_schedule="1f1b"), "a size of 8: .* over 4 ranks requires 4 or more micro-batches"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(ramp: Any, parallelism: dict[str, Any], problem: str) -> None:
    processes = parallelism.get("pipeline", 2)
    check_recipe(recipe(training=dict(batch_ramp=((10, 16), (10, 24))), parallelism=parallelism), processes)
    with pytest.raises(UserError, match=f"training.batch_ramp has {problem}"):
        check_recipe(recipe(training=dict(batch_ramp=ramp), parallelism=parallelism), processes)


def test_a_plan_counts_the_tokens_and_the_time_of_the_ramp() -> None:
    def planned(**training: object) -> tuple[float, int]:
        chosen = recipe(training=dict(steps=1000, global_batch_size=64, local_batch_size=2, **training))
        return make_plan(Job(chosen, 8), load_hardware("h100")).hours, chosen.training.num_tokens(1000)

    hours, num_tokens = planned()
    ramped, fewer = planned(batch_ramp=((250, 32), (250, 48)))
    assert fewer == num_tokens * (250 * 32 + 250 * 48 + 500 * 64) // (1000 * 64)
    # A step of half the batch takes more than half of the time: the optimizer and FSDP do as much.
    assert fewer / num_tokens * hours < ramped < hours
    assert planned(batch_ramp=((400, 64),))[0] == hours
