"""Data sources of a user's own: validation, and what a resume compares."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recipes import pretrain
from tests.training import result, tiny, train_on_rank
from titanlike.config import UserError
from titanlike.data.batches import dataloaders
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.batches.sources import Sources, open_sources
from titanlike.data.batches.stateful_loader import StatefulLoaderSource
from titanlike.recipe import PretrainRecipe

pytestmark = pytest.mark.usefixtures("alone")


class Counting:
    """A source whose sequences are a function of the step."""

    def __init__(self, seq_len: int, fingerprint: Any = "counting", first: int = 0) -> None:
        self.seq_len = seq_len
        self.fingerprint = fingerprint
        self.first = first
        self.steps: list[int] = []

    def read(self, step: int, rows: range) -> SequenceBatch:
        self.steps.append(step)
        tokens = self.first + (np.arange(self.seq_len + 1) + np.array(rows)[:, None] + step) % 100
        return SequenceBatch(np.array(rows), tokens)

    def position(self) -> None:
        return None

    def load_position(self, position: Any) -> None:
        pass

    def describe(self, steps: int) -> str:
        return "numbers"


def loader(seq_len: int, batch_size: int, fingerprint: str = "loader") -> StatefulLoaderSource:
    rows = torch.arange(40 * (seq_len + 1)).view(40, -1) % 200

    def build_loader(rank: int, num_ranks: int, epoch: int) -> Any:
        generator = torch.Generator().manual_seed(epoch)
        size = batch_size // num_ranks
        return StatefulDataLoader(rows[rank::num_ranks], batch_size=size, shuffle=True, generator=generator)

    return StatefulLoaderSource(build_loader, seq_len=seq_len, global_batch_size=batch_size, fingerprint=fingerprint)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PretrainRecipe]:
    """Trains with the sources that a function of the built-in sources, the sequence length and the batch size returns."""

    def run(sources: Callable[[Sources, int, int], Sources], **sections: Any) -> PretrainRecipe:
        def opened(*arguments: Any, **options: Any) -> Sources:
            return sources(open_sources(*arguments, **options), options["seq_len"], options["global_batch_size"])

        build = functools.partial(dataloaders.build_dataloaders, open_sources=opened)
        monkeypatch.setattr(pretrain, "build_dataloaders", build)
        usual: dict[str, Any] = dict(training=dict(steps=6), validation=dict(interval=2, batches=2))
        recipe = tiny(tmp_path, "run", **usual | sections)
        train_on_rank(recipe)
        return recipe

    return run


def test_validation_with_a_source_of_ones_own(train: Callable[..., PretrainRecipe]) -> None:
    validation = Counting(32, first=100)
    recipe = train(lambda _, seq_len, __: Sources(Counting(seq_len), validation))
    assert len(result(recipe).validation) == 3
    assert validation.steps == [1, 2] * 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_validation_with_a_loader_reads_the_same_batches_each_time(train: Callable[..., PretrainRecipe]) -> None:
    seen: list[list[int]] = []

    def sources(_: Sources, seq_len: int, batch_size: int) -> Sources:
        training, validation = loader(seq_len, batch_size), loader(seq_len, batch_size)
        original = validation.read

        def read(step: int, rows: range) -> SequenceBatch:
            batch = original(step, rows)
            seen.append(batch.tokens[:, 0].tolist())
            return batch

        validation.read = read  # type: ignore[method-assign]
        return Sources(training, validation)

    recipe = train(sources)
    assert len(seen) == 6 and seen[0] != seen[1] and seen == seen[:2] * 3
    assert len(result(recipe).validation) == 3


def test_the_source_of_the_training_data_is_compared_at_a_resume(train: Callable[..., PretrainRecipe]) -> None:
    """Not that of the built-in data, which the source replaces."""
    train(lambda built_in, *_: built_in)
    for other in (Counting(32), Counting(32, "version 2")):
        with pytest.raises(UserError, match=r"was trained on other data \(fingerprint .*, now (counting|version 2)\)"):
            train(lambda built_in, *_, other=other: Sources(other, built_in.validation))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            lambda: Sources(Counting(32)),
            "validation.interval is set, but open_sources returns no source for validation; ret",
        ),
        (lambda: Sources(*[Counting(32)] * 2), "open_sources returns one object for training and validation"),
        (
            lambda: Sources(Counting(32, None), Counting(32)),
            "the fingerprint of the data source Counting must be a string",
        ),
        (
            lambda: Sources(object(), Counting(32)),
            "the data source object lacks describe, fingerprint, load_position, posi",
        ),  # type: ignore[arg-type]
        (
            lambda: Sources(Counting(31), Counting(32)),
            "the data source Counting has seq_len = 31, but training.seq_len = 32",
        ),
        (
            lambda: Sources(Counting(32, first=300), Counting(32)),
            r"step 1: the data has the token 340, but model.vocab_size",
        ),
        (
            lambda: Sources(Counting(32, first=-300), Counting(32)),
            r"step 1: the data has the token -299, but model.vocab_si",
        ),
    ],
)
def test_sources_that_cannot_be_used(
    train: Callable[..., PretrainRecipe], tmp_path: Path, sources: Callable[[], Sources], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(lambda *_: sources())


def test_tokens_of_another_shape_are_refused(train: Callable[..., PretrainRecipe]) -> None:
    source = Counting(32)
    source.seq_len, read = 32, Counting(30).read
    source.read = read  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"step 1: the data source Counting has tokens of shape \(8, 31\), not \(8, 33\)"
    ):
        train(lambda *_: Sources(source, Counting(32)))
