"""Runs the distributed tests in random order under malloc's checks, for hours, and records each process that crashes.

    python -m tests.heap_check --hours 3 --seed 1 [--log heap_check.json] [--checks malloc|quarantine|asan] [arguments of pytest]

A corrupted heap shows long after the write that corrupts it, in any test that runs in the same processes. A run repeats rounds of
the tests, each in another order, with one pool of processes per number of ranks. glibc verifies each block that is freed and fills
freed memory. The first inconsistency aborts the process, which prints its Python stacks and leaves a core file, from which gdb, if
installed, prints the native stacks. Linux with glibc only.

With `--checks quarantine`, small blocks that are freed are kept and compared with a pattern four times a second: a write
after the free aborts the process, which prints what the block held before and the functions that freed it (`quarantine.c`).

With `--checks asan`, AddressSanitizer replaces malloc's checks. It aborts at the access itself, with its stack and that of the
`free`, but checks only the C library's functions, such as `memcpy`, and the kernels that inductor generates: PyTorch is not
instrumented.

Ctrl-C and SIGTERM end the round, which is recorded with the tests that ran.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ["tests/distributed"]
CHECKS = {
    "LD_PRELOAD": "libc_malloc_debug.so.0",  # glibc has its checks in a library of their own
    "GLIBC_TUNABLES": "glibc.malloc.check=3",  # aborts at the first inconsistency
    "MALLOC_PERTURB_": "165",  # fills memory that is allocated or freed
}
COMPILER = """#!/bin/sh
unset LD_PRELOAD  # the compiler itself is not checked
exec g++ "$@" -fsanitize=address -fno-omit-frame-pointer -g1
"""
SEED = "TITANLIKE_TEST_ORDER"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles the tests. Called by pytest, for which this file is a plugin."""
    random.Random(os.environ[SEED]).shuffle(items)


def address_sanitizer(folder: Path) -> dict[str, str]:
    """Returns the environment of processes that AddressSanitizer checks. Inductor's kernels are compiled into this folder."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    compiler = folder / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    return {
        "LD_PRELOAD": f"{library}:libstdc++.so.6",  # without the latter, an exception of PyTorch ends the process
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=0:detect_odr_violation=0:quarantine_size_mb=96",
        "PYTHONMALLOC": "malloc",  # Python's arenas would hide its objects
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def quarantine(folder: Path) -> dict[str, str]:
    """Returns the environment of processes whose freed blocks are kept and compared. The library is compiled into this folder."""
    library = folder / "quarantine.so"
    source = Path(__file__).with_name("quarantine.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-lpthread"], check=True)
    return {"LD_PRELOAD": str(library)}


def malloc_checks(folder: Path) -> dict[str, str]:
    """Returns the environment of processes whose heap glibc checks."""
    return CHECKS


ENVIRONMENTS = {"malloc": malloc_checks, "quarantine": quarantine, "asan": address_sanitizer}


def run_round(seed: str, seconds: float, arguments: list[str], checks: str) -> dict[str, Any]:
    """Runs all tests once, for at most this time or until interrupted. Returns what ran and which processes crashed."""
    order = {SEED: seed, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    tests = [] if any(argument.startswith("tests") for argument in arguments) else TESTS
    program = [sys.executable, "-m", "pytest", "-p", "tests.heap_check", "-m", "not every", "-n", "1", "-vv"]
    start, interrupted = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="heap-check-") as folder:
        environment = ENVIRONMENTS[checks](Path(folder))
        output = Path(folder, "output")
        with output.open("w") as file:
            job = subprocess.Popen(
                [*program, *tests, *arguments], cwd=ROOT, env=os.environ | environment | order, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                job.wait(timeout=seconds)
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                job.send_signal(signal.SIGINT)  # unlike SIGTERM, lets pytest write its results
                job.wait()
        lines = output.read_text(errors="replace").split("\n")
    cores = sorted(ROOT.glob("core*"))
    crashes = [line for line in lines if "crashes.Crash" in line or "crashed while running" in line]
    failed = [line for line in lines if line.startswith("[gw0]") and " FAILED " in line]
    return {
        "seed": seed,
        "arguments": arguments,
        "checks": checks,
        "interrupted": interrupted,
        "seconds": round(time.monotonic() - start),
        "passed": sum(line.startswith("[gw0]") and " PASSED " in line for line in lines),
        "failed": failed,
        "crashes": crashes,
        "cores": [stacks(core) for core in cores],
        "output": lines if crashes or cores or failed else [],
    }


def stacks(core: Path) -> str:
    """Returns the native stacks of a core file, first that of the thread that crashed with its variables. Keeps the last one, as
    `heap_check.core`: only it has the overwritten memory, and each has the size of the process's memory."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return f"{core}: install gdb to print its stacks"
    commands = ["-ex", "info registers", "-ex", "bt full 12", "-ex", "thread apply all bt 40"]
    found = subprocess.run(
        [gdb, "--batch", *commands, sys.executable, str(core)], capture_output=True, text=True, check=False
    )
    core.replace(ROOT / "heap_check.core")
    return found.stdout


def main() -> None:
    """Runs rounds until the time has passed or an interrupt. Exits with code 1 if a process crashed."""
    parser = argparse.ArgumentParser(description="Runs the distributed tests in random order under malloc's checks.")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the tests")
    parser.add_argument("--log", type=Path, default=ROOT / "heap_check.json", help="a line per round is appended")
    parser.add_argument("--checks", choices=ENVIRONMENTS, default="malloc", help="what looks for a wrong access")
    options, arguments = parser.parse_known_args()
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    # pytest would inherit that SIGINT is ignored, as it is in background jobs of a shell.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    end, number, crashed, interrupted = time.monotonic() + options.hours * 3600, 0, False, False
    while not interrupted and (left := end - time.monotonic()) > 1:
        found = run_round(f"{options.seed}-{number}", left, arguments, options.checks)
        with options.log.open("a") as log:
            print(json.dumps(found), file=log)
        shown = f"{found['passed']} passed, {len(found['failed'])} failed, {len(found['crashes'])} crashes"
        print(f"round {found['seed']}: {shown}, {len(found['cores'])} cores, {found['seconds']} s", flush=True)
        crashed |= bool(found["crashes"] or found["cores"])
        interrupted = found["interrupted"]
        number += 1
    sys.exit(1 if crashed else 0)


if __name__ == "__main__":
    main()
