"""The watchdog in real jobs: a missing rank is named, and the job ends."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.faulty import Fault
from tests.faults.starting import Job, Starter
from tests.launching import ROOT, SMALL, descendants, run, start, wait_for

ENDLESS = SMALL | {
    "training.steps": "1000000",
    "checkpoint.enabled": "false",
    "checkpoint.interval": "500",
    "run.name": "r",
    "run.hang_timeout": "5",
}


def workers(launcher: int) -> dict[int, int]:
    """Returns the process of each rank. The launcher starts them in this order."""
    return dict(enumerate(sorted(descendants(launcher)[1:])))


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_steps(run_dir: Path, count: int = 5) -> None:
    wait_for(run_dir / "metrics.jsonl")
    end = time.monotonic() + 120
    while len((run_dir / "metrics.jsonl").read_text().splitlines()) < count:
        assert time.monotonic() < end, "no progress"
        time.sleep(0.1)


def kill_all(launcher: "subprocess.Popen[str]") -> None:
    for process in descendants(launcher.pid):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    launcher.communicate()


def write_copy(directory: Path, before: str, inserted: str) -> None:
    """Writes a copy of the shipped program with code inserted before a line, and a recipe that uses it."""
    program = (ROOT / "recipes/pretrain.py").read_text()
    assert program.count(before) == 1
    program = program.replace(before, inserted + before).replace("import torch\n", "import os, time\nimport torch\n")
    (directory / "own.py").write_text(program)
    (directory / "own.toml").write_text(f'program = "own"\nextends = "{ROOT}/train_configs/debug.toml"\n')


@pytest.mark.slow
def test_stopped_process_is_named_and_killed(tmp_path: Path) -> None:
    stopped = 1
    launcher = start(tmp_path, {"NPROC": "2"}, **ENDLESS | {"run.shutdown_timeout": "600"})
    try:
        wait_for_steps(tmp_path / "runs/r")
        ranks = workers(launcher.pid)
        os.kill(ranks[stopped], signal.SIGSTOP)
        _, errors = launcher.communicate(timeout=300)  # the launcher alone would wait longer for the stopped process
    finally:
        kill_all(launcher)
    live = 1 - stopped
    assert launcher.returncode == 3
    assert re.search(
        rf"^error: rank {stopped} \(pid {ranks[stopped]} on \S+\) sent its last heartbeat \d+ s ago at step \d+: "
        "its process is stopped, or its host is down$",
        errors,
        re.MULTILINE,
    ), errors
    assert errors.count("error: the run hangs: ") == 1
    assert f"error: rank {live} waits in " in errors
    assert re.search(
        rf"^error: rank {live} waits in .*(titanlike|recipes|models)/(\w+/)?\w+\.py:\d+\)", errors, re.MULTILINE
    ), errors
    assert "exited with code" not in errors
    assert "Traceback" not in errors
    assert "Timed out" not in errors
    stacks = (tmp_path / f"runs/r/hang/rank-{live:05d}.txt").read_text()
    assert f"rank {live}, pid {ranks[live]}" in stacks
    assert "in main" in stacks
    assert not (tmp_path / f"runs/r/hang/rank-{stopped:05d}.txt").exists()
    assert (tmp_path / f"runs/r/hang/flight_gloo_{live:05d}").stat().st_size > 1000
    for process in ranks.values():
        assert is_gone(process)


MOMENTS = {
    "start": Fault("titanlike.models.common.init.initialize", rank=1, do="SIGSTOP"),
    "save": Fault("titanlike.checkpoint.saver.CheckpointManager.save", rank=1, step=2, do="SIGSTOP"),
    "validation": Fault("titanlike.data.batches.loader.BatchLoader.first_batches", rank=1, step=3, do="SIGSTOP"),
    "end": Fault("titanlike.inference.evaluator.Evaluator.sample_text", rank=0, do="SIGSTOP"),
}


def check_stopped_rank_is_found(job: Job, rank: int) -> None:
    """The live rank may take ten minutes for a step, a save or a validation, but knows the stopped one long before."""
    live = job.ranks[1 - rank]
    assert live.wait(timeout=120) == 3, job.output
    # On a busy machine it may be stopped before its first heartbeat, which follows the creation of the run directory.
    stopped = rf"rank {rank} (\(pid {job.pids[rank]} on \S+\) sent its last|has sent no) heartbeat"
    if rank == 0:  # without a launcher, it hosts the key-value store
        stopped = "the job's key-value store does not answer: rank 0's process is stopped"
    assert re.search(f"^error: {stopped}", job.output, re.MULTILINE), job.output
    assert job.output.count("error: the run hangs: ") == 1
    job.kill()


@pytest.mark.slow
def test_rank_stopped_while_the_others_are_paused_is_found(starter: Starter, tmp_path: Path) -> None:
    jobs = {}
    for moment in MOMENTS:
        folder = tmp_path / moment
        folder.mkdir()
        jobs[moment] = starter.start(folder, MOMENTS[moment], **{"run.hang_timeout": "4", "sample.tokens": "2"})
    for moment, job in jobs.items():
        check_stopped_rank_is_found(job, MOMENTS[moment].rank)


def test_rank_at_an_earlier_step_is_named_and_its_stack_is_dumped(tmp_path: Path) -> None:
    write_copy(
        tmp_path,
        "            run.measure()",
        "            if step == 3 and mesh.data_rank == 1:\n                time.sleep(1000)\n",
    )
    done = run(tmp_path, "own.toml", variables={"NPROC": "2"}, **ENDLESS)
    assert done.returncode == 3, done.stderr
    assert re.search(
        r"^error: rank 1 \(pid \d+ on \S+\) is alive at step 3; the others wait at step 4$", done.stderr, re.MULTILINE
    ), done.stderr
    assert re.search(r"^error: rank 1 waits in main \(\S+/own.py:\d+\)$", done.stderr, re.MULTILINE), done.stderr
    assert done.stderr.count("error: the run hangs: ") == 1
    assert "Traceback" not in done.stderr
    (line,) = [n for n, text in enumerate((tmp_path / "own.py").read_text().splitlines(), 1) if "sleep(1000)" in text]
    assert f'own.py", line {line} in main' in (tmp_path / "runs/r/hang/rank-00001.txt").read_text()
    assert "in exchange" in (tmp_path / "runs/r/hang/rank-00000.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_others_wait_for_an_export_longer_than_for_a_collective(
    starter: Starter, tmp_path: Path, fails: bool
) -> None:
    job = starter.start(
        tmp_path,
        Fault("titanlike.distributed.watchdog.Watchdog.finish", rank=1, do="timeout 2"),
        Fault("titanlike.interop.export.write_tensors", do="sleep 4" + (", refuse" if fails else "")),
        **{"checkpoint.export": "float32", "training.steps": "2"},
    )
    assert job.wait() == ([2, 2] if fails else [0, 0]), job.output
    assert "Traceback" not in job.output
    assert job.output.count("error: runs/run/hf cannot be written: No space left on device") == (2 if fails else 0)
    assert (tmp_path / "runs/run/hf/model.safetensors.index.json").exists() is not fails
