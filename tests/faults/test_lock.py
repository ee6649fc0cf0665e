"""The lock of a run directory."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launching import wait_for
from tests.pool import Ranks
from tests.training import tiny
from titanlike.config import UserError
from titanlike.run.run_dir import RunDirectory
from titanlike.utils.file_lock import FileLock, LockHeld


def test_lock_can_be_acquired_again_after_release(tmp_path: Path) -> None:
    for _ in range(2):
        lock = FileLock(tmp_path / "runs/r/lock")
        (tmp_path / "runs/r/recipe.toml").touch()
        with pytest.raises(LockHeld, match=f"process {os.getpid()} on host .* since "):
            FileLock(tmp_path / "runs/r/lock")
        lock.release()
        assert (tmp_path / "runs/r/lock").read_bytes() == b""


def test_release_deletes_directories_created_for_the_lock(tmp_path: Path) -> None:
    FileLock(tmp_path / "a/b/lock").release()
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    FileLock(tmp_path / "a/b/lock").release()
    FileLock(tmp_path / "a/lock").release()  # this directory existed before
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/lock"]


def test_lock_file_deleted_while_acquiring_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock, calls = tmp_path / "r/lock", fcntl.flock, []

    def delayed_flock(descriptor: int, operation: int) -> None:
        if not calls:  # another job deletes the file after we open it and before we lock it
            path.unlink()
            path.parent.rmdir()
        calls.append(operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delayed_flock)
    lock = FileLock(path)
    with pytest.raises(LockHeld):
        FileLock(path)
    lock.release()


START_CHILDREN = """
import os, subprocess, sys, time
from pathlib import Path
from titanlike.utils.file_lock import FileLock
lock = FileLock(Path("r/lock"))
if os.fork() == 0:
    time.sleep(60)
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
Path("children").write_text("ready")
time.sleep(60)
"""


def acquire_within(seconds: float, path: Path) -> None:
    """Acquires and releases a lock. A forked child closes its copy of the descriptor only when it first runs."""
    end = time.monotonic() + seconds
    while True:
        try:
            return FileLock(path).release()
        except LockHeld:
            assert time.monotonic() < end, "the children hold the lock"
            time.sleep(0.05)


@pytest.mark.slow
def test_surviving_children_do_not_hold_the_lock(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", START_CHILDREN], cwd=tmp_path, env=env, start_new_session=True)
    try:
        wait_for(tmp_path / "children")
        with pytest.raises(LockHeld, match=f"process {parent.pid} "):
            FileLock(tmp_path / "r/lock")
        parent.kill()
        parent.wait()
        acquire_within(60.0, tmp_path / "r/lock")
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_file_system_without_locks_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunDirectory(tiny(tmp_path, "r")).locked():
        pass
    assert capsys.readouterr().err == (
        f"warning: the file system of {tmp_path / 'r'} has no locks: a second job in this run is not prevented\n"
    )


def hold_lock(folder: Path, seconds: float) -> str:
    try:
        with RunDirectory(tiny(folder, "r")).locked():
            time.sleep(seconds)
            return "held"
    except UserError as error:
        return str(error)


def test_all_ranks_refuse(tmp_path: Path, ranks: Ranks) -> None:
    pool = ranks(2)
    lock = FileLock(tmp_path / "r/lock")
    first, second = pool.run(hold_lock, tmp_path, 0.0)
    assert first == second
    assert first.startswith(f"{tmp_path / 'r'} is being trained by process {os.getpid()} on host ")
    lock.release()
    assert pool.run(hold_lock, tmp_path, 0.0) == ["held", "held"]
