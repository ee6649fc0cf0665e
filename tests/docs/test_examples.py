"""The programs in examples/, each compared with one process."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ema
import float8
import fsdp_tensor
import own_data
import own_optimizer
import pipeline
import pytest
import qk_norm

from tests.launching import ROOT, environment, free_port, python
from tests.pool import Ranks


@pytest.mark.parametrize(
    ("example", "processes", "tolerance"),
    [
        (fsdp_tensor.main, 4, 1e-5),
        (pipeline.main, 4, 1e-5),
        (qk_norm.main, 4, 1e-4),
        (own_optimizer.main, 2, 1e-5),
        (own_data.main, 2, 1e-5),
        (ema.main, 2, 1e-5),
    ],
    ids=lambda value: value.__module__ if callable(value) else None,
)
def test_an_example_matches_one_process(
    ranks: Ranks, example: Callable[[], float], processes: int, tolerance: float
) -> None:
    assert max(ranks(processes).run(example)) < tolerance


@pytest.mark.slow
def test_float8_stays_near_float32(ranks: Ranks) -> None:
    for layout, one in ranks(4).run(float8.main):
        assert 1e-4 < layout < 0.02 and 1e-4 < one < 0.02  # it rounds, and trains all the same


def _hashes(done: subprocess.CompletedProcess[str], first_step: int) -> set[tuple[str, str]]:
    assert done.returncode == 0, done.stderr
    assert f"started at step {first_step}," in done.stdout
    return set(re.findall(r"rank (\d): started at step \d, weights (\w{16})", done.stdout))


def test_a_killed_loop_with_checkpoints_ends_with_the_same_weights(tmp_path: Path) -> None:
    def run(folder: str, *options: str) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        return python(tmp_path, *torchrun, str(ROOT / "examples/checkpoints.py"), folder, *options)

    expected = _hashes(run("undisturbed"), 1)
    assert len(expected) == 2
    killed = run("killed", "--kill-at=6")
    assert killed.returncode and "started at" not in killed.stdout
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "killed").glob("step-*[0-9]"))
    assert saved in (2, 4) and _hashes(run("killed"), saved + 1) == expected


@pytest.mark.slow
def test_the_command_of_an_example_runs() -> None:
    command = str(Path(sys.executable).parent / "torchrun")
    done = subprocess.run(
        [command, "--nproc-per-node=2", f"--master-port={free_port()}", "examples/fsdp_tensor.py"],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest difference of a loss from one process: ") == 2
