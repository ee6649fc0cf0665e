"""Restarts and signals under the launcher, with real processes."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, descendants, free_port, losses, run, start, wait_for

pytestmark = pytest.mark.slow  # real jobs, in sequence

# A program that writes a file at each start and then runs the code of the test. It does not train.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import start

recipe = start(PretrainRecipe)
count = os.environ["TORCHELASTIC_RESTART_COUNT"]

def stop(number, frame):
    time.sleep({save_seconds})
    print(f"saved after signal {{number}}", flush=True)
    sys.exit(128 + number)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, stop)
Path(f"start-{{count}}").write_text(recipe.run.name)
{code}
"""


def write_program(folder: Path, code: str, save_seconds: float = 0.2) -> None:
    (folder / "own.py").write_text(PROGRAM.format(code=code, save_seconds=save_seconds))
    (folder / "own.toml").write_text(f'program = "own"\nextends = "{ROOT}/train_configs/debug.toml"\n')


def starts(folder: Path) -> list[str]:
    """Returns the run name of each start."""
    return [path.read_text() for path in sorted(folder.glob("start-*"))]


def workers(launcher: int) -> list[int]:
    return descendants(launcher)[1:]


def test_restarted_job_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    variables = {"NPROC": "2"}
    options = SMALL | {"training.steps": "50", "checkpoint.interval": "25", "training.seq_len": "128"}
    undisturbed = run(tmp_path, variables=variables, **options | {"run.name": "undisturbed"})
    assert undisturbed.returncode == 0, undisturbed.stderr

    (tmp_path / "disturbed").mkdir()
    job = start(tmp_path / "disturbed", variables | {"MAX_RESTARTS": "2"}, **options)  # with a generated name
    runs = tmp_path / "disturbed/runs"
    wait_for(runs)
    (folder,) = runs.iterdir()
    wait_for(folder / "checkpoints/step-00000025")
    os.kill(workers(job.pid)[-1], signal.SIGKILL)
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert list(runs.iterdir()) == [folder]
    assert losses(folder) == losses(tmp_path / "runs/undisturbed")
    assert re.search(
        r"^warning: process [01] (was terminated by SIGKILL.*|exited with .*); restarting \(1 of 2\)$", errors, re.M
    )
    assert "\nrestart 1 of 2: resumed at step 25\n" in output
    assert "torch.distributed.elastic" not in errors


def test_used_up_restarts_are_reported(tmp_path: Path) -> None:
    write_program(tmp_path, "sys.exit(7)")
    done = run(tmp_path, "own.toml", variables={"MAX_RESTARTS": "1"})
    assert done.returncode == 7
    failure = "process 0 exited with code 7; see its output above"
    assert done.stderr.splitlines() == [
        f"warning: {failure}; restarting (1 of 1)",
        f"error: {failure}; all of MAX_RESTARTS=1 are used up",
    ]
    first, second = starts(tmp_path)
    assert first == second
    again = run(tmp_path, "own.toml", variables={"MAX_RESTARTS": "1"})
    assert again.returncode == 7
    assert first not in starts(tmp_path)  # the next launch is another run


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_signal_to_the_launcher_reaches_the_processes_and_sets_its_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_program(tmp_path, "for _ in range(600): time.sleep(0.1)")  # a signal just before a sleep is handled after it
    job = start(tmp_path, {"MAX_RESTARTS": "3"}, "own.toml")
    wait_for(tmp_path / "start-0")
    os.kill(job.pid, number)
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert output.endswith(f"\nsaved after signal {int(number)}\n")
    assert errors == ""
    assert len(starts(tmp_path)) == 1


def test_processes_that_exceed_the_shutdown_timeout_are_killed(tmp_path: Path) -> None:
    write_program(tmp_path, "time.sleep(600)", save_seconds=600)
    job = start(tmp_path, {"NPROC": "2"}, "own.toml", **{"run.shutdown_timeout": "1"})
    wait_for(tmp_path / "start-0")
    time.sleep(1.0)  # until the second process has its handlers, too
    os.kill(job.pid, signal.SIGTERM)
    output, errors = job.communicate(timeout=300)  # does not wait for the save
    assert job.returncode == 143
    assert "saved" not in output
    (line,) = errors.splitlines()
    assert line.startswith("error: the processes did not exit within 1 s of SIGTERM and were killed; ")
    assert "run.shutdown_timeout" in line


def test_two_nodes_restart_together(tmp_path: Path) -> None:
    options = SMALL | {"training.steps": "120", "checkpoint.interval": "20"}
    shared = {
        "NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "MAX_RESTARTS": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    undisturbed = run(
        tmp_path, variables={"NPROC": "2", "OMP_NUM_THREADS": "1"}, **options | {"run.name": "undisturbed"}
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    nodes = [start(tmp_path, shared | {"NODE_RANK": rank}, **options | {"run.name": "r"}) for rank in "01"]
    wait_for(tmp_path / "runs/r/checkpoints/step-00000020")
    os.kill(workers(nodes[1].pid)[-1], signal.SIGKILL)
    outputs = []
    for node in nodes:
        output, errors = node.communicate(timeout=200)
        assert node.returncode == 0, errors
        outputs.append(output)
    resumed = json.loads((tmp_path / "runs/r/environment.json").read_text())["resumed_step"]
    assert resumed in range(20, 120, 20)
    assert f"restart 1 of 1: resumed at step {resumed}\n" in outputs[0]
    assert losses(tmp_path / "runs/r") == losses(tmp_path / "runs/undisturbed")
