"""Data sources of a user's own: validation, and what a resume compares."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes import pretrain
from tests.training import result, tiny, train_on_rank
from titanlike.config import UserError
from titanlike.data.batches import dataloaders
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.batches.sources import Sources, open_sources
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


def test_the_source_of_the_training_data_is_compared_at_a_resume(train: Callable[..., PretrainRecipe]) -> None:
    """Not that of the built-in data, which the source replaces."""
    train(lambda built_in, *_: built_in)
    for other in (Counting(32), Counting(32, "version 2")):
        with pytest.raises(UserError, match=r"was trained on other data \(fingerprint .*, now (counting|version 2)\)"):
            train(lambda built_in, *_, other=other: Sources(other, built_in.validation))


def short_rows() -> Sources:
    source = Counting(32)
    source.read = Counting(30).read  # type: ignore[method-assign]
    return Sources(source, Counting(32))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (lambda: Sources(Counting(32)), "validation.interval is set, but open_sources returns no source for validation"),
        (lambda: Sources(*[Counting(32)] * 2), "open_sources returns one object for training and validation"),
        (lambda: Sources(object(), Counting(32)), "the data source object lacks describe, fingerprint, load_position, "),
        (lambda: Sources(Counting(31), Counting(32)), "Counting has seq_len = 31, but training.seq_len = 32"),
        (lambda: Sources(Counting(32, first=300), Counting(32)), "step 1: the data has the token 340, but model.vocab"),
        (lambda: Sources(Counting(32, first=-300), Counting(32)), "step 1: the data has the token -299, but model.voc"),
        (short_rows, r"step 1: the data source Counting has tokens of shape \(8, 31\), not \(8, 33\)"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_used(
    train: Callable[..., PretrainRecipe], sources: Callable[[], Sources], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(lambda *_: sources())
