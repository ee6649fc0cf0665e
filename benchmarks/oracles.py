"""Records what a change of structure must leave as it is, and compares it: losses and weights of short runs, and resolved recipes.

    python -m benchmarks.oracles record FILE
    python -m benchmarks.oracles compare FILE

Losses and weights are equal to the bit on the machine and with the versions that recorded them, and on no other: record at the
commit before the change.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMON = ("--sample.tokens=0", "--schedule.warmup_steps=2", "--validation.batches=1", "--metrics.interval=1")
MIXTURE = (
    "--model.name=qwen3_moe", "--model.size=debug", "--training.steps=8", "--training.global_batch_size=8",
    "--training.local_batch_size=2", "--parallelism.expert=2", "--optimizer.groups=[]", "--optimizer.lr=1e-3",
)  # fmt: skip
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "debug": ("debug.toml", 1, ("--training.steps=40",)),
    "finetune_debug": ("finetune_debug.toml", 1, ("--training.steps=20",)),
    "finetune_debug, LoRA": ("finetune_debug.toml", 1, ("--training.steps=10", "--lora.rank=4")),
    "mixture of experts, 2 processes": ("debug.toml", 2, MIXTURE),
    "tensor parallelism, 2 processes": ("debug.toml", 2, ("--training.steps=8", "--parallelism.tensor=2")),
}


def run(recipe: str, processes: int, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Returns the losses of a run and a digest of its last checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        command = [
            "./run_train.sh", f"train_configs/{recipe}", *COMMON, *arguments, f"--run.dir={name}", "--run.name=run",
        ]  # fmt: skip
        variables = os.environ | {"NPROC": str(processes), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        folder = Path(name, "run")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        keys = ("loss", "grad_norm", "validation_loss")
        values = [{key: record[key] for key in keys if key in record} for record in records]
        weights = hashlib.sha256()
        for file in sorted(max((folder / "checkpoints").glob("step-*")).glob("*.safetensors")):
            weights.update(file.read_bytes())
        return {"values": [value for value in values if value], "weights": weights.hexdigest()}


def resolved(recipe: Path) -> str:
    """Returns a recipe with all its keys."""
    command = ["./run_train.sh", str(recipe), "--resolved"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def record() -> dict[str, Any]:
    """Returns all values."""
    recipes = sorted((ROOT / "train_configs").rglob("*.toml"))
    return {
        "resolved": {recipe.stem: resolved(recipe).splitlines() for recipe in recipes},
        "runs": {name: run(*each) for name, each in RUNS.items()},
    }


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Returns the places in which two records differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [d for key in before | now for d in differences(before.get(key), now.get(key), f"{path} {key}")]
    if isinstance(before, list) and isinstance(now, list) and all(isinstance(each, str) for each in before + now):
        removed = [f"{path}: - {line}" for line in before if line not in now]
        return removed + [f"{path}: + {line}" for line in now if line not in before]
    return [] if before == now else [f"{path}: {before} -> {now}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracles", description=__doc__)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.action == "record":
        options.file.write_text(json.dumps(record(), indent=1))
    else:
        found = differences(json.loads(options.file.read_text()), record())
        print("\n".join(found) or "equal")
        sys.exit(bool(found))
