"""One job at a time in a run's folder."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SMALL, losses, run, start, wait_for
from tests.pool import Pool
from tests.training import tiny
from titanlike.config import UserError
from titanlike.run.run_dir import RunDirectory
from titanlike.utils.file_lock import FileLock, LockHeld

pytestmark = pytest.mark.slow  # whole starts, one after the other

LONG = SMALL | {"training.steps": "100000", "run.name": "r"}


def test_a_second_job_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    options = SMALL | {"training.steps": "200", "run.name": "r"}
    first = start(tmp_path, **options)
    wait_for(tmp_path / "runs/r/metrics.jsonl")
    os.kill(first.pid, signal.SIGSTOP)  # so that it is not done before the others have tried
    for processes in "12":
        second = run(tmp_path, variables={"NPROC": processes, "MAX_RESTARTS": "3"}, **options)
        assert second.returncode == 2
        [told] = set(second.stderr.splitlines())  # on a very busy machine by the second process too
        assert re.fullmatch(
            rf"error: runs/r is being trained by process {first.pid} on host \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d; end "
            "that one, or give --run.name to start a new run",
            told,
        )
    os.kill(first.pid, signal.SIGCONT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    assert len(losses(tmp_path / "runs/r")) == 200
    assert (tmp_path / "runs/r/lock").read_text() == ""


def test_a_killed_job_leaves_words_and_no_lock(tmp_path: Path) -> None:
    killed = start(tmp_path, **LONG)
    wait_for(tmp_path / "runs/r/metrics.jsonl")
    killed.kill()
    killed.communicate()
    assert f"process {killed.pid} on host" in (tmp_path / "runs/r/lock").read_text()
    again = run(tmp_path, **SMALL | {"run.name": "r"})
    assert again.returncode == 0, again.stderr
    assert again.stderr == ""


def test_a_start_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    done = run(tmp_path, **SMALL | {"data.source": "text", "data.path": "empty.txt"})
    assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_the_same_process_takes_it_again_after_a_release(tmp_path: Path) -> None:
    for _ in range(2):
        lock = FileLock(tmp_path / "runs/r/lock")
        (tmp_path / "runs/r/recipe.toml").touch()
        with pytest.raises(LockHeld, match=f"process {os.getpid()} on host .* since "):
            FileLock(tmp_path / "runs/r/lock")
        lock.release()
        assert (tmp_path / "runs/r/lock").read_bytes() == b""


def test_folders_that_were_made_for_it_alone_go_with_it(tmp_path: Path) -> None:
    FileLock(tmp_path / "a/b/lock").release()
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    FileLock(tmp_path / "a/b/lock").release()
    FileLock(tmp_path / "a/lock").release()  # this folder was there before
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/lock"]


def test_a_lock_whose_file_was_taken_away_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, calls = tmp_path / "r/lock", fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not calls:  # another job leaves between our opening the file and locking it
            path.unlink()
            path.parent.rmdir()
        calls.append(operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = FileLock(path)
    with pytest.raises(LockHeld):
        FileLock(path)
    lock.release()


CHILDREN = """
import os, subprocess, sys, time
from pathlib import Path
from titanlike.utils.file_lock import Lock
lock = Lock(Path("r/lock"))
if os.fork() == 0:
    time.sleep(60)
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
Path("children").write_text("ready")
time.sleep(60)
"""


def take_within(seconds: float, path: Path) -> None:
    """Take a lock and release it. A forked child lets go of its parent's when it first runs, which may be a moment later."""
    end = time.monotonic() + seconds
    while True:
        try:
            return FileLock(path).release()
        except LockHeld:
            assert time.monotonic() < end, "the children hold the lock"
            time.sleep(0.05)


def test_children_that_outlive_their_parent_do_not_hold_its_lock(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", CHILDREN], cwd=tmp_path, env=env, start_new_session=True)
    try:
        wait_for(tmp_path / "children")
        with pytest.raises(LockHeld, match=f"process {parent.pid} "):
            FileLock(tmp_path / "r/lock")
        parent.kill()
        parent.wait()
        take_within(60.0, tmp_path / "r/lock")
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_told_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    def none_here(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none_here)
    with RunDirectory(tiny(tmp_path, "r")).locked():
        pass
    assert capsys.readouterr().err == (
        f"warning: the file system of {tmp_path / 'r'} has no locks: nothing keeps a second job out of this run\n"
    )


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, alone: None) -> None:
    (tmp_path / "r").write_text("a file")
    with (
        pytest.raises(UserError, match=r"run.dir = '.*File exists.*; choose another run.dir"),
        RunDirectory(tiny(tmp_path, "r")).locked(),
    ):
        pass


def held(folder: Path, seconds: float) -> str:
    try:
        with RunDirectory(tiny(folder, "r")).locked():
            time.sleep(seconds)
            return "held"
    except UserError as error:
        return str(error)


def test_all_ranks_refuse_together(tmp_path: Path, ranks: Any) -> None:
    pool: Pool = ranks(2)
    lock = FileLock(tmp_path / "r/lock")
    first, second = pool.run(held, tmp_path, 0.0)
    assert first == second
    assert first.startswith(f"{tmp_path / 'r'} is being trained by process {os.getpid()} on host ")
    lock.release()
    assert pool.run(held, tmp_path, 0.0) == ["held", "held"]
