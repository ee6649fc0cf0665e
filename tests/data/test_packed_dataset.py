"""Packed sequences and batches: epochs, order on every layout, shares of a mixture, document masking, prefetching."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.data.sequences import batches, counting
from titanlike.config import UserError
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import (
    PackedDataset,
    SequenceBatch,
    ShuffledMixture,
    positions_in_documents,
    separate_documents,
)
from titanlike.data.batches.shuffle import CYCLE, Mixture, shuffled, shuffled_epochs
from titanlike.data.tokens.arrays import InMemoryTokens
from titanlike.data.tokens.tokenizer import Separator
from titanlike.losses import IGNORE


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_a_shuffle_is_a_permutation(size: int) -> None:
    permutation = shuffled(np.arange(size), size, seed=3).tolist()
    assert sorted(permutation) == list(range(size))
    assert permutation[:3] == [int(shuffled(np.array([index]), size, seed=3)[0]) for index in range(min(3, size))]
    if size == 1000:
        assert permutation != shuffled(np.arange(size), size, seed=4).tolist()
        # The mean distance of neighbours is that of a random permutation: a third of the size.
        assert 280 < np.abs(np.diff(permutation)).mean() < 390


@pytest.mark.parametrize("every", [0, 2, 3, 10, 50])
def test_training_and_validation_are_disjoint_and_complete(every: int) -> None:
    train = counting(101, every=every)
    found = set(train.read(np.arange(train.num_sequences))[0][:, 0] // 4)
    assert len(found) == train.num_sequences
    if every:
        assert train.num_sequences == 101 - 101 // every
        held_out = counting(101, every=every, held_out=True)
        reserved = set(held_out.read(np.arange(held_out.num_sequences))[0][:, 0] // 4)
        assert not found & reserved
        found |= reserved
    assert found == set(range(101))


def test_first_batches_end_before_a_sequence_repeats() -> None:
    assert len(list(batches(counting(33)).first_batches(10))) == 4  # batches of 8
    assert len(list(batches(counting(33)).first_batches(2))) == 2
    assert len(list(batches(counting(5)).first_batches(2))) == 1


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"the data has 9 tokens, too few for sequences .* = 16"):
        PackedDataset(InMemoryTokens(np.arange(9, dtype=np.uint16)), 16)
    with pytest.raises(UserError, match=r"too few for held-out sequences .* one in 50 held out"):
        counting(10, held_out=True, every=50)
    # A sequence needs its last label.
    assert [PackedDataset(InMemoryTokens(np.arange(size)), 4).num_sequences for size in (8, 9)] == [1, 2]


@pytest.mark.parametrize(("token", "is_refused"), [(-1, True), (0, False), (32, False), (33, True)])
def test_tokens_that_the_model_does_not_have_are_refused(token: int, is_refused: bool) -> None:
    source = ShuffledMixture([PackedDataset(InMemoryTokens(np.full(9, token)), 4)], seed=0, global_batch_size=2)
    loader = BatchLoader(
        source, global_batch_size=2, local_batch_size=2, data_rank=0, num_data_ranks=1, seed=0, vocab_size=33,
        device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(UserError, match=f"the data has the token {token}, but") if is_refused else nullcontext():
        loader.microbatches(1)


def test_a_mixture_has_exact_shares_and_an_epoch_per_dataset() -> None:
    parts = [counting(100), counting(10, start=1000), counting(3, start=2000)]
    source = ShuffledMixture(parts, [0.7, 0.2, 0.1], seed=0, global_batch_size=8)
    firsts = np.concatenate([source.read(step, range(8)).tokens[:, 0] for step in range(1, CYCLE // 8 + 1)])
    for number, (part, count) in enumerate(zip(parts, [717, 205, 102], strict=True)):
        selected = firsts[(firsts >= 1000 * number) & (firsts < 1000 * (number + 1))]
        assert len(selected) == count
        size = part.num_sequences
        epochs = selected[: count // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.sort(epochs[0])).all()  # each sequence once an epoch
    assert [round(epochs, 1) for epochs in source.epochs(CYCLE // 8)] == [7.2, 20.5, 34.1]
    assert source.describe(CYCLE // 8).startswith(
        "the data 70%, 401 tokens read 7.2 times; the data 20%, 41 tokens read 20"
    )
    assert source.num_distinct == 3 * 10 // 8


def test_each_dataset_of_a_mixture_has_its_own_order() -> None:
    """Also one that is named twice. The first has the seed of the run."""
    parts = [counting(40, start=start) for start in (0, 1000, 2000)]
    mixture = ShuffledMixture(parts, [1.0] * 3, seed=5, global_batch_size=8)
    firsts = np.concatenate([mixture.read(step, range(8)).tokens[:, 0] for step in range(1, 26)])
    first, *others = (tuple(firsts[firsts // 1000 == number][:40] % 1000 // 4) for number in range(3))
    assert first == tuple(shuffled_epochs(np.arange(40), 40, 5))
    assert len({first, *others}) == 3
    one, other = (ShuffledMixture([parts[0], each], [1.0] * 2, seed=5, global_batch_size=8) for each in parts[1:])
    assert one.fingerprint != other.fingerprint


DRAW = random.Random(0)


@pytest.mark.parametrize(
    ("weights", "first"),
    [
        ([1.0], 0),
        ([1, 1], 0),
        ([0.9995, 0.0005], 0),
        ([1.0, 1e-5], 0),
        ([1.0] * 60, 0),
        ([1e-300, 1e300, 1 / 3], 5),
        *(([DRAW.choice((DRAW.random(), 1e-6, 1 / 3)) for _ in range(size)], 10**6) for size in range(2, 40, 4)),
    ],
    ids=lambda value: str(len(value) if isinstance(value, list) else value),
)
def test_a_mixture_honors_every_weight(weights: list[float], first: int) -> None:
    """Weights below 1/1024 too, over several blocks: exact up to one element, and one per stream for the largest."""
    mixture = Mixture(weights, seed=1)
    blocks = 20
    streams, offsets = mixture.pick(np.arange(first * mixture.length, (first + blocks) * mixture.length))
    counts = np.bincount(streams, minlength=len(weights))
    for number, weight in enumerate(weights):
        exact = blocks * mixture.length * Fraction(weight) / sum(map(Fraction, weights))
        assert abs(int(counts[number]) - exact) <= (len(weights) if weight == max(weights) else 1)
        assert np.array_equal(np.diff(offsets[streams == number]), np.ones(max(counts[number] - 1, 0)))


def test_document_masks_separate_documents() -> None:
    tokens = InMemoryTokens(np.array([7, 9, 1, 2, 9, 3, 4, 5, 6, 9, 8], np.uint16))
    loader = batches(
        ShuffledMixture([PackedDataset(tokens, 10)], seed=0, global_batch_size=8),
        document_separator=Separator(9, closes=True),
    )
    batch = loader.microbatches(1)[0]
    assert batch.inputs["tokens"][0].tolist() == [7, 9, 1, 2, 9, 3, 4, 5, 6, 9]
    assert batch.inputs["document_ids"][0].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert batch.inputs["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4]
    # The first token of a document cannot be predicted from its own document.
    assert batch.labels[0].tolist() == [9, IGNORE, 2, 9, IGNORE, 4, 5, 6, 9, IGNORE]
    opened = separate_documents(np.array([[9, 7, 9, 1, 2]]), Separator(9, closes=False))
    assert opened.tolist() == [[0, 0, 1, 1, 1]]
    assert positions_in_documents(opened).tolist() == [[0, 1, 0, 1, 2]]


class StepSource:
    """A source whose tokens are the step number. Optionally fails or blocks at a step."""

    seq_len = 2

    def __init__(self, *, fails_at: int = 0, blocks_at: int = 0) -> None:
        self.fails_at, self.blocks_at = fails_at, blocks_at
        self.steps_read: list[int] = []
        self.unblock = threading.Event()

    def read(self, step: int, rows: range) -> SequenceBatch:
        if step == self.fails_at:
            raise UserError(f"step {step} has no data")
        if step == self.blocks_at:
            self.unblock.wait(60)
        self.steps_read.append(step)
        return SequenceBatch(np.array(rows), np.full((len(rows), 3), step))

    def position(self) -> list[int]:
        return [self.steps_read[-1]]

    def load_position(self, position: object) -> None: ...

    def describe(self, steps: int) -> str:
        return ""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_prefetched_batches_come_with_the_position_of_the_batch_taken() -> None:
    source = StepSource()
    loader = batches(source)
    threads = set(threading.enumerate())
    with loader.prefetch(3, first_step=5, last_step=20):
        for step in (5, 6):
            assert int(loader.microbatches(step)[0].labels[0, 0]) == step
            wait_until(lambda step=step: source.steps_read[-1] == step + 3)
            assert loader._position == [step]
        time.sleep(0.05)
        assert source.steps_read[-1] == 9  # no more than three ahead
    assert loader.microbatches(9)  # without prefetching again
    wait_until(lambda: set(threading.enumerate()) <= threads)


def test_an_exception_while_prefetching_is_raised_unchanged_at_its_step() -> None:
    source = StepSource(fails_at=3)
    loader = batches(source)
    with loader.prefetch(5, first_step=1, last_step=9):
        assert [len(loader.microbatches(step)) for step in (1, 2)] == [4, 4]
        with pytest.raises(UserError, match=r"^step 3 has no data$"):
            loader.microbatches(3)
    assert source.steps_read == [1, 2]


def test_prefetching_stops_while_a_read_blocks() -> None:
    source = StepSource(blocks_at=2)
    loader = batches(source)
    with loader.prefetch(2, first_step=1, last_step=9):
        assert loader.microbatches(1)
    assert source.steps_read == [1]  # it has not waited for the blocked read
    source.unblock.set()
