"""Start-up time: seconds to the first line of output and to the first step of the debug recipe, in one and two processes.

python -m benchmarks.startup --out benchmarks/results/startup_cpu.json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
OVERRIDES = [
    "--training.steps=2", "--schedule.warmup_steps=0", "--metrics.interval=1", "--validation.interval=0", "--sample.tokens=0",
]  # fmt: skip


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
    """Returns the table of docs/speed.md."""
    rows = ["| Processes | First line | First step |", "|---|---|---|"]
    for processes, found in measured["processes"].items():
        rows.append(f"| {processes} | {found['first_line']:.1f} s | {found['first_step']:.1f} s |")
    return "\n".join(rows)


def main() -> None:
    """Measures, and writes the medians and all values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        start(1, Path(folder))  # warms up the token cache and the page cache
        for processes in (1, 2):
            times = [start(processes, Path(folder)) for _ in range(options.repeats)]
            lines, steps = zip(*times, strict=True)
            found[str(processes)] = {
                "first_line": statistics.median(lines), "first_step": statistics.median(steps), "all": times,
            }  # fmt: skip
    facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    command = f"python -m benchmarks.startup --repeats {options.repeats} --out {options.out}"
    options.out.write_text(json.dumps({"command": command, **facts, "processes": found}, indent=1) + "\n")
    print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
