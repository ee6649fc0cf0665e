"""A global batch without a label, as within a long prompt, is named as such, and skipped if that is asked for. So are validation
data without one."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.launching import records
from tests.pool import Ranks, user_error
from tests.training import BERT, LLAMA, tiny, train_on_rank, world_size
from titanlike.config.distill import Distillation
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.losses import IGNORE
from titanlike.recipe import PretrainRecipe

TEACHER = dict(teacher=dataclasses.replace(LLAMA, num_layers=1), distillation=Distillation(teacher="random"))
CASES: dict[str, dict[str, Any]] = {
    "FSDP": dict(parallelism=dict(shard=2)),
    "a pipeline": dict(parallelism=dict(pipeline=2, shard=1)),
    "masked tokens": dict(model=BERT, parallelism=dict(shard=1)),
    "a teacher": dict(**TEACHER, parallelism=dict(shard=1)),
}


@contextmanager
def without_labels(method: str, number: int) -> Iterator[None]:
    """Removes the labels from what a method of the loader returns at its `number`-th call."""
    original, calls = getattr(BatchLoader, method), 0

    def removed(batches: Sequence[Batch]) -> list[Batch]:
        return [dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORE)) for batch in batches]

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(*arguments)
        if calls != number:
            return found
        return removed(found) if method == "microbatches" else map(removed, found)

    with mock.patch.object(BatchLoader, method, wrapped):
        yield


def _error(recipe: PretrainRecipe, method: str, number: int) -> str:
    with without_labels(method, number):
        return user_error(train_on_rank, recipe)


@pytest.mark.parametrize("name", CASES)
def test_the_error_of_a_step_and_of_a_validation_without_labels(ranks: Ranks, tmp_path: Path, name: str) -> None:
    recipe = tiny(tmp_path, "run", **CASES[name], training=dict(steps=3, local_batch_size=4))
    pool = ranks(world_size(recipe))
    errors = pool.run(_error, recipe, "microbatches", 2)
    assert len(errors) == world_size(recipe) > 0
    for error in errors:
        assert error.startswith("step 2: the global batch has no label: all its tokens are of prompts or padding")
        assert error.endswith("Increase training.global_batch_size, or set training.non_finite = 'skip'")
    recipe = tiny(tmp_path, "validated", **CASES[name], training=dict(steps=3, local_batch_size=4))
    for error in pool.run(_error, recipe, "first_batches", 1):
        assert error.startswith("the validation data has no label: all its tokens are of prompts or padding")
        assert error.endswith("increase validation.batches, or give other data")


@pytest.mark.parametrize("name", ["FSDP", "a pipeline"])
def test_a_step_without_labels_can_be_skipped(ranks: Ranks, tmp_path: Path, name: str) -> None:
    training = dict(steps=3, local_batch_size=4, non_finite="skip")
    recipe = tiny(tmp_path, "run", **CASES[name], training=training)
    assert ranks(world_size(recipe)).run(_error, recipe, "microbatches", 2) == [""] * world_size(recipe)
    steps = [record for record in records(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
