"""With SGD, which does not normalize gradients as Adam does, weights agree under any layout as closely as gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import pretrain
from tests.pool import Ranks
from tests.training import MODELS, result, tiny, train_on_rank
from titanlike.config.sections import Parallelism
from titanlike.recipe import PretrainRecipe
from titanlike.tools.verify.recipe import differences


def train_with_sgd(recipe: PretrainRecipe) -> None:
    def build(model: Any, section: Any, seed: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=section.lr, momentum=0.9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "build_optimizer", build)
        train_on_rank(recipe)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_weights_agree(ranks: Ranks, tmp_path: Path, model: str) -> None:
    """After five steps with a learning rate and momentum that move weights far."""
    options: dict[str, Any] = dict(model=MODELS[model], schedule=dict(warmup_steps=1), optimizer=dict(lr=1.0))
    one = tiny(tmp_path, "one", training=dict(local_batch_size=8), **options)
    layout = Parallelism(pipeline=2, context=2)
    several = tiny(tmp_path, "several", training=dict(local_batch_size=2), parallelism=layout, **options)
    for size, recipe in ((1, one), (4, several)):
        ranks(size).run(train_with_sgd, recipe)
    for metric, (worst, where) in differences(result(several), result(one)).items():
        assert worst < 2e-6, f"{metric} differs by {worst:.1e} ({where})"
