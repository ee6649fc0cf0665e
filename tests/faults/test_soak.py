"""The program that kills a run over and over: that it sees what it looks for, and that there is nothing to see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import save_stall, soak
from benchmarks.sameness import Unsound, differences, half_done, look, recorded
from tests.launching import ROOT
from titanlike.checkpoint.format import ShardRange, ShardSpec, write
from titanlike.checkpoint.store import CheckpointMetadata, Folder, commit, file_of

WEIGHT = torch.arange(12.0).view(4, 3)


def a_run(folder: Path, steps: list[int], weight: torch.Tensor = WEIGHT, loss: float = 2.0) -> Path:
    """A run of as many steps as the last of its checkpoints says, saved by two ranks."""
    (folder / "checkpoints").mkdir(parents=True)
    records = [dict(step=n, loss=loss / n, grad_norm=1.0, learning_rate=0.1, tokens=n) for n in range(1, steps[-1] + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    store = Folder(folder / "checkpoints")
    for step in steps:
        store.begin(step, 1000)
        sums = {}
        for rank, half in enumerate(weight.chunk(2)):
            with store.create(step, file_of(rank)) as stream:
                place = ShardRange(tuple(weight.shape), (2 * rank, 0), tuple(half.shape))
                sums[file_of(rank)] = write(stream, [ShardSpec("model.w", place, half)], {})
        commit(store, CheckpointMetadata(step, {}, "", {}, {}), sums)
    return folder


def test_equal_runs_do_not_differ(tmp_path: Path) -> None:
    assert differences(a_run(tmp_path / "one", [2, 3]), a_run(tmp_path / "other", [1, 3])) == []


def test_every_difference_is_seen(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", [3])
    nearly = WEIGHT.clone()
    nearly[3, 2] = torch.nextafter(nearly[3, 2], torch.tensor(100.0))
    assert differences(one, a_run(tmp_path / "weight", [3], nearly)) == ["model.w"]
    assert differences(one, a_run(tmp_path / "zero", [3], -0.0 * WEIGHT)) == ["model.w"]
    assert differences(one, a_run(tmp_path / "loss", [3], loss=2.0000001)) == ["step 1", "step 2", "step 3"]
    assert differences(one, a_run(tmp_path / "short", [2])) == [
        "step 3", "the last checkpoint is that of step 3, undisturbed 2",
    ]  # fmt: skip


def test_a_step_that_is_recorded_twice_or_not_at_all_is_seen(tmp_path: Path) -> None:
    file = a_run(tmp_path / "one", [3]) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], lines[1]]))
    with pytest.raises(Unsound, match="step 2 follows step 2"):
        recorded(tmp_path / "one")
    file.write_text(lines[0] + lines[2])
    with pytest.raises(Unsound, match="step 3 follows step 1"):
        recorded(tmp_path / "one")
    file.write_text(lines[0] + lines[1][:-20])  # cut short by a kill
    assert list(recorded(tmp_path / "one")) == [1]


def test_a_checkpoint_that_is_damaged_or_gone_is_seen(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [1, 2, 3])
    assert look(run, [0, 1, 2], keep=2) == [1, 2, 3]  # 0 is gone, and two newer ones are there
    with pytest.raises(Unsound, match=r"the checkpoint of step 4 is gone, and newer than it are only those of \[\]"):
        look(run, [3, 4], keep=2)
    file = run / "checkpoints/step-00000002/rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Unsound, match=r"rank-00001.safetensors is damaged"):
        look(run, [], keep=2)


def test_what_is_half_done_is_seen_once(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [1])
    assert half_done(run) == {} == half_done(tmp_path / "no such run")
    (run / "checkpoints/step-00000002.partial").mkdir()
    assert list(half_done(run)) == ["step-00000002.partial"]


def test_figures_leave_out_starts_that_were_killed_before_their_first_step() -> None:
    def kill(aim: str, **fields: object) -> dict[str, object]:
        usual = soak.asdict(soak.Kill("rank", aim, "steps", first_step=2.0, step=7, saved=5))
        return usual | {"done_again": 2} | fields

    kills = [kill("save"), kill("start", first_step=1.0), kill("start", first_step=None, step=0, done_again=0),
             kill("steps", first_step=4.0, done_again=4, kind="term", interrupted=["step-00000005.partial"])]  # fmt: skip
    found = soak.figures({"kills": kills, "last_recovery": 6.0})
    # The first start begins the run, and recovers nothing; a slow start is the likelier to be killed where starts are aimed at.
    assert (found["recoveries"], found["seconds_to_recover"]["mean"]) == (2, 5.0)
    assert (found["killed_in_training"], found["steps_done_again"]["max"]) == (2, 2)
    assert (found["saves_interrupted"], found["told_to_stop_in_training"], found["of_them_saved"]) == (1, 1, 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what processes another one has started")
def test_a_run_killed_three_times_is_the_run_that_was_not(tmp_path: Path) -> None:
    words = f"--kills 3 --folder {tmp_path / 'runs'} --out {tmp_path / 'found.json'}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *words.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["kills"]) == 3
    assert found["differences"] == [] == found["leftovers"]
    assert found["records_compared"] >= 100 and found["tensors_compared"] > 100
    assert soak.table(found) in done.stdout


@pytest.mark.every  # a benchmark's own test, as long as the benchmark
def test_what_a_save_costs_is_measured_for_all_ways_to_save(tmp_path: Path) -> None:
    words = f"--model cpu_6m --rounds 1 --ranks 2 --folder {tmp_path} --out {tmp_path / 'found.json'}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.save_stall", *words.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = found["ranks"]["2"]
    assert list(rows) == list(save_stall.ROWS)
    sizes = [row[0]["bytes"] for row in rows.values()]
    assert min(sizes) > 12 * found["parameters"] and max(sizes) < 1.02 * min(sizes)
    for name, (one,) in rows.items():
        assert 0 < one["stall"] <= one["seconds"] * 1.05 + 0.1, name
        assert one["steps_beside"] >= 1 or not name.count("async"), name
    assert found["figures"]["2"]["dcp async"]["stall_ratio"]["median"] == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert save_stall.table(found) in done.stdout
