"""Data-parallel options do not change results; test_parity.py covers the layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.training import MODELS, assert_same, tiny, train
from titanlike.config.sections import Parallelism
from titanlike.verify import Result

Ranks = Callable[[int], Pool]


@pytest.fixture(scope="module")
def baseline(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Results of one process, by model."""
    folder = tmp_path_factory.mktemp("baseline")
    return {name: train(ranks(1), tiny(folder, name, model=model)) for name, model in MODELS.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (4, dict(shard=4, reshard_after_forward="never")),
        (4, dict(shard=4, reshard_after_forward="always")),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_resharding_matches_one_process(
    ranks: Ranks, baseline: dict[str, Result], tmp_path: Path, model: str, processes: int, layout: dict[str, Any]
) -> None:
    recipe = tiny(tmp_path, "run", model=MODELS[model], parallelism=Parallelism(**layout))
    assert_same(train(ranks(processes), recipe), baseline[model])


@pytest.mark.parametrize("processes", [1, 2])
def test_gradient_accumulation_matches_one_process(
    ranks: Ranks, baseline: dict[str, Result], tmp_path: Path, processes: int
) -> None:
    """The baseline has 8 micro-batches of 1; these have 1 of 8 or, on two ranks, 2 of 2 and 1 of 4 each."""
    for local in {1: [8], 2: [2, 4]}[processes]:
        recipe = tiny(tmp_path, f"local{local}", training=dict(local_batch_size=local))
        assert_same(train(ranks(processes), recipe), baseline["llama"])


def test_bfloat16_reduction_stays_near_float32(ranks: Ranks, baseline: dict[str, Result], tmp_path: Path) -> None:
    found = train(ranks(2), tiny(tmp_path, "bfloat16", training=dict(reduce_dtype="bfloat16")))
    assert_same(found, baseline["llama"], loss=1e-3, norm=1e-2, weights=0.05)
    in_float32 = train(ranks(2), tiny(tmp_path, "float32"))
    assert found.gradient_norms != in_float32.gradient_norms  # two float32 runs are bitwise equal


def test_bfloat16_on_two_ranks_matches_one(ranks: Ranks, tmp_path: Path) -> None:
    def run(name: str, processes: int) -> Result:
        return train(ranks(processes), tiny(tmp_path, name, training=dict(compute_dtype="bfloat16")))

    # Gradients are reduced in float32 but computed in bfloat16, in another order: 8 bits of mantissa.
    one, two = run("one", 1), run("two", 2)
    assert_same(one, two, loss=1e-3, norm=1e-2, weights=0.05)
