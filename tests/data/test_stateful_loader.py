"""A user's own loader as a batch source: exact resume, epochs, loss masks, and the errors of unsuitable loaders."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.sequences import read_steps
from titanlike.config import UserError
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.stateful_loader import StatefulLoaderSource

# torchdata 0.11 calls a function that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SEQ_LEN, GLOBAL_BATCH_SIZE, STEPS = 3, 4, 14
ROWS = torch.arange(21 * (SEQ_LEN + 1)).reshape(21, SEQ_LEN + 1)  # an epoch is 5 steps on one rank


def shuffled(rank: int, num_ranks: int, epoch: int) -> StatefulDataLoader:
    return StatefulDataLoader(
        ROWS[rank::num_ranks], batch_size=GLOBAL_BATCH_SIZE // num_ranks, shuffle=True, drop_last=True,
        generator=torch.Generator().manual_seed(epoch),
    )  # fmt: skip


def with_workers(rank: int, num_ranks: int, epoch: int) -> StatefulDataLoader:
    return StatefulDataLoader(
        ROWS[rank::num_ranks], batch_size=GLOBAL_BATCH_SIZE // num_ranks, drop_last=True, num_workers=2,
        multiprocessing_context="fork",
    )  # fmt: skip


def nodes(rank: int, num_ranks: int, epoch: int) -> Loader:
    sampled = SamplerWrapper(range(rank, len(ROWS), num_ranks))
    batches = Batcher(sampled, batch_size=GLOBAL_BATCH_SIZE // num_ranks, drop_last=True)
    return Loader(Prefetcher(Mapper(batches, lambda indices: {"tokens": ROWS[indices]}), prefetch_factor=2))


def source(build_loader: Callable[[int, int, int], Any]) -> StatefulLoaderSource:
    return StatefulLoaderSource(build_loader, seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH_SIZE, fingerprint="rows")


def batches(build_loader: Callable[[int, int, int], Any], position: Any, rank: int, num_ranks: int) -> BatchLoader:
    data = source(build_loader)
    data.load_position(json.loads(json.dumps(position)))
    return BatchLoader(
        data, global_batch_size=GLOBAL_BATCH_SIZE, local_batch_size=2, data_rank=rank, num_data_ranks=num_ranks, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip


def train(
    build_loader: Callable[[int, int, int], Any], num_ranks: int, stops: list[int], prefetch: int
) -> list[list[int]]:
    """Returns the tokens of each step."""
    layout = dict(size=GLOBAL_BATCH_SIZE, ranks=num_ranks, local=2, prefetch=prefetch)
    found = read_steps(lambda: source(build_loader), stops, STEPS, **layout)
    return [tokens.flatten().tolist() for tokens, _ in found]


@pytest.mark.parametrize("build_loader", [shuffled, nodes])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resume_reads_the_same_batches(build_loader: Callable[[int, int, int], Any], num_ranks: int) -> None:
    expected = train(build_loader, num_ranks, [], 0)
    for stops in ([3], [5], [6, 10, 12]):  # within an epoch, at its end, and several resumes
        assert train(build_loader, num_ranks, stops, 2) == expected, stops
    if build_loader is shuffled:
        first, second = expected[: 5 * num_ranks], expected[5 * num_ranks :][: 5 * num_ranks]
        assert first[: len(second)] != second  # every epoch has its own order


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.slow
def test_a_loader_with_worker_processes_resumes_exactly() -> None:
    assert train(with_workers, 1, [3], 0) == train(with_workers, 1, [], 0)


def test_the_ids_of_sequences_continue_over_steps_ranks_and_resumes() -> None:
    """They seed dropout: equal ids would have equal masks."""
    found: list[int] = []
    for first in (1, 3):
        sources = [source(shuffled), source(shuffled)]  # of two ranks, which resume before the third step
        for step in (first, first + 1):
            found += [
                int(i) for rank in (0, 1) for i in sources[rank].read(step, range(2 * rank, 2 * rank + 2)).sequence_ids
            ]
    assert found == list(range(16))


def test_another_number_of_data_ranks_is_refused() -> None:
    loader = batches(shuffled, None, 0, 1)
    loader.microbatches(1)
    resumed = batches(shuffled, loader._position, 1, 2)
    with pytest.raises(UserError, match=r"loader states of 1 data-parallel ranks, but this run has 2; .*resume with 1"):
        resumed.microbatches(2)


def test_documents_of_a_loader_are_masked() -> None:
    items = [{"tokens": ROWS[:4], "document_ids": torch.tensor([0, 0, 1, 1]).expand(4, -1)}]
    [first, *_] = batches(lambda *_: Stateless(items), None, 0, 1).microbatches(1)
    assert first.labels.tolist() == [[1, -100, 3], [5, -100, 7]]
    assert first.inputs["document_ids"].tolist() == [[0, 0, 1]] * 2
    assert first.inputs["position_ids"].tolist() == [[0, 1, 0]] * 2


def test_a_loss_mask_masks_labels() -> None:
    mask = torch.arange(SEQ_LEN + 1) > 1
    items = [{"tokens": ROWS[:4], "loss_mask": mask.expand(4, -1)}]
    [first, *_] = batches(lambda *_: Stateless(items), None, 0, 1).microbatches(1)
    assert first.labels.tolist() == [[-100, 2, 3], [-100, 6, 7]]
    assert first.inputs["tokens"].dtype == first.labels.dtype == torch.int64


class Stateless(list[Any]):
    """A list of items with a constant state."""

    state: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_unsuitable_loaders_are_errors() -> None:
    def read(loader: Any) -> None:
        source(lambda *_: loader).read(1, range(4))

    with pytest.raises(UserError, match="the loader of data-parallel rank 0 yields no items in epoch 0"):
        read(Stateless())
    with pytest.raises(UserError, match=r"yields tokens of shape \(4, 3\), not \(4, 4\): training\.global_batch_size"):
        read(Stateless([ROWS[:4, :3]]))
    with pytest.raises(UserError, match=r"yields loss_mask of shape \(3, 4\), not \(4, 4\)"):
        read(Stateless([{"tokens": ROWS[:4], "loss_mask": ROWS[:3]}]))
    unsuitable = Stateless([ROWS[:4]])
    unsuitable.state = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"a loader's state_dict\(\) may hold only tensors, numbers, strings"):
        read(unsuitable)
