"""The z-loss in training: parity with one process, where it is logged, and what excludes it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.parity import COMPILED, FLOAT8, Parity, parallelism_of, tiers
from tests.pool import Ranks
from tests.training import LLAMA, tiny, train

Z_LOSS = 0.1
FOUR = dataclasses.replace(LLAMA, num_layers=4)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TP": (dict(tensor=2), {}),
    "CP x TP": (dict(context=2, tensor=2), {}),
    "PP zbv x TP": (dict(pipeline=2, pipeline_schedule="zbv", tensor=2), dict(model=FOUR)),
    "TP x FSDP, compiled": (dict(tensor=2, shard=2), COMPILED),
}


def recipe_of(folder: Path, name: str, *, z_loss: float = Z_LOSS, **sections: Any) -> Any:
    training = dict(steps=2, local_batch_size=2, loss_chunk=20, z_loss=z_loss)
    return tiny(folder, name, training=training, **sections)


@pytest.mark.parametrize("case", tiers(CASES, ["TP"], ["PP zbv x TP"]))
def test_layout_matches_one_process(parity: Parity, tmp_path: Path, case: str) -> None:
    layout, sections = CASES[case]
    parity(recipe_of(tmp_path, "run", parallelism=parallelism_of(layout), **sections))


def test_the_logged_training_loss_includes_it_and_the_validation_loss_does_not(ranks: Ranks, tmp_path: Path) -> None:
    # So small a learning rate does not move the model.
    still = dict(optimizer=dict(lr=1e-12))
    plain = train(ranks(1), recipe_of(tmp_path, "plain", z_loss=0.0, **still))
    found = train(ranks(1), recipe_of(tmp_path, "z-loss", **still))
    # An untrained model has logits near 0: their log-sum-exp is near log(320) = 5.77.
    terms = [loss - without for loss, without in zip(found.losses, plain.losses, strict=True)]
    assert terms == pytest.approx([Z_LOSS * 5.77**2] * 2, rel=0.02)
    assert found.validation == pytest.approx(plain.validation, rel=1e-6)


@pytest.mark.slow
def test_a_float8_head_has_it(ranks: Ranks, tmp_path: Path) -> None:
    float8 = dict(float8=FLOAT8 | dict(head=True))
    plain, found = (
        train(ranks(1), recipe_of(tmp_path, f"z-{z_loss}", z_loss=z_loss, **float8)) for z_loss in (0.0, Z_LOSS)
    )
    assert found.losses[0] - plain.losses[0] == pytest.approx(Z_LOSS * 5.77**2, rel=0.02)
