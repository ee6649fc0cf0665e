"""Options of data parallelism change no number; test_parity.py has its layouts."""

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
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What one process gets, by model."""
    folder = tmp_path_factory.mktemp("alone")
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
def test_resharding_gives_the_numbers_of_one_process(
    ranks: Ranks, alone: dict[str, Result], tmp_path: Path, model: str, processes: int, layout: dict[str, Any]
) -> None:
    recipe = tiny(tmp_path, "run", model=MODELS[model], parallelism=Parallelism(**layout))
    assert_same(train(ranks(processes), recipe), alone[model])


@pytest.mark.parametrize("processes", [1, 2])
def test_accumulated_micro_batches_are_one_batch(
    ranks: Ranks, alone: dict[str, Result], tmp_path: Path, processes: int
) -> None:
    """alone takes 8 x 1; here it is 1 x 8 or, on two ranks, 2 x 2 each and 1 x 4 each."""
    for local in {1: [8], 2: [2, 4]}[processes]:
        recipe = tiny(tmp_path, f"local{local}", training=dict(local_batch_size=local))
        assert_same(train(ranks(processes), recipe), alone["llama"])


def test_gradients_may_be_summed_in_bfloat16(ranks: Ranks, alone: dict[str, Result], tmp_path: Path) -> None:
    found = train(ranks(2), tiny(tmp_path, "bfloat16", training=dict(reduce_dtype="bfloat16")))
    assert_same(found, alone["llama"], loss=1e-3, norm=1e-2, weights=0.05)
    in_float32 = train(ranks(2), tiny(tmp_path, "float32"))
    assert found.gradient_norms != in_float32.gradient_norms  # two such runs would be equal to the bit


def test_bfloat16_on_two_ranks_is_bfloat16_on_one(ranks: Ranks, tmp_path: Path) -> None:
    def run(name: str, processes: int) -> Result:
        return train(ranks(processes), tiny(tmp_path, name, training=dict(compute_dtype="bfloat16")))

    # Gradients are summed over ranks in float32 but come from bfloat16 arithmetic, whose order differs: 8 bits of mantissa.
    one, two = run("one", 1), run("two", 2)
    assert_same(one, two, loss=1e-3, norm=1e-2, weights=0.05)
