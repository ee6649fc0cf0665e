"""Training against a plain PyTorch loop: with the loss of the library, and with one of a user's own under some layouts."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import pretrain
from tests.parity import COMPILED, DEFAULT, EVERY, SLOW, Tier, rows_of
from tests.plain_loop import plain_loop
from tests.pool import Ranks
from tests.training import GEMMA2, GPT_, LLAMA, MODELS, mesh_of, result, tiny, train, train_on_rank, world_size
from titanlike.config import UserError
from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titanlike.losses import IGNORE
from titanlike.models.registry import build_model
from titanlike.parallelize import parallelize
from titanlike.recipe import PretrainRecipe
from titanlike.tools.verify.recipe import Result

SMOOTHING = 0.3


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    assert logits.dtype == torch.float32 and logits.shape[1] == 320 and len(logits) <= 20
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="sum")


def smoothed_at_once(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="sum")


def train_with_loss(recipe: PretrainRecipe, loss: Any) -> None:
    pretrain.parallelize = partial(parallelize, loss=loss)
    try:
        train_on_rank(recipe)
    finally:
        pretrain.parallelize = parallelize


def trained(ranks: Ranks, recipe: PretrainRecipe, loss: Any = smoothed) -> Result:
    ranks(world_size(recipe)).run(train_with_loss, recipe, loss)
    return result(recipe)


def recipe_of(folder: Path, name: str, layout: dict[str, Any], **sections: Any) -> PretrainRecipe:
    training = dict(steps=3, local_batch_size=2, loss_chunk=20) | sections.pop("training", {})
    return tiny(folder, name, training=training, parallelism=Parallelism(**({"shard": 1} | layout)), **sections)


FOUR, FOUR_TIED = (dataclasses.replace(model, num_layers=4) for model in (LLAMA, GPT_))
# The tier, the layout and other sections.
CASES: dict[str, tuple[Tier, dict[str, Any], dict[str, Any]]] = {
    "TP": (DEFAULT, dict(tensor=2), {}),
    "PP 1f1b, tied head": (DEFAULT, dict(pipeline=2), dict(model=FOUR_TIED)),
    "FSDP, 4 micro-batches": (EVERY, dict(shard=2), dict(training=dict(local_batch_size=1))),
    "CP x TP, soft cap": (SLOW, dict(context=2, tensor=2), dict(model=GEMMA2)),
    "TP x FSDP, tied head, compiled": (EVERY, dict(tensor=2, shard=2), dict(model=GPT_) | COMPILED),
    "PP zbv x TP": (SLOW, dict(pipeline=2, pipeline_schedule="zbv", tensor=2), dict(model=FOUR)),
}


@pytest.mark.parametrize(("model", "processes"), [("gpt", 1), ("llama", 2)])
def test_recipe_matches_a_plain_loop(ranks: Ranks, tmp_path: Path, model: str, processes: int) -> None:
    recipe = tiny(tmp_path, "run", model=MODELS[model], training=dict(steps=8, local_batch_size=2))
    losses, norms = plain_loop(recipe)
    found = train(ranks(processes), recipe)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.gradient_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(("layout", "sections"), rows_of(CASES))
def test_label_smoothing_matches_a_plain_loop(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any], sections: dict[str, Any]
) -> None:
    recipe = recipe_of(tmp_path, "run", layout, **sections)
    losses, norms = plain_loop(recipe, label_smoothing=SMOOTHING)
    found = trained(ranks, recipe)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.gradient_norms == pytest.approx(norms, rel=1e-4)


def test_validation_reports_the_cross_entropy_alone(ranks: Ranks, tmp_path: Path) -> None:
    still = dict(optimizer=dict(lr=1e-12))  # does not move the model
    plain = train(ranks(1), recipe_of(tmp_path, "plain", {}, **still))
    own = trained(ranks, recipe_of(tmp_path, "own", {}, **still))
    z_loss = train(ranks(1), recipe_of(tmp_path, "z-loss", {}, training=dict(z_loss=0.1), **still))
    assert own.losses != plain.losses
    # An untrained model has logits near 0: their log-sum-exp is near log(320) = 5.77.
    terms = [loss - without for loss, without in zip(z_loss.losses, plain.losses, strict=True)]
    assert terms == pytest.approx([0.1 * 5.77**2] * 3, rel=0.02)
    assert own.validation == plain.validation == pytest.approx(z_loss.validation, rel=1e-6)


def parallelized(loss: Any = None, *, model: nn.Module | None = None, **training: Any) -> nn.Module:
    if model is None:
        with torch.device("meta"):
            model = build_model(LLAMA)
    return parallelize(
        model, mesh_of("cpu"), split=[3], training=Training(compute_dtype="float32", **training), parallelism=Parallelism(),
        float8=Float8(), activation_checkpoint=ActivationCheckpoint(), compile=Compile(mode="none"), loss=loss,
    )  # fmt: skip


def ones_for_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return smoothed_at_once(logits, labels) + (labels == IGNORE).sum()


@pytest.mark.parametrize(
    ("loss", "training", "message"),
    [
        (F.cross_entropy, {}, "return the sum over the labels that are not -100, for example with reduction='sum'"),
        (partial(F.cross_entropy, reduction="none"), {}, r"returns a tensor of shape \(3,\) with a gradient; return the sum"),
        (lambda logits, labels: smoothed_at_once(logits.detach(), labels), {}, r"shape \(\) without a gradient"),
        (ones_for_ignored, {}, "with a third whose label is -100, "),
        (smoothed, dict(z_loss=1e-4), r"training\.z_loss = 0.0001 is added to the cross-entropy, which the loss replaces"),
    ],
)  # fmt: skip
def test_a_loss_that_cannot_be_used_is_refused(alone: None, loss: Any, training: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parallelized(loss, **training)


def test_a_head_that_is_not_the_librarys_is_refused(alone: None) -> None:
    with torch.device("meta"):
        model: Any = build_model(LLAMA)
        model.output = nn.Linear(64, 320)
    with pytest.raises(UserError, match=r"requires an LMHead or TiedLMHead as model\.output, not Linear"):
        parallelized(smoothed, model=model)


def test_a_loss_that_is_a_module(alone: None) -> None:
    model = parallelized(nn.CrossEntropyLoss(torch.ones(320), label_smoothing=SMOOTHING, reduction="sum"))
    hidden, labels = torch.randn(1, 8, 64), torch.arange(8)[None]
    head = model.get_submodule("output")
    assert list(head.state_dict()) == ["weight"]
    nn.init.normal_(head.to_empty(device="cpu").get_parameter("weight"))
    torch.testing.assert_close(head(hidden, labels), smoothed(head(hidden)[0], labels[0]))
