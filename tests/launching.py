"""Run `./run_train.sh` and read what it leaves behind.

Processes are forked (`tests/forkserver.py`) unless a test asks for `real=True`: a shell, a new interpreter and all imports.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.forkserver import ROOT, Forked

# A moment's work, for what is not about the numbers of the debug recipe itself.
SMALL = {
    "model.dim": "64", "model.num_layers": "2", "model.num_heads": "2", "model.num_kv_heads": "1", "model.ffn_dim": "96",
    "data.source": "synthetic", "training.seq_len": "32", "training.global_batch_size": "4",
    "training.local_batch_size": "2", "schedule.warmup_steps": "2", "validation.interval": "0",
    "sample.tokens": "0", "metrics.interval": "1", "metrics.tensorboard": "false", "training.steps": "6",
}  # fmt: skip


def command(*words: str, real: bool = False, **overrides: str) -> list[str]:
    """The command line of a run. The shell script does no more than to run this program."""
    program = [str(ROOT / "run_train.sh")] if real else [sys.executable, str(ROOT / "titanlike/cli/launch.py")]
    return [*program, *words, *(f"--{key}={value}" for key, value in overrides.items())]


def environment(**variables: str) -> dict[str, str]:
    """Ours, with this python first on the path and without what another launcher may have set."""
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
    """Run a recipe to its end."""
    return _end(start(folder, variables, *words, real=real, **overrides))


def python(folder: Path, *words: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script, or with `-m` a module, in a forked process to its end."""
    started = Forked(
        [sys.executable, *words], cwd=folder, env=environment(**variables or {}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return _end(started)


def _end(job: "subprocess.Popen[str]") -> subprocess.CompletedProcess[str]:
    try:
        said, errors = job.communicate(timeout=300)
    except BaseException:
        job.kill()
        raise
    return subprocess.CompletedProcess(job.args, job.returncode, said, errors)


def start(
    folder: Path, variables: dict[str, str] | None = None, *words: str, real: bool = False, **overrides: str
) -> subprocess.Popen[str]:
    """Start a run in a session of its own."""
    started = subprocess.Popen if real else Forked
    return started(
        command(*words, real=real, **overrides), cwd=folder, env=environment(**variables or {}), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def free_port() -> str:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def records(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(run_folder) if "loss" in record}


def wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def cpu_seconds() -> float:
    """What processes that were started here, and have ended, took of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def descendants(parent: int) -> list[int]:
    """A process and all that it started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [parent]
    for process in found:
        found += [child for child, ppid in pairs if ppid == process]
    return found
