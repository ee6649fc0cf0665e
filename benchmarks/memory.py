"""Measures the peak memory of recipes on one device.

    python -m benchmarks.memory --out memory.json                       on a GPU: torch.cuda.max_memory_allocated
    python -m benchmarks.memory --device cpu --small --out memory.json  shrunk recipes: only shows that the commands run

Each row is a process that trains a few steps on synthetic data. A row that does not fit in memory is recorded as such.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli

from titanlike.distributed.launch_config import child_environment
from titanlike.tools.verify.small_recipe import shrink

ROOT = Path(__file__).parents[1]
STEPS = 4
EIGHT_LAYERS = {"model.num_layers": 8}
RECOMPUTE = {mode: {"activation_checkpoint.mode": mode} for mode in ("none", "selective", "full")}
# Name -> recipe and changes. On one device every layout of the recipe is 1.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2_124m": ("gpt2_124m", {"training.local_batch_size": 16}),
    "llama3_1b": ("llama3_1b", {"training.local_batch_size": 1}),
    "llama3_1b, 2 sequences": ("llama3_1b", {"training.local_batch_size": 2}),
    "llama3_1b, unchunked loss": ("llama3_1b", {"training.local_batch_size": 1, "training.loss_chunk": 0}),
    "llama3_1b, 8-bit optimizer": ("llama3_1b", {"training.local_batch_size": 1, "optimizer.state_dtype": "8bit"}),
    **{
        f"llama3_8b, 8 layers, checkpointing {mode}": ("llama3_8b", EIGHT_LAYERS | {"training.local_batch_size": 1} | options)
        for mode, options in RECOMPUTE.items()
    },
    "llama3_8b_float8, 8 layers": ("llama3_8b_float8", EIGHT_LAYERS | {"training.local_batch_size": 1}),
}  # fmt: skip


def measure(recipe: str, changes: dict[str, Any], device: str, *, small: bool, timeout: float) -> dict[str, Any]:
    """Trains a recipe for a few steps. Returns its peak memory, or the end of its error output."""
    program = [sys.executable, str(ROOT / "titanlike/run/launch.py"), str(ROOT / f"train_configs/{recipe}.toml")]
    environment = child_environment({"NPROC": "1", "NNODES": "1", "PYTHONPATH": str(ROOT)})

    def run(options: dict[str, Any], *more: str) -> "subprocess.CompletedProcess[str]":
        arguments = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()
        ]
        return subprocess.run(
            [*program, *arguments, *more], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        batch = changes.get("training.local_batch_size", 1)
        options = {
            "data.source": "synthetic", "tokenizer.encoding": "bytes", "data.path": "", "data.mixture": [], "data.weights": [],
            "data.holdout_every": 0,
            "training.global_batch_size": batch, "training.steps": STEPS, "schedule.warmup_steps": 1, "schedule.decay_ratio": 0,
            "validation.interval": 0, "checkpoint.enabled": False, "metrics.interval": 1, "metrics.trackers": [],
            "sample.tokens": 0, "run.device": device, "run.dir": folder, "run.name": "run", **changes,
        }  # fmt: skip
        if small:
            options |= shrink(tomli.loads(run(options, "--resolved").stdout), 1, STEPS)
            options |= {"validation.interval": 0, "checkpoint.enabled": False}
        done = run(options)
        if done.returncode:
            return {"failed": done.stderr.strip()[-2000:]}
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    return {"memory_gib": max(record["memory_gib"] for record in records), "loss": records[-1]["loss"]}


def main() -> None:
    """Measures all rows, and writes the results so far after each. Rows that the file has are not measured again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="shrink the recipes")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="measure only the first rows")
    parser.add_argument("--timeout", type=float, default=240, help="time limit of a row, in seconds")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name, (recipe, changes) in list(ROWS.items())[: arguments.rows]:
        if "memory_gib" in results.get(name, {}):
            continue
        try:
            found = measure(recipe, changes, arguments.device, small=arguments.small, timeout=arguments.timeout)
        except subprocess.TimeoutExpired:
            found = {"failed": f"stopped after {arguments.timeout:.0f} s"}
        results[name] = {"recipe": recipe, "changes": changes, "device": arguments.device, **found}
        print(f"{name}: {found.get('memory_gib', found.get('failed'))}", flush=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    main()
