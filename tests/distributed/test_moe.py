"""Mixture of experts under every kind of layout: parity with one process, and expert parallelism."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity import COMPILED, FULL, SELECTIVE
from tests.pool import Pool
from tests.training import MIXTRAL, QWEN3_MOE, assert_same, tiny, train, world_size
from titanlike.config.sections import Parallelism
from titanlike.verify import Result

Ranks = Callable[[int], Pool]
Case = tuple[str, dict[str, Any], int, dict[str, Any]]
MODELS: dict[str, Any] = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}
MODELS["few experts"] = replace(QWEN3_MOE, num_experts=3)

# The model, the layout, the number of sequences in a micro-batch, and other sections of a recipe.
CASES: dict[str, Case] = {
    "FSDP": ("mixtral", dict(shard=2), 2, {}),
    "FSDP, fewer experts than ranks": ("few experts", dict(shard=4), 1, {}),
    "HSDP": ("qwen3_moe", dict(replicate=2, shard=2), 1, {}),
    "TP": ("mixtral", dict(tensor=2), 4, {}),
    "CP": ("qwen3_moe", dict(context=2), 4, {}),
    "PP 1f1b": ("mixtral", dict(pipeline=2), 2, {}),
    "TP x FSDP": ("qwen3_moe", dict(tensor=2, shard=2), 2, {}),
    "CP x TP": ("mixtral", dict(context=2, tensor=2), 4, {}),
    "PP zbv": ("mixtral", dict(pipeline=2, pipeline_schedule="zbv"), 2, {}),
    "PP zbv x TP": ("qwen3_moe", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "TP x FSDP, compiled, selective": ("mixtral", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "FSDP, compiled": ("qwen3_moe", dict(shard=2), 2, COMPILED),
    "EP": ("mixtral", dict(shard=2, expert=2), 2, {}),
    "EP of 4": ("qwen3_moe", dict(shard=4, expert=4), 1, {}),
    "EP x FSDP": ("mixtral", dict(shard=4, expert=2), 1, {}),
    "EP x HSDP": ("qwen3_moe", dict(replicate=2, shard=2, expert=2), 1, {}),
    "EP x CP": ("qwen3_moe", dict(context=2, expert=2), 4, {}),
    "EP x CP x FSDP": ("mixtral", dict(context=2, shard=2, expert=4), 2, {}),
    "EP x TP": ("mixtral", dict(shard=2, tensor=2, expert=2), 2, {}),
    "EP x TP x FSDP": ("qwen3_moe", dict(shard=4, tensor=2, expert=2), 1, {}),
    "EP x PP 1f1b": ("mixtral", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "EP x PP zbv": ("qwen3_moe", dict(pipeline=2, pipeline_schedule="zbv", shard=2, expert=2), 1, {}),
    "EP x PP 1f1b x TP": ("mixtral", dict(pipeline=2, shard=2, tensor=2, expert=2), 1, {}),
    "EP, selective checkpointing": ("qwen3_moe", dict(shard=2, expert=2), 2, SELECTIVE),
    "EP x FSDP, full checkpointing": ("mixtral", dict(shard=4, expert=2), 1, FULL),
    "EP x TP, compiled": ("mixtral", dict(shard=2, tensor=2, expert=2), 2, COMPILED),
    "EP x FSDP, compiled, selective": ("qwen3_moe", dict(shard=4, expert=2), 1, COMPILED | SELECTIVE),
    "EP, compiled, full": ("mixtral", dict(shard=2, expert=2), 2, COMPILED | FULL),
}


@pytest.fixture(scope="module")
def baseline(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Result]:
    """Results of one process that takes the global batch as one micro-batch, by the model and what trains."""
    results: dict[str, Result] = {}

    def get(model: str, sections: dict[str, Any]) -> Result:
        sections = {name: sections[name] for name in ("optimizer", "lora", "data") if name in sections}
        key = f"{model} {sections}"
        if key not in results:
            training = dict(steps=2, local_batch_size=8)
            recipe = tiny(tmp_path_factory.mktemp("one"), "run", model=MODELS[model], training=training, **sections)
            results[key] = train(ranks(1), recipe)
        return results[key]

    return get


@pytest.mark.parametrize("case", CASES)
def test_layout_matches_one_process(
    ranks: Ranks, baseline: Callable[[str, dict[str, Any]], Result], tmp_path: Path, case: str
) -> None:
    model, layout, size, sections = CASES[case]
    parallelism = Parallelism(**({"shard": 1} | layout))
    training = dict(steps=2, local_batch_size=size)
    recipe = tiny(tmp_path, "run", model=MODELS[model], parallelism=parallelism, training=training, **sections)
    found, expected = train(ranks(world_size(recipe)), recipe), baseline(model, sections)
    assert_same(found, expected, weights=1e-3 if "optimizer" in sections else 1e-4)
