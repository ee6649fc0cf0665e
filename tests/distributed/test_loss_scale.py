"""float16 with a loss scale: it changes no gradient, and all layouts skip the same steps."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.checkpoints import assert_identical, drop_last
from tests.launching import recorded
from tests.pool import Ranks
from tests.training import LLAMA, QWEN3_MOE, build, result, tiny, train_on_rank, world_size
from titanlike.data.batches.loader import Batch
from titanlike.losses import chunked, cross_entropy
from titanlike.optim.non_finite import LossScale
from titanlike.parallelisms.mixed_precision import MixedPrecisionLinear, _Linear
from titanlike.recipe import PretrainRecipe
from titanlike.run import loop
from titanlike.run.loop import forward_backward
from titanlike.utils import weight_gradients
from titanlike.utils.dtensor import local_tensor

FOUR = replace(LLAMA, num_layers=4)


def _scaled_gradients_differ(recipe: PretrainRecipe) -> list[str]:
    """Returns the parameters of this rank whose gradient depends on the loss scale; and `loss` if the loss does."""
    model, mesh = build(recipe)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(recipe.model.vocab_size, (8, 32), generator=generator)
    batches = [
        Batch({"tokens": each, "position_ids": torch.arange(32).expand(1, -1)}, each) for each in tokens.split(1)
    ]
    found = []
    for scale in (1.0, 2.0**20):
        model.zero_grad(set_to_none=True)
        loss = forward_backward(model, batches, torch.tensor(tokens.numel()), mesh, scale)
        gradients = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append(gradients | {"loss": torch.stack((loss.mean, loss.share))})
    first, second = found
    assert first.keys() == second.keys() and len(first) > 5
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(dict(parallelism=dict(shard=2)), id="FSDP"),
        pytest.param(dict(parallelism=dict(shard=1, pipeline=2, pipeline_schedule="zbv"), model=FOUR), id="PP zbv"),
        pytest.param(dict(parallelism=dict(shard=2, expert=2), model=QWEN3_MOE), id="EP, balance loss"),
    ],
)
def test_gradients_do_not_depend_on_the_loss_scale(ranks: Ranks, tmp_path: Path, sections: dict[str, Any]) -> None:
    training = dict(z_loss=1e-2, loss_chunk=20)
    recipe = tiny(tmp_path, "run", training=training, **sections)
    assert ranks(world_size(recipe)).run(_scaled_gradients_differ, recipe) == [[]] * world_size(recipe)


def _as_on_a_gpu(recipe: PretrainRecipe) -> tuple[list[dict[str, Tensor]], int]:
    """Returns gradients that autograd adds, and those that are added where they are computed; and the number of these additions.
    Linear layers and the loss are those of a GPU, on a CPU."""
    model, mesh = build(recipe)
    tokens = torch.randint(recipe.model.vocab_size, (6, 32), generator=torch.Generator().manual_seed(0))
    inputs = [{"tokens": each, "position_ids": torch.arange(32).expand(2, -1)} for each in tokens.split(2)]
    batches = [Batch(each, each["tokens"]) for each in inputs]
    added: list[Tensor] = []

    def take(weight: Tensor) -> Tensor | None:
        total = weight_gradients.take(weight)
        return total if total is None else added.append(total) or total

    def forward(layer: Any, x: Tensor) -> Any:
        return _Linear.apply(x, layer.weight, layer.bias, layer.compute_dtype)

    found = []
    with (
        patch.object(MixedPrecisionLinear, "forward", forward),
        patch.object(cross_entropy, "factor_of", lambda _: chunked._factor),
        patch.object(chunked, "take", take),
    ):
        for in_place in (False, True):
            disabled = nullcontext() if in_place else patch.object(loop, "accumulate_in_place", nullcontext)
            model.zero_grad(set_to_none=True)
            with disabled:
                forward_backward(model, batches, torch.tensor(tokens.numel()), mesh)
            found.append(
                {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
            )
    return found, len(added)


@pytest.mark.parametrize(
    ("sections", "num_added"),
    [
        pytest.param(dict(parallelism=dict(shard=1), model=replace(LLAMA, tied_head=True)), 2, id="tied head"),
        pytest.param(dict(parallelism=dict(shard=1), model=QWEN3_MOE), 2, id="MoE, balance loss"),
        pytest.param(dict(parallelism=dict(shard=2), training=dict(compute_dtype="float32")), 0, id="FSDP"),
    ],
)
def test_gradients_that_are_added_where_they_are_computed(
    ranks: Ranks, tmp_path: Path, sections: dict[str, Any], num_added: int
) -> None:
    recipe = tiny(tmp_path, "run", **{"training": dict(compute_dtype="bfloat16")} | sections)
    for (expected, gradients), added in ranks(world_size(recipe)).run(_as_on_a_gpu, recipe):
        assert added == num_added  # in the second and third micro-batch
        assert gradients.keys() == expected.keys()
        for name, value in gradients.items():
            assert (value - expected[name]).norm() < 5e-3 * expected[name].norm(), name


def _train_from(initial: float, recipe: PretrainRecipe) -> None:
    with patch.object(LossScale, "INITIAL", initial), patch.object(LossScale, "GROWTH_INTERVAL", 2):
        train_on_rank(recipe)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(shard=2), id="FSDP"),
        pytest.param(dict(shard=1, tensor=2), id="TP"),
        pytest.param(dict(shard=1, pipeline=2), id="PP", marks=pytest.mark.slow),
        pytest.param(dict(shard=1, replicate=2), id="HSDP", marks=pytest.mark.slow),
    ],
)
def test_all_layouts_skip_the_same_steps_and_a_resumed_run_too(
    ranks: Ranks, tmp_path: Path, layout: dict[str, int]
) -> None:
    sections: dict[str, Any] = dict(
        training=dict(compute_dtype="float16"), checkpoint=dict(interval=2), parallelism=dict(shard=1)
    )
    one, several = (tiny(tmp_path, name, **sections) for name in ("one", "several"))
    several = replace(several, parallelism=replace(several.parallelism, **layout))
    for recipe in (one, several):
        ranks(world_size(recipe)).run(_train_from, 2.0**21, recipe)
    found, expected = result(several), result(one)
    skipped, scales = (
        [recorded(tmp_path / name, key) for name in ("several", "one")] for key in ("skipped", "loss_scale")
    )
    assert scales[0] == scales[1]
    assert len(skipped[0]) == len(skipped[1]) > 0 and any(a < b for a, b in pairwise(scales[0]))
    assert found.losses == pytest.approx(expected.losses, rel=2e-3)

    # A run that is killed before its last save, which follows a change of the scale.
    drop_last(tmp_path / "several")
    ranks(2).run(_train_from, 2.0**21, several)
    assert_identical(result(several), found)
