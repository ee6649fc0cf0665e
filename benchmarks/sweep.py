"""A sweep that is killed twice ends with the same results as one that is not.

    python -m benchmarks.sweep --out benchmarks/results/sweep_cpu.json
    python -m benchmarks.sweep --table benchmarks/results/sweep_cpu.json      prints the table of docs/sweeps.md, draws its figure

Runs `sweep_configs/debug.toml` twice at the same time, in two directories. One of the two sweeps receives SIGKILL while trial 2 and
while trial 7 trains, and the same command starts it again. `--steps` shortens the trials: the debug recipe has 170 steps.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli

from benchmarks.figures import cpu_name
from titanlike.distributed.launch_config import child_environment
from titanlike.recipe.load import dump
from titanlike.run.run_dir import versions
from titanlike.tools.metrics_file import read_records
from titanlike.tools.sweep.results import draw_importance, read_results, table

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "train_configs/debug.toml"
SWEEP = ROOT / "sweep_configs/debug.toml"


def main() -> None:
    """Runs both sweeps, or prints the table of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a JSON file")
    parser.add_argument("--steps", type=int, default=170, help="steps of each trial (170)")
    parser.add_argument("--kill", type=int, nargs="+", default=[2, 7], metavar="TRIAL", help="kill the sweep in these")
    arguments = parser.parse_args()
    if arguments.table:
        killed = json.loads(arguments.table.read_text())["killed"]
        (ROOT / "docs/sweep_importance.svg").write_text(draw_importance(killed))
        print(table(killed))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = compare(write_sweep(Path(folder), arguments.steps), arguments.kill)
    results = {
        "command": shlex.join(["python", "-m", "benchmarks.sweep", *sys.argv[1:]]),
        "cpu": cpu_name(),
        "versions": versions(),
        "steps": arguments.steps,
        **results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results["killed"]))
    print(f"\nkilled in {results['kills']}; equal to the sweep that was not killed: {results['is_equal']}")
    sys.exit(0 if results["is_equal"] else 1)


def compare(sweep: Path, kills: list[int]) -> dict[str, Any]:
    """Runs a sweep without kills, and with a kill in each of some trials. Returns the results of both."""
    with tempfile.TemporaryDirectory() as folder:
        whole = start(sweep, Path(folder, "whole"))
        stopped = []
        for number in kills:
            process = start(sweep, Path(folder, "killed"))
            step = wait_for_trial(process, Path(folder, "killed"), number)
            process.send_signal(signal.SIGKILL)
            process.wait()
            stopped.append({"trial": number, "step": step})
        codes = [start(sweep, Path(folder, "killed")).wait(), whole.wait()]
        assert codes == [0, 0], f"exit codes {codes}"
        (expected,), (killed,) = (list(Path(folder, name).glob("*/sweep.json")) for name in ("whole", "killed"))
        pair = [read_results(path.parent) for path in (expected, killed)]
    return {"kills": stopped, "is_equal": pair[0] == pair[1], "whole": pair[0], "killed": pair[1]}


def write_sweep(folder: Path, steps: int) -> Path:
    """Writes the sweep and its recipe with this number of steps, and with intervals and warmup in proportion. Returns the file."""
    recipe = (
        f'extends = "{RECIPE}"\n[training]\nsteps = {steps}\n[validation]\ninterval = {steps // 8}\n'
        f"[checkpoint]\ninterval = {steps // 2}\n[schedule]\nwarmup_steps = {steps // 8}\n"
    )
    (folder / "recipe.toml").write_text(recipe)
    values = tomli.loads(SWEEP.read_text()) | {"recipe": "recipe.toml", "pruning": {"warmup_steps": steps // 4}}
    values["search"]["schedule.warmup_steps"] = {"low": max(1, steps // 32), "high": steps // 4}
    (folder / "sweep.toml").write_text(dump(values))
    return folder / "sweep.toml"


def start(sweep: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Starts or resumes the sweep in a directory."""
    command = [sys.executable, "-m", "titanlike.tools.cli.main", "sweep", str(sweep), f"--dir={folder}"]
    variables = child_environment({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    return subprocess.Popen(command, env=variables, cwd=ROOT)


def wait_for_trial(process: subprocess.Popen[bytes], folder: Path, number: int) -> int:
    """Waits until a trial has recorded a step. Returns it."""
    while not (
        records := [
            record for path in folder.glob(f"*/*-{number:03}") for record in read_records(path / "metrics.jsonl")
        ]
    ):
        assert process.poll() is None, f"the sweep ended before trial {number} trained"
        time.sleep(0.1)
    return max(int(record["step"]) for record in records)


if __name__ == "__main__":
    main()
