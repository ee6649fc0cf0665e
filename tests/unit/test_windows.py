"""Windows and batches: each token once an epoch, the same order on every layout, shares of a mixture, documents apart."""

import threading
import time

import numpy as np
import pytest
import torch

from titanlike.config import UserError
from titanlike.data.loader import BatchLoader
from titanlike.data.packed_dataset import (
    BatchSource,
    InMemoryTokens,
    PackedDataset,
    SequenceBatch,
    ShuffledMixture,
    document_ids_and_positions,
)
from titanlike.data.shuffle import CYCLE, Mixture, shuffled
from titanlike.data.text.tokenizer import Separator
from titanlike.models.loss import IGNORE


def batches(
    windows: PackedDataset | BatchSource,
    *,
    ranks: int = 1,
    rank: int = 0,
    local: int = 2,
    seed: int = 0,
    document_separator: Separator | None = None,
) -> BatchLoader:
    feed = ShuffledMixture([windows], seed=seed, global_batch_size=8) if isinstance(windows, PackedDataset) else windows
    return BatchLoader(
        feed, global_batch_size=8, local_batch_size=local, data_rank=rank, num_data_ranks=ranks, seed=seed,
        device=torch.device("cpu"), document_separator=document_separator,
    )  # fmt: skip


def counting(count: int, *, held_out: bool = False, every: int = 0, seq_len: int = 4, start: int = 0) -> PackedDataset:
    """Windows of 0 1 2 3 | 4 5 6 7 | ...: a window is known by its first token."""
    tokens = InMemoryTokens(np.arange(start, start + count * seq_len + 1, dtype=np.uint32))
    return PackedDataset(tokens, seq_len, held_out=held_out, holdout_every=every)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_a_shuffle_is_a_permutation(size: int) -> None:
    order = shuffled(np.arange(size), size, seed=3).tolist()
    assert sorted(order) == list(range(size))
    assert order[:3] == [int(shuffled(np.array([index]), size, seed=3)[0]) for index in range(min(3, size))]
    if size == 1000:
        assert order != shuffled(np.arange(size), size, seed=4).tolist()
        # no trace of the old order: neighbours end far apart, about a third of the size as chance has it
        apart = np.abs(np.diff(order)).mean()
        assert 280 < apart < 390


def test_labels_are_the_next_tokens() -> None:
    batch = batches(counting(8)).microbatches(1)[0]
    assert torch.equal(batch.labels, batch.inputs["tokens"] + 1)
    assert batch.inputs["tokens"].shape == (2, 4)


@pytest.mark.parametrize("every", [0, 2, 3, 10, 50])
def test_training_and_validation_share_no_window_and_miss_none(every: int) -> None:
    train = counting(101, every=every)
    found = set(train.read(np.arange(train.count))[0][:, 0] // 4)
    assert len(found) == train.count
    if every:
        assert train.count == 101 - 101 // every
        held_out = counting(101, every=every, held_out=True)
        apart = set(held_out.read(np.arange(held_out.count))[0][:, 0] // 4)
        assert not found & apart
        found |= apart
    assert found == set(range(101))


def test_an_epoch_has_every_window_once_and_the_next_has_another_order() -> None:
    source = batches(counting(24))
    firsts = [
        int(row[0]) // 4
        for step in range(1, 7)
        for batch in source.microbatches(step)
        for row in batch.inputs["tokens"]
    ]
    assert sorted(firsts[:24]) == sorted(firsts[24:]) == list(range(24))
    assert firsts[:24] != firsts[24:]


def test_an_epoch_may_end_within_a_batch() -> None:
    source = batches(counting(5))
    firsts = [
        int(row[0]) // 4
        for step in (1, 2, 3, 4, 5)
        for part in source.microbatches(step)
        for row in part.inputs["tokens"]
    ]
    for epoch in range(8):
        assert sorted(firsts[5 * epoch : 5 * epoch + 5]) == list(range(5))


@pytest.mark.parametrize(("ranks", "local"), [(1, 8), (1, 1), (2, 2), (4, 8), (8, 1)])
def test_the_global_order_does_not_depend_on_the_layout(ranks: int, local: int) -> None:
    windows = counting(50)
    for step in (1, 7):
        whole = torch.cat([part.inputs["tokens"] for part in batches(windows).microbatches(step)])
        parts = [batches(windows, ranks=ranks, rank=rank, local=local).microbatches(step) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.inputs["tokens"] for rank in parts for part in rank]), whole)


def test_validation_reads_no_window_twice() -> None:
    assert batches(counting(33)).num_distinct(10) == 4  # batches of 8
    assert batches(counting(33)).num_distinct(2) == 2
    assert batches(counting(5)).num_distinct(2) == 1


def test_another_seed_is_another_order() -> None:
    one, other = (batches(counting(50), seed=seed).microbatches(1)[0].inputs["tokens"] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_too_little_data_is_told() -> None:
    with pytest.raises(UserError, match=r"the data has 9 tokens, too few for training sequences .* = 16"):
        PackedDataset(InMemoryTokens(np.arange(9, dtype=np.uint16)), 16)
    with pytest.raises(UserError, match=r"too few for validation sequences .* one in 50 held out"):
        counting(10, held_out=True, every=50)


def test_a_mixture_has_its_shares_and_each_part_its_own_epochs() -> None:
    parts = [counting(100), counting(10, start=1000), counting(3, start=2000)]
    feed = ShuffledMixture(parts, [0.7, 0.2, 0.1], seed=0, global_batch_size=8)
    assert feed.mixture.counts == [717, 205, 102]
    firsts = np.concatenate([feed.rows(step, range(8)).tokens[:, 0] for step in range(1, CYCLE // 8 + 1)])
    for number, (part, count) in enumerate(zip(parts, feed.mixture.counts, strict=True)):
        mine = firsts[(firsts >= 1000 * number) & (firsts < 1000 * (number + 1))]
        assert len(mine) == count
        whole = mine[: count // part.count * part.count].reshape(-1, part.count)
        assert (np.sort(whole, axis=1) == np.sort(whole[0])).all()  # each epoch has each window once
    assert [round(epochs, 1) for epochs in feed.epochs(CYCLE // 8)] == [7.2, 20.5, 34.0]
    assert feed.describe(CYCLE // 8).startswith(
        "the data 70%, 401 tokens read 7.2 times; the data 20%, 41 tokens read 20"
    )
    assert feed.num_distinct == 3 * CYCLE // 102 // 8


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [1e-6, 1], [5, 3, 2, 1e-9], [1e6, 1e-6, 1e-6]])
def test_the_shares_of_a_mixture_add_up_whatever_the_weights(weights: list[float]) -> None:
    mixture = Mixture(weights, seed=1)
    assert sum(mixture.counts) == CYCLE
    assert min(mixture.counts) >= 1
    stream, place = mixture.pick(np.arange(3 * CYCLE))
    for number in range(len(weights)):
        assert place[stream == number].tolist() == list(range((stream == number).sum()))


def test_documents_are_kept_apart() -> None:
    tokens = InMemoryTokens(np.array([7, 9, 1, 2, 9, 3, 4, 5, 6, 9, 8], np.uint16))
    found = batches(
        ShuffledMixture([PackedDataset(tokens, 10)], seed=0, global_batch_size=8),
        document_separator=Separator(9, closes=True),
    )
    batch = found.microbatches(1)[0]
    assert batch.inputs["tokens"][0].tolist() == [7, 9, 1, 2, 9, 3, 4, 5, 6, 9]
    assert batch.inputs["document_ids"][0].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert batch.inputs["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4]
    # The first token of a document follows from nothing that its document has.
    assert batch.labels[0].tolist() == [9, IGNORE, 2, 9, IGNORE, 4, 5, 6, 9, IGNORE]
    opened = document_ids_and_positions(np.array([[9, 7, 9, 1, 2]]), Separator(9, closes=False))
    assert [part.tolist() for part in opened] == [[[0, 0, 1, 1, 1]], [[0, 1, 0, 1, 2]]]


def test_what_is_given_is_no_label() -> None:
    class Given(InMemoryTokens):
        def loss_mask(self, starts: np.ndarray, length: int) -> np.ndarray:
            return self.tokens[starts[:, None] + np.arange(length)] % 3 != 0

    found = batches(PackedDataset(Given(np.arange(41)), 4)).microbatches(1)
    for batch in found:
        following = batch.inputs["tokens"] + 1
        assert torch.equal(batch.labels, torch.where(following % 3 != 0, following, IGNORE))


class Slow:
    """A feed that takes its time, and fails at a step."""

    seq_len = 2

    def __init__(self, *, fails_at: int = 0) -> None:
        self.fails_at, self.made = fails_at, list[int]()

    def rows(self, step: int, mine: range) -> SequenceBatch:
        if step == self.fails_at:
            raise UserError(f"step {step} has no data")
        self.made.append(step)
        return SequenceBatch(np.array(mine), np.full((len(mine), 3), step))

    def position(self) -> list[int]:
        return [self.made[-1]]

    def begin(self, position: object) -> None: ...

    def describe(self, steps: int) -> str:
        return ""


def test_batches_are_made_ahead_and_the_position_is_that_of_what_was_taken() -> None:
    feed = Slow()
    source = batches(feed)
    with source.prefetch(3, first=5, last=20):
        for step in (5, 6):
            assert int(source.microbatches(step)[0].labels[0, 0]) == step
            deadline = time.monotonic() + 10
            while feed.made[-1] < step + 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert feed.made[-1] == step + 4  # three wait, and one is in the hand of who makes them
            assert source._position == [step]
    assert source.microbatches(9)  # again one by one
    deadline = time.monotonic() + 10
    while any(thread.name == "batches" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "batches" for thread in threading.enumerate())


def test_what_goes_wrong_ahead_is_raised_at_its_step() -> None:
    source = batches(Slow(fails_at=3))
    with source.prefetch(5, first=1, last=9):
        assert [len(source.microbatches(step)) for step in (1, 2)] == [4, 4]
        with pytest.raises(UserError, match="step 3 has no data"):
            source.microbatches(3)
