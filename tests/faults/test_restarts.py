"""Jobs that are started again, and jobs that are told to stop: through the launcher, with real processes and real signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, descendants, environment, free_port, losses, run, start, wait_for

pytestmark = pytest.mark.slow  # whole starts, one after the other

# A program for the launcher alone: it leaves a file for each start, and does at the end what the test is about.
PLANTED = """
import os, signal, sys, time
from pathlib import Path
from titanlike.config import PretrainRecipe
from titanlike.run.start import start

recipe = start(PretrainRecipe)
count = os.environ["TORCHELASTIC_RESTART_COUNT"]

def stop(number, frame):
    time.sleep({saving})
    print(f"saved after signal {{number}}", flush=True)
    sys.exit(128 + number)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, stop)
Path(f"start-{{count}}").write_text(recipe.run.name)
{ending}
"""


def planted(folder: Path, ending: str, saving: float = 0.2) -> None:
    (folder / "planted.py").write_text(PLANTED.format(ending=ending, saving=saving))
    (folder / "planted.toml").write_text(f'recipe = "planted"\nextends = "{ROOT}/train_configs/debug.toml"\n')


def starts(folder: Path) -> list[str]:
    """The name of the run in each start."""
    return [path.read_text() for path in sorted(folder.glob("start-*"))]


def workers(launcher: int) -> list[int]:
    return descendants(launcher)[1:]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.every), 2])
def test_a_job_with_a_killed_process_ends_as_if_nothing_had_been(tmp_path: Path, processes: int) -> None:
    variables = {"NPROC": str(processes)}
    options = SMALL | {"training.steps": "50", "checkpoint.interval": "25", "training.seq_len": "128"}
    whole = run(tmp_path, variables=variables, **options | {"run.name": "whole"})
    assert whole.returncode == 0, whole.stderr

    (tmp_path / "here").mkdir()
    job = start(tmp_path / "here", variables | {"MAX_RESTARTS": "2"}, **options)  # no run.name: the launcher keeps it
    runs = tmp_path / "here/runs"
    wait_for(runs)
    (folder,) = runs.iterdir()
    wait_for(folder / "checkpoints/step-00000025")
    os.kill(workers(job.pid)[-1], signal.SIGKILL)
    said, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert list(runs.iterdir()) == [folder]
    assert losses(folder) == losses(tmp_path / "runs/whole")
    assert re.search(
        r"^warning: process [01] (was ended by SIGKILL|ended with .*); starting again \(restart 1 of 2\)$", errors, re.M
    )
    assert "\nrestart 1 of 2: resumed at step 25\n" in said
    assert "torch.distributed.elastic" not in errors


def test_when_the_restarts_are_used_up_the_last_line_says_so(tmp_path: Path) -> None:
    planted(tmp_path, "sys.exit(7)")
    done = run(tmp_path, "planted.toml", variables={"MAX_RESTARTS": "1"})
    assert done.returncode == 7
    ended = "process 0 ended with exit code 7; its own words are above"
    assert done.stderr.splitlines() == [
        f"warning: {ended}; starting again (restart 1 of 1)",
        f"error: {ended}; all of MAX_RESTARTS=1 are used up",
    ]
    first, second = starts(tmp_path)
    assert first == second
    again = run(tmp_path, "planted.toml", variables={"MAX_RESTARTS": "1"})
    assert again.returncode == 7
    assert first not in starts(tmp_path)  # the next command is another run


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("print('error: a mistake', file=sys.stderr); sys.exit(2)", 2, ["error: a mistake"]),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, []),
    ],
    ids=["a mistake", "told to stop"],
)
def test_what_a_restart_cannot_help_is_not_started_again(
    tmp_path: Path, ending: str, code: int, words: list[str]
) -> None:
    planted(tmp_path, ending)
    done = run(tmp_path, "planted.toml", variables={"MAX_RESTARTS": "3"})
    assert done.returncode == code
    assert done.stderr.splitlines() == words
    assert len(starts(tmp_path)) == 1


def test_a_missing_rank_has_been_said(tmp_path: Path) -> None:
    planted(tmp_path, "print('error: rank 1 is missing', file=sys.stderr); sys.exit(3)")
    done = run(tmp_path, "planted.toml", variables={"NPROC": "2"}, **{"training.steps": "1"})
    assert done.returncode == 3
    assert set(done.stderr.splitlines()) == {"error: rank 1 is missing"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_reaches_the_processes_and_is_its_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    planted(tmp_path, "for _ in range(600): time.sleep(0.1)")  # a signal just before a sleep is heard after it
    job = start(tmp_path, {"MAX_RESTARTS": "3"}, "planted.toml")
    wait_for(tmp_path / "start-0")
    os.kill(job.pid, number)
    said, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert said.endswith(f"\nsaved after signal {int(number)}\n")
    assert errors == ""
    assert len(starts(tmp_path)) == 1


def test_what_takes_longer_than_the_grace_is_killed_and_told(tmp_path: Path) -> None:
    planted(tmp_path, "time.sleep(600)", saving=600)
    job = start(tmp_path, {"NPROC": "2"}, "planted.toml", **{"run.shutdown_timeout": "1"})
    wait_for(tmp_path / "start-0")
    time.sleep(1.0)  # the second process, too, has its handlers
    os.kill(job.pid, signal.SIGTERM)
    said, errors = job.communicate(timeout=300)  # the save is not waited for
    assert job.returncode == 143
    assert "saved" not in said
    (line,) = errors.splitlines()
    assert line.startswith("error: the processes had not ended 1 seconds after SIGTERM and were killed; ")
    assert "run.shutdown_timeout" in line


def test_torchrun_of_ones_own_needs_a_name_to_restart(tmp_path: Path) -> None:
    options = [f"--{key}={value}" for key, value in SMALL.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", str(ROOT / "recipes/pretrain.py"),
    ]  # fmt: skip
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run([*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: torchrun may restart this job (--max-restarts=1)" in done.stderr
    assert "give --run.name so that a restart finds the run" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_machines_start_again_together(tmp_path: Path) -> None:
    options = SMALL | {"training.steps": "120", "checkpoint.interval": "20"}
    shared = {
        "NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "MAX_RESTARTS": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    whole = run(tmp_path, variables={"NPROC": "2", "OMP_NUM_THREADS": "1"}, **options | {"run.name": "whole"})
    assert whole.returncode == 0, whole.stderr
    machines = [start(tmp_path, shared | {"NODE_RANK": rank}, **options | {"run.name": "r"}) for rank in "01"]
    wait_for(tmp_path / "runs/r/checkpoints/step-00000020")
    os.kill(workers(machines[1].pid)[-1], signal.SIGKILL)
    said = []
    for machine in machines:
        out, errors = machine.communicate(timeout=200)
        assert machine.returncode == 0, errors
        said.append(out)
    resumed = json.loads((tmp_path / "runs/r/environment.json").read_text())["resumed_step"]
    assert resumed in range(20, 120, 20)
    assert f"restart 1 of 1: resumed at step {resumed}\n" in said[0]
    assert losses(tmp_path / "runs/r") == losses(tmp_path / "runs/whole")
