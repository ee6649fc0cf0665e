"""Parity of every layout with one process: losses, gradient norms, validation loss and all weights, for both models."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from recipes import pretrain
from tests.parity import CASES, Case, Parity
from tests.pool import Ranks
from tests.training import LLAMA, MODELS, deep, result, tiny, train_on_rank
from titanlike.config.sections import Parallelism
from titanlike.recipe import PretrainRecipe
from titanlike.tools.verify.recipe import differences

STEPS = 2  # the loss of the second step depends on the gradients and the update of the first


@pytest.mark.parametrize(
    ("case", "model"),
    [
        pytest.param(case, model, id=f"{case.name}-{model}", marks=getattr(case, model))
        for case in CASES
        for model in case.models
    ],
)
def test_layout_matches_one_process(parity: Parity, tmp_path: Path, case: Case, model: str) -> None:
    shape = deep(MODELS[model]) if "pipeline" in case.layout else MODELS[model]
    sections = {
        "model": replace(shape, dropout=case.dropout) if case.dropout else shape,
        "parallelism": case.parallelism,
        "training": dict(steps=STEPS, local_batch_size=case.local_batch_size),
    }
    parity(tiny(tmp_path, "run", **sections, **case.sections), case.name, model)


def train_with_sgd(recipe: PretrainRecipe) -> None:
    def build(model: Any, section: Any, seed: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=section.lr, momentum=0.9)

    with mock.patch.object(pretrain, "build_optimizer", build):
        train_on_rank(recipe)


def test_weights_agree_as_closely_as_gradients_with_sgd(ranks: Ranks, tmp_path: Path) -> None:
    """SGD does not normalize gradients as Adam does. Its learning rate and momentum move weights far."""
    options: dict[str, Any] = dict(
        model=replace(LLAMA, num_layers=3), schedule=dict(warmup_steps=1), optimizer=dict(lr=1.0)
    )
    one = tiny(tmp_path, "one", training=dict(local_batch_size=8), **options)
    layout = Parallelism(pipeline=2, context=2)
    several = tiny(tmp_path, "several", training=dict(local_batch_size=2), parallelism=layout, **options)
    for size, recipe in ((1, one), (4, several)):
        ranks(size).run(train_with_sgd, recipe)
    for metric, (worst, where) in differences(result(several), result(one)).items():
        assert worst < 2e-6, f"{metric} differs by {worst:.1e} ({where})"
