"""Qwen3 under every kind of layout: parity with one process, float8 and Muon. Its norms of queries and keys are replicated over
tensor-parallel ranks, of which each has some of the heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_float8_layouts import ALL_GATHER, FLOAT8, _gradients, recipe_for, relative_error
from tests.distributed.test_muon_layouts import MUON
from tests.parity import COMPILED, FULL, SELECTIVE
from tests.pool import Pool
from tests.training import QWEN3, assert_same, baselines, tiny, train, world_size
from titanlike.config.sections import Parallelism
from titanlike.tools.verify import Result

Ranks = Callable[[int], Pool]
LORA: dict[str, Any] = {"lora": dict(rank=4)}

# The layout and other sections of a recipe, each with the number of sequences in a micro-batch.
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "TP": (dict(tensor=2), 4, {}),
    "FSDP": (dict(shard=2), 2, {}),
    "CP": (dict(context=2), 4, {}),
    "PP 1f1b": (dict(pipeline=2), 2, {}),
    "TP x FSDP": (dict(tensor=2, shard=2), 2, {}),
    "CP x TP": (dict(context=2, tensor=2), 4, {}),
    "PP zbv x TP": (dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "PP 1f1b x TP x FSDP": (dict(pipeline=2, tensor=2, shard=2), 1, {}),
    "TP, full checkpointing": (dict(tensor=2), 4, FULL),
    "TP x FSDP, compiled, selective": (dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "TP x FSDP, Muon": (dict(tensor=2, shard=2), 2, {"optimizer": MUON}),
    "TP x FSDP, LoRA": (dict(tensor=2, shard=2), 2, LORA),
}


SLOW = ("PP zbv x TP", "TP x FSDP", "TP x FSDP, compiled, selective", "TP x FSDP, Muon")


def tiers(quick: str, cases: Any) -> list[Any]:
    marks = {quick: []} | {case: [pytest.mark.slow] for case in SLOW}
    return [pytest.param(case, marks=marks.get(case, [pytest.mark.every])) for case in cases]


@pytest.fixture(scope="module")
def baseline(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Result]:
    return baselines(ranks(1), tmp_path_factory.mktemp("one"), {"qwen3": QWEN3})


@pytest.mark.parametrize("case", tiers("TP", CASES))
def test_layout_matches_one_process(
    ranks: Ranks, baseline: Callable[[str, dict[str, Any]], Result], tmp_path: Path, case: str
) -> None:
    layout, size, sections = CASES[case]
    parallelism = Parallelism(**({"shard": 1} | layout))
    training = dict(steps=2, local_batch_size=size)
    recipe = tiny(tmp_path, "run", model=QWEN3, parallelism=parallelism, training=training, **sections)
    found, expected = train(ranks(world_size(recipe)), recipe), baseline("qwen3", sections)
    assert_same(found, expected, weights=1e-3 if "optimizer" in sections else 1e-4)
    trained = [name for name, value in found.state["model"].items() if "_norm" in name and value.std() > 0]
    assert len([name for name in trained if name.endswith(("q_norm.weight", "k_norm.weight"))]) == (
        0 if "lora" in sections else 2 * QWEN3.num_layers
    )


FLOAT8_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TP": (dict(tensor=2), FLOAT8),
    "TP x FSDP": (dict(tensor=2, shard=2), ALL_GATHER),
    "CP x TP": (dict(context=2, tensor=2), ALL_GATHER),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FLOAT8_CASES)
def test_float8_matches_one_process(ranks: Ranks, tmp_path: Path, case: str) -> None:
    layout, float8 = FLOAT8_CASES[case]
    one = recipe_for(tmp_path, "one", {}, FLOAT8, model="qwen3")
    several = recipe_for(tmp_path, "several", {"shard": 1} | layout, float8, model="qwen3")
    expected = ranks(1).run(_gradients, one, 3)[0]
    found = [
        relative_error(gradients, reference)
        for rank in ranks(world_size(several)).run(_gradients, several, 3)
        for gradients, reference in zip(rank, expected, strict=True)
    ]
    # Sums that differ in their last bit may round to different float8 values, which depends on the machine: rarely, and with a
    # small effect.
    assert sorted(found)[len(found) // 2] < 1e-3 and min(found) < 1e-5 and max(found) < 0.05, found
