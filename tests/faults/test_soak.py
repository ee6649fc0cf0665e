"""The soak test detects corrupt runs and differences, and finds none in runs that were killed."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from benchmarks.comparison import RunCorrupt, differences
from benchmarks.soak_faults import Usage, growth
from titanlike.checkpoint.files import file_of
from titanlike.checkpoint.format import ShardRange, ShardSpec, write
from titanlike.checkpoint.store import CheckpointMetadata, LocalStore, complete

WEIGHT = torch.arange(12.0).view(4, 3)


def make_run(folder: Path, steps: list[int], weight: torch.Tensor = WEIGHT, loss: float = 2.0) -> Path:
    """Writes the files of a run on two ranks that has these checkpoints, and ends with the last of them."""
    (folder / "checkpoints").mkdir(parents=True)
    records = [dict(step=n, loss=loss / n, grad_norm=1.0, learning_rate=0.1, tokens=n) for n in range(1, steps[-1] + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    store = LocalStore(folder / "checkpoints")
    for step in steps:
        store.begin(step, 1000)
        digests = {}
        for rank, half in enumerate(weight.chunk(2)):
            with store.create(step, file_of(rank)) as stream:
                shard_range = ShardRange(tuple(weight.shape), (2 * rank, 0), tuple(half.shape))
                digests[file_of(rank)] = write(stream, [ShardSpec("model.w", shard_range, half)], {})
        complete(store, CheckpointMetadata(step, {}, "", {}, {}), digests)
    return folder


def test_every_difference_is_detected(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", [3])
    assert differences(one, make_run(tmp_path / "equal", [1, 3])) == []
    close = WEIGHT.clone()
    close[3, 2] = torch.nextafter(close[3, 2], torch.tensor(100.0))
    assert differences(one, make_run(tmp_path / "weight", [3], close)) == ["model.w"]
    assert differences(one, make_run(tmp_path / "zero", [3], -0.0 * WEIGHT)) == ["model.w"]
    assert differences(one, make_run(tmp_path / "loss", [3], loss=2.0000001)) == ["step 1", "step 2", "step 3"]
    assert differences(one, make_run(tmp_path / "short", [2])) == [
        "step 3", "the last checkpoint is of step 3, undisturbed 2",
    ]  # fmt: skip


def test_growth_of_a_process_is_detected() -> None:
    flat = [Usage(700.0 + step % 3, 20, 18) for step in range(80)]
    held = growth({1: flat, 2: flat[:10]})  # the second has too few samples
    assert held["memory_mib"]["largest_growth"] <= 1.0 and held["threads"]["late"] == 20
    soak._check_growth(held)
    for leak in (Usage(760.0, 20, 18), Usage(700.0, 21, 18), Usage(700.0, 20, 19)):
        with pytest.raises(RunCorrupt, match="holds more"):
            soak._check_growth(growth({1: [*flat[:50], *[leak] * 30]}))
