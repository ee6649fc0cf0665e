"""Start-up time: seconds to the first line of output and to the first step of the debug recipe, in one and two processes.

python -m benchmarks.startup --out benchmarks/results/startup_cpu.json
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, script
from benchmarks.common import table as table_of
from titanlike.tools.programs import ONLY_STEPS, options_of

OVERRIDES = options_of(
    ONLY_STEPS | {"training.steps": 2, "schedule.warmup_steps": 0, "metrics.interval": 1, "checkpoint.enabled": True}
)


def start(processes: int, folder: Path) -> tuple[float, float]:
    """Returns the seconds to the first line, and to the line of the first step."""
    environment = os.environ | {"NPROC": str(processes), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = time.perf_counter()
    run = subprocess.Popen(
        [str(ROOT / "run_train.sh"), *OVERRIDES], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout
    seconds = {}
    for line in run.stdout:
        seconds.setdefault("line", time.perf_counter() - started)
        if line.startswith("step "):
            seconds.setdefault("step", time.perf_counter() - started)
    assert run.wait() == 0
    return seconds["line"], seconds["step"]


def table(measured: dict[str, Any]) -> str:
    """Returns the table of docs/results.md."""
    return table_of(
        ("Processes", "First line", "First step"),
        (
            (processes, f"{found['first_line']:.1f} s", f"{found['first_step']:.1f} s")
            for processes, found in measured["processes"].items()
        ),
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the medians and all values."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        start(1, Path(folder))  # warms up the token cache and the page cache
        for processes in (1, 2):
            times = [start(processes, Path(folder)) for _ in range(arguments.repeats)]
            lines, steps = zip(*times, strict=True)
            found[str(processes)] = {
                "first_line": statistics.median(lines), "first_step": statistics.median(steps), "all": times,
            }  # fmt: skip
    return {"processes": found}


if __name__ == "__main__":
    script(__doc__, measure, table, repeats=5)
