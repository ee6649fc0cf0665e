"""`titanlike launch slurm` under a real slurmctld with two slurmd on loopback, from Debian's packages."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.debian import require
from tests.launching import ROOT, SMALL, environment, free_port, losses, records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="requires root: munged and slurmctld run as this user"),
]

PACKAGES = ("slurm-wlm", "munge")
STEPS = 300
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts again after the life time of its credential, by default two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 RealMemory=1000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 RealMemory=1000
PartitionName=debug Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts munged, slurmctld and two slurmd. Yields the environment of a user's shell."""
    for program in ("munged", "slurmctld", "slurmd"):
        require(program, *PACKAGES)
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munged refuses a socket in a folder that not everybody may search
    (folder / "state").mkdir()
    (folder / "munge").mkdir(mode=0o700)
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o400)
    config = folder / "slurm.conf"
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
    values = {"port": free_port(), "port1": free_port(), "port2": free_port()}
    config.write_text(CONFIG.format(folder=folder, host=host, **values))
    variables = environment(SLURM_CONF=str(config), MASTER_ADDR="127.0.0.1", PYTHONPATH=str(ROOT))
    files = {"socket": "munge.socket", "key": "munge/key", "pid": "munge/pid", "log": "munge/log", "seed": "munge/seed"}
    options = [f"--{name}{'' if name == 'socket' else '-file'}={folder / file}" for name, file in files.items()]
    munge = ["munged", "--foreground", "--force", *options]
    started = []
    try:
        daemons = {
            "munged": munge,
            "slurmctld": ["slurmctld", "-D"],
            "slurmd-node1": ["slurmd", "-D", "-N", "node1"],
            "slurmd-node2": ["slurmd", "-D", "-N", "node2"],
        }
        for name, command in daemons.items():
            with (folder / f"{name}.out").open("wb") as log:
                started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
            time.sleep(1)
        until(lambda: "idle 2" in output(["sinfo", "-h", "-o", "%T %D"], variables), "two idle nodes")
        yield variables
    finally:
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(started):
            daemon.wait(30)


def output(command: list[str], variables: dict[str, str]) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False).stdout


def until(condition: object, what: str, seconds: float = 240.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.2)


def submit(folder: Path, variables: dict[str, str], name: str) -> str:
    """Submits a run on two nodes with one process each. Returns its job id."""
    overrides = SMALL | {
        "training.steps": str(STEPS), "checkpoint.interval": "0", "run.device": "cpu", "run.name": name,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "titanlike.tools.cli.main", "launch", "slurm", str(ROOT / "train_configs/debug.toml"), "--nodes=2",
        "--gpus-per-node=1", "--time=10", *(f"--{key}={value}" for key, value in overrides.items()),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Submitted batch job" in done.stdout
    return done.stdout.split()[-1]


def wait_for_end(job: str, variables: dict[str, str]) -> str:
    """Returns the state of a job that has ended."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def state() -> str:
        shown = output(["scontrol", "show", "job", "-o", job], variables)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")

    until(lambda: state() in ended, f"end of job {job}")
    return state()


@pytest.mark.minutes
def test_a_job_that_is_stopped_before_its_limit_is_requeued_and_equals_one_that_was_not(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"  # a path that has to be quoted
    folder.mkdir()
    assert wait_for_end(submit(folder, slurm, "undisturbed"), slurm) == "COMPLETED"
    expected = losses(folder / "runs/undisturbed")
    assert max(expected) == STEPS

    job = submit(folder, slurm, "stopped")
    metrics = folder / "runs/stopped/metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 10, "steps")
    # What --signal=B:USR1@180 sends 180 s before the time limit.
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=slurm, check=True)
    assert wait_for_end(job, slurm) == "COMPLETED"
    log = (folder / f"launch/stopped/slurm-{job}.out").read_text()
    saved = [record["step"] for record in records(folder / "runs/stopped") if "save_seconds" in record]
    assert len(saved) == 2 and 10 <= saved[0] < STEPS
    assert f"stopped by SIGUSR1; to resume from step {saved[0]}:" in log
    assert f"requeueing job {job}" in log and f"resumed at step {saved[0]}\n" in log
    assert losses(folder / "runs/stopped") == expected


def test_a_job_that_is_cancelled_saves_a_checkpoint_and_is_not_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit(tmp_path, slurm, "cancelled")
    metrics = tmp_path / "runs/cancelled/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), "steps")
    subprocess.run(["scancel", job], env=slurm, check=True)
    assert wait_for_end(job, slurm) == "CANCELLED"
    until(lambda: not output(["squeue", "-h"], slurm).strip(), "empty queue")
    log = (tmp_path / f"launch/cancelled/slurm-{job}.out").read_text()
    assert "stopped by SIGTERM; to resume from step " in log and "requeueing" not in log
