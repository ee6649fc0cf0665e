"""Runs `./run_train.sh` and reads its output files.

Processes are forked (`tests/forkserver.py`) unless a test passes `real=True`, which starts a shell and a new interpreter.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.forkserver import ROOT, Forked


class Printed(NamedTuple):
    out: str
    err: str


Cli = Callable[..., Printed]  # the fixtures `cli` and `program`

# Overrides of the debug recipe for a run of about a second, with AdamW alone.
SMALL = {
    "model.dim": "64", "model.num_layers": "2", "model.num_heads": "2", "model.num_kv_heads": "1", "model.ffn_dim": "96",
    "data.source": "synthetic", "training.seq_len": "32", "training.global_batch_size": "4",
    "training.local_batch_size": "2", "schedule.warmup_steps": "2", "validation.interval": "0",
    "optimizer.lr": "1.5e-3", "optimizer.groups": "[]", "optimizer.muon_momentum": "0.95", "schedule.decay": "cosine",
    "schedule.min_ratio": "0.1", "checkpoint.interval": "200",
    "sample.tokens": "0", "metrics.interval": "1", "metrics.trackers": "[]", "training.steps": "6",
}  # fmt: skip


def command(*words: str, real: bool = False, **overrides: str) -> list[str]:
    """Returns the command line of a run. The shell script only executes this program."""
    program = [str(ROOT / "run_train.sh")] if real else [sys.executable, str(ROOT / "titanlike/run/launch.py")]
    return [*program, *words, *(f"--{key}={value}" for key, value in overrides.items())]


def environment(**variables: str) -> dict[str, str]:
    """Returns this environment with this Python first on the path, without variables set by a launcher."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "MASTER_PORT", "MAX_RESTARTS")
    }
    return (
        kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""} | variables
    )


def run(
    folder: Path, *words: str, variables: dict[str, str] | None = None, real: bool = False, **overrides: str
) -> subprocess.CompletedProcess[str]:
    """Runs a recipe and waits for it to end."""
    return _end(start(folder, variables, *words, real=real, **overrides))


def python(folder: Path, *words: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a script, or a module with `-m`, in a forked process and waits for it to end."""
    started = Forked(
        [sys.executable, *words], cwd=folder, env=environment(**variables or {}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return _end(started)


def run_forked(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a Python program in a forked process, with its output as text."""
    return _end(
        Forked(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )


def _end(job: "subprocess.Popen[str]") -> subprocess.CompletedProcess[str]:
    try:
        output, errors = job.communicate(timeout=300)
    except BaseException:
        job.kill()
        raise
    return subprocess.CompletedProcess(job.args, job.returncode, output, errors)


def start(
    folder: Path, variables: dict[str, str] | None = None, *words: str, real: bool = False, **overrides: str
) -> subprocess.Popen[str]:
    """Starts a run in a new session."""
    started = subprocess.Popen if real else Forked
    return started(
        command(*words, real=real, **overrides), cwd=folder, env=environment(**variables or {}), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def free_port() -> str:
    """Returns a port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def records(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def recorded(run_folder: Path, key: str) -> list[Any]:
    """Returns the values of a key, in the order of the records that have it."""
    return [record[key] for record in records(run_folder) if key in record]


def losses(run_folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(run_folder) if "loss" in record}


def wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def descendants(parent: int) -> list[int]:
    """Returns a process and its descendants."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [parent]
    for process in found:
        found += [child for child, ppid in pairs if ppid == process]
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of dotted keys."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return tables
