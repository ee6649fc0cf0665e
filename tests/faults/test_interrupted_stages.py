"""Stages that are interrupted and started again: the same weights, to the bit, as without an interruption."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import assert_equal_state
from tests.forkserver import Forked
from tests.launching import SMALL, environment, wait_for
from titanlike.checkpoint.loader import read_whole

SMALL_STAGES = {key: value for key, value in SMALL.items() if key.startswith(("model.", "optimizer.", "sample."))} | {
    "training.steps": "150", "training.global_batch_size": "2", "training.local_batch_size": "2", "validation.interval": "0",
    "checkpoint.interval": "25", "metrics.interval": "1", "data.prefetch": "0",
}  # fmt: skip
STAGES = ("pretrain", "decay", "chat")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    recipes = [f"stages/{name}" for name in STAGES]
    overrides = [f"--{key}={value}" for key, value in SMALL_STAGES.items()]
    return Forked(
        [sys.executable, "-m", "titanlike.tools.cli.main", "train", *recipes, "--run.name=all", *overrides, *options],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def interrupt(folder: Path, stage: str, how: str) -> tuple[int, str, str]:
    """Ends the stages when this one has saved its first checkpoint. Returns the exit code and what was printed."""
    job = start(folder)
    wait_for(folder / f"runs/all-{stage}/checkpoints/latest", seconds=120)
    if how == "SIGKILL of all":
        os.killpg(job.pid, signal.SIGKILL)
    else:
        job.send_signal(signal.Signals[how.split()[0]])  # of the parent only
    output, errors = job.communicate(timeout=120)  # also waits for the stage, which has the same pipe
    return job.returncode, output, errors


@pytest.mark.slow
def test_stages_that_were_interrupted_end_with_the_same_weights(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    whole = start(undisturbed)
    output, errors = whole.communicate(timeout=300)
    assert whole.returncode == 0, errors
    assert all(f"stage {number + 1} of 3" in output for number in range(3))

    assert interrupt(disturbed, "pretrain", "SIGKILL of all")[0] == -signal.SIGKILL
    code, output, errors = interrupt(disturbed, "decay", "SIGTERM")
    assert code == 128 + signal.SIGTERM, errors
    assert "is trained: runs/all-pretrain" not in output, "it resumed the first stage"
    assert "to resume all stages: titanlike train" in errors and "--run.name=all" in errors
    code, output, errors = interrupt(disturbed, "chat", "SIGKILL of the parent")
    assert code == -signal.SIGKILL
    assert "is trained: runs/all-pretrain" in output and "resumed at step" in output
    last = start(disturbed)
    output, errors = last.communicate(timeout=300)
    assert last.returncode == 0, errors
    assert output.count("is trained: runs/all-") == 2
    for name in STAGES:
        found, expected = (
            read_whole(folder / f"runs/all-{name}/checkpoints/step-00000150") for folder in (disturbed, undisturbed)
        )
        assert_equal_state(found, expected)

    # What is trained is not trained again, and a stage that would no longer fit the later ones is refused.
    again = start(disturbed)
    output, errors = again.communicate(timeout=60)
    assert (again.returncode, output.count("is trained")) == (0, 3), errors
    longer = start(disturbed, "--training.steps=175")
    output, errors = longer.communicate(timeout=60)
    assert (
        longer.returncode == 2 and "runs/all-decay continues runs/all-pretrain, which is not the finished run" in errors
    )
