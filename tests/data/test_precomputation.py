"""What is computed once for several runs."""

import threading
import time
from pathlib import Path

import pytest

from titanlike.run.precomputation import written_once
from titanlike.utils.file_lock import FileLock, LockHeld


def test_a_run_waits_for_another_one_that_writes(tmp_path: Path, alone: None) -> None:
    folder = tmp_path / "cache/a"
    with written_once(folder) as is_missing:
        assert is_missing
        with pytest.raises(LockHeld):
            FileLock(folder.with_name(".a.lock"))

    lock = FileLock(folder.with_name(".a.lock"))

    def write() -> None:
        time.sleep(0.3)
        folder.mkdir()
        lock.release()

    other = threading.Thread(target=write)
    other.start()
    with written_once(folder) as is_missing:
        assert not is_missing and folder.is_dir()
    other.join()


def test_a_run_goes_on_if_the_other_one_fails(tmp_path: Path, alone: None) -> None:
    folder = tmp_path / "a"
    lock = FileLock(folder.with_name(".a.lock"))
    other = threading.Timer(0.3, lock.release)
    other.start()
    with written_once(folder) as is_missing:
        assert is_missing
    other.join()
