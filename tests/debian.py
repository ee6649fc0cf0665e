"""Programs from Debian's packages for tests that need the real thing: Prometheus, Slurm, a browser."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

LIMIT = 300  # seconds for each command of apt


def require(program: str, *packages: str) -> str:
    """Returns the path of a program. If it is missing, installs packages as root; a test that cannot is skipped with the reason.

    Debian keeps servers in `/usr/sbin`, which need not be on the path.
    """
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if found := shutil.which(program, path=path):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"requires {program}: apt-get install {' '.join(packages)}")
    with Path(tempfile.gettempdir(), "titanlike-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes install, too
        if not shutil.which(program, path=path):
            _apt("update")
            _apt("install", "--yes", "--no-install-recommends", *packages)
    found = shutil.which(program, path=path)
    assert found, f"{' '.join(packages)} does not contain {program}"
    return found


def _apt(*words: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", *words], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"apt-get {' '.join(words)} took more than {LIMIT} s")
    if done.returncode:
        pytest.skip(f"apt-get {' '.join(words)} failed: {done.stderr.strip().splitlines()[-1]}")
