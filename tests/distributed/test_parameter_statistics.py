"""Statistics of each parameter under sharding, tensor parallelism and a pipeline equal those of one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import records
from tests.pool import Pool
from tests.training import tiny, train, world_size

INTERVAL = 2


def statistics_of(folder: Path) -> dict[tuple[int, str], float]:
    return {
        (record["step"], name): value
        for record in records(folder)
        for name, value in record.items()
        if name.startswith("layers/")
    }


@pytest.mark.parametrize(
    "layout",
    [
        dict(shard=1, tensor=2),
        pytest.param(dict(pipeline=2, shard=2), marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(ranks: Callable[[int], Pool], tmp_path: Path, layout: dict[str, int]) -> None:
    metrics = dict(layer_interval=INTERVAL)
    expected = tiny(tmp_path, "one", metrics=metrics)
    train(ranks(1), expected)
    sharded = tiny(tmp_path, "sharded", metrics=metrics, parallelism=layout)
    train(ranks(world_size(sharded)), sharded)
    one, other = statistics_of(tmp_path / "one"), statistics_of(tmp_path / "sharded")
    assert {step for step, _ in one} == {2, 4}
    assert len(one) == 2 * 3 * (3 * 9 + 3)  # steps, statistics, parameters of the blocks and around them
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=2e-3, abs=1e-7), key
    ratios = [value for (_, name), value in one.items() if "update_ratio" in name]
    assert all(0 < ratio < 1 for ratio in ratios)
    last = [record for record in records(tmp_path / "sharded") if "loss" in record][-1]
    assert last["max_memory_gib"] >= 0.999 * last["memory_gib"] > 0  # gathered in float32, and rounded
    assert 0 <= last["slowest_rank"] < world_size(sharded)
    assert last["slowest_rank_ratio"] >= 1
