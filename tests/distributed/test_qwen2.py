"""Qwen2 under layouts that shard the biases of queries, keys and values: parity with one process, float8, LoRA and Muon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_float8_layouts import ALL_GATHER, FLOAT8, _gradients, recipe_for, relative_error
from tests.distributed.test_muon_layouts import MUON
from tests.distributed.test_qwen3 import LORA, tiers
from tests.parity import COMPILED, SELECTIVE
from tests.pool import Pool
from tests.training import QWEN2, assert_same, tiny, train, world_size
from titanlike.config.sections import Parallelism

Ranks = Callable[[int], Pool]
BIASES = ("wq.bias", "wk.bias", "wv.bias")

# The layout and other sections of a recipe, each with the number of sequences in a micro-batch.
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "TP": (dict(tensor=2), 4, {}),
    "FSDP": (dict(shard=2), 2, {}),
    "CP x TP": (dict(context=2, tensor=2), 4, {}),
    "PP zbv x TP": (dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "TP x FSDP, compiled, selective": (dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "TP x FSDP, Muon": (dict(tensor=2, shard=2), 2, {"optimizer": MUON}),
    "TP x FSDP, LoRA": (dict(tensor=2, shard=2), 2, LORA),
}


@pytest.mark.parametrize("case", tiers("TP", CASES))
def test_layout_matches_one_process(ranks: Ranks, tmp_path: Path, case: str) -> None:
    layout, size, sections = CASES[case]
    one = {name: sections[name] for name in ("optimizer", "lora") if name in sections}
    expected = train(ranks(1), tiny(tmp_path, "one", model=QWEN2, training=dict(steps=2, local_batch_size=8), **one))
    parallelism = Parallelism(**({"shard": 1} | layout))
    training = dict(steps=2, local_batch_size=size)
    recipe = tiny(tmp_path, "several", model=QWEN2, parallelism=parallelism, training=training, **sections)
    found = train(ranks(world_size(recipe)), recipe)
    assert_same(found, expected, weights=1e-3 if "optimizer" in sections else 1e-4)
    biases = {name: value for name, value in found.state["model"].items() if name.endswith(".bias")}
    assert len(biases) == 3 * QWEN2.num_layers and all(name.endswith(BIASES) for name in biases)
    # They start at 0, and each is trained, except with LoRA.
    assert {bool(value.any()) for value in biases.values()} == {"lora" not in sections}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "float8"),
    [(dict(tensor=2), FLOAT8), (dict(tensor=2, shard=2), ALL_GATHER)],
    ids=["TP", "TP x FSDP, float8 all-gather"],
)
def test_float8_matches_one_process(
    ranks: Ranks, tmp_path: Path, layout: dict[str, int], float8: dict[str, Any]
) -> None:
    one = recipe_for(tmp_path, "one", {}, FLOAT8, model="qwen2")
    several = recipe_for(tmp_path, "several", {"shard": 1} | layout, float8, model="qwen2")
    expected = ranks(1).run(_gradients, one, 3)[0]
    found = [
        relative_error(gradients, reference)
        for rank in ranks(world_size(several)).run(_gradients, several, 3)
        for gradients, reference in zip(rank, expected, strict=True)
    ]
    # Sums that differ in their last bit may round to different float8 values: rarely, and with a small effect.
    assert sorted(found)[len(found) // 2] < 1e-4 and max(found) < 0.05, found
