"""Preference optimization under every layout equals one process, whatever provides the log-probabilities of the reference model."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity import COMPILED, FLOAT8, FULL, LORA, SELECTIVE, tiers
from tests.pool import Pool
from tests.preferences import preference_recipe
from tests.training import GEMMA2, GPT_, LLAMA, QWEN3, QWEN3_MOE, assert_same, train
from titanlike.config.sections import Parallelism
from titanlike.tools.verify import Result

Ranks = Callable[[int], Pool]

MODELS: dict[str, Any] = {
    "llama": LLAMA,
    "gpt": GPT_,
    "tied": QWEN3,
    "soft-capped": GEMMA2,
    "experts": dataclasses.replace(QWEN3_MOE, balance_loss=0.0, balance_bias_rate=0.01),
}
IPO: dict[str, Any] = {"preference": dict(loss="ipo")}
SIMPO: dict[str, Any] = {"preference": dict(loss="simpo", beta=2.0)}
PRECOMPUTED: dict[str, Any] = {"preference": dict(reference="precomputed")}

# The model, the layout, the number of sequences in a micro-batch, and other sections of a recipe.
CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "2 micro-batches": ("llama", {}, 4, {}),
    "DDP": ("gpt", dict(replicate=2), 2, {}),
    "FSDP": ("llama", dict(shard=2), 2, {}),
    "HSDP": ("gpt", dict(replicate=2, shard=2), 1, {}),
    "TP": ("llama", dict(tensor=2), 4, {}),
    "TP, tied head": ("tied", dict(tensor=2), 4, {}),
    "TP, soft-capped logits": ("soft-capped", dict(tensor=2), 4, {}),
    "CP": ("llama", dict(context=2), 4, {}),
    "CP x TP": ("gpt", dict(context=2, tensor=2), 4, {}),
    "CP x FSDP": ("llama", dict(context=2, shard=2), 2, {}),
    "TP x FSDP": ("tied", dict(tensor=2, shard=2), 2, {}),
    "EP": ("experts", dict(shard=2, expert=2), 2, {}),
    "EP x TP": ("experts", dict(shard=2, tensor=2, expert=2), 2, {}),
    "EP x CP": ("experts", dict(context=2, expert=2), 4, {}),
    "TP x FSDP, LoRA": ("llama", dict(tensor=2, shard=2), 2, LORA),
    "CP x FSDP, LoRA, second model": ("gpt", dict(context=2, shard=2), 2, LORA | {"preference": dict(reference="model")}),
    "CP x TP, precomputed": ("llama", dict(context=2, tensor=2), 4, PRECOMPUTED),
    "HSDP, LoRA, precomputed": ("llama", dict(replicate=2, shard=2), 1, LORA | PRECOMPUTED),
    "CP x FSDP, IPO": ("llama", dict(context=2, shard=2), 2, IPO),
    "TP x FSDP, SimPO": ("gpt", dict(tensor=2, shard=2), 2, SIMPO),
    "TP x FSDP, compiled, selective": ("llama", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "FSDP, LoRA, compiled, full": ("llama", dict(shard=2), 2, LORA | COMPILED | FULL),
    "CP, full checkpointing": ("gpt", dict(context=2), 4, FULL),
}
QUICK = ("FSDP", "HSDP", "CP x TP", "EP", "TP x FSDP, LoRA", "CP x TP, precomputed", "TP x FSDP, compiled, selective")
SLOW = ("2 micro-batches", "TP, tied head", "CP x FSDP, IPO", "EP x CP", "HSDP, LoRA, precomputed", "TP x FSDP, SimPO")


@pytest.fixture(scope="module")
def baseline(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Returns a function: the results of one process that takes the global batch as one micro-batch."""
    folder, results = tmp_path_factory.mktemp("baseline"), dict[str, Result]()

    def get(model: str, sections: dict[str, Any]) -> Result:
        sections = {name: sections[name] for name in ("lora", "preference") if name in sections}
        key = f"{model} {sections}"
        if key not in results:
            name = f"run{len(results)}"
            recipe = preference_recipe(folder, name, model=MODELS[model], training=dict(local_batch_size=8), **sections)
            results[key] = train(ranks(1), recipe)
        return results[key]

    return get


@pytest.mark.parametrize("case", tiers(CASES, QUICK, SLOW))
def test_a_layout_matches_one_process(ranks: Ranks, baseline: Any, tmp_path: Path, case: str) -> None:
    model, layout, local, sections = CASES[case]
    recipe = preference_recipe(
        tmp_path, "run", model=MODELS[model], parallelism=Parallelism(**layout), training=dict(local_batch_size=local), **sections
    )  # fmt: skip
    processes = 1
    for name in ("replicate", "shard", "context", "tensor"):
        processes *= layout.get(name, 1)
    assert_same(train(ranks(processes), recipe), baseline(model, sections))


def metrics_of(recipe: Any) -> list[dict[str, Any]]:
    lines = Path(recipe.run.dir, recipe.run.name, "metrics.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "validation_loss", "validation_accuracy", "kl", "rewards/margins", "logps/chosen")
    return [{name: each[name] for name in names if name in each} for each in map(json.loads, lines)]
