"""Time of `titanlike compare` for long runs: generated metrics of every step, a table and a page.

python -m benchmarks.compare --out benchmarks/results/compare_cpu.json
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPIKE = 87.5  # loss of one step, which the page must have


def write_run(folder: Path, steps: int, seed: int) -> None:
    """Writes the recipe and the metrics of a run that records every step, in the format of `metrics.jsonl`."""
    values = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        f'program = "pretrain"\n\n[run]\nname = "{folder.name}"\nseed = {seed}\n\n[training]\nsteps = {steps}\n\n'
        f"[optimizer]\nlr = {1e-4 * (1 + seed)}\n"
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            seconds = 0.25 + values.gauss(0, 0.004)
            record = {
                "step": step,
                "loss": SPIKE if step == steps // 3 else 2 + 8 / math.sqrt(step) + values.gauss(0, 0.05),
                "grad_norm": math.exp(values.gauss(0, 0.2)),
                "learning_rate": 1e-4 * (1 + seed) * (1 - step / steps),
                "tokens": step * 524_288,
                "tokens_per_second": 524_288 / seconds,
                "tflops_per_device": 400 + values.gauss(0, 4),
                "mfu": 0.4 + values.gauss(0, 0.004),
                "memory_gib": 61.25,
                "data_wait": abs(values.gauss(0, 0.001)),
                "step_seconds": seconds,
                "elapsed_seconds": 0.25 * step,
            }
            file.write(json.dumps(record) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "validation_loss": 2 + 8 / math.sqrt(step)}) + "\n")


def measure(runs: Path, page: Path) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds of the command, on one core."""
    command = [sys.executable, "-m", "titanlike.tools.cli.main", "compare", str(runs), "--html", str(page)]
    core = min(os.sched_getaffinity(0))
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(measured: dict[str, Any]) -> str:
    """Returns the table of docs/comparing.md."""
    return "\n".join(
        [
            "| Runs | Steps | Metrics | Time | CPU time | Page |",
            "|---|---|---|---|---|---|",
            f"| {measured['runs']} | {measured['steps']:,} each | {measured['metrics_mb']:,.0f} MB | "
            f"{measured['seconds']:.1f} s | {measured['cpu_seconds']:.1f} s | {measured['page_mb']:.1f} MB |",
        ]
    )


def main() -> None:
    """Generates runs, measures, and writes the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, page = Path(folder, "runs"), Path(folder, "compare.html")
        for number in range(options.runs):
            write_run(runs / f"run-{number:02}", options.steps, number)
        times = [measure(runs, page) for _ in range(options.repeats)]
        size = sum(path.stat().st_size for path in runs.glob("*/metrics.jsonl"))
        assert page.read_text().count(f",{SPIKE},") == options.runs, "the page lacks a spike"
        page_size = page.stat().st_size
    seconds, cpu_seconds = (statistics.median(column) for column in zip(*times, strict=True))
    found = {
        "command": f"python -m benchmarks.compare --out {options.out}",
        "python": platform.python_version(),
        "runs": options.runs,
        "steps": options.steps,
        "metrics_mb": size / 1e6,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "all": times,
        "page_mb": page_size / 1e6,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
