"""Memory and validation loss of low-precision optimizers: 200 steps of AdamW with the debug model for each, on a CPU.

    python benchmarks/optimizers.py docs/optimizers.json            # measures, writes the JSON and prints the table
    python benchmarks/optimizers.py docs/optimizers.json --table    # prints the table of an existing JSON

Counts the bytes of the last checkpoint.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from titanlike.checkpoint.loader import read_whole

ROOT = Path(__file__).parents[1]
BF16 = {"training.master_dtype": "bfloat16"}
STOCHASTIC = BF16 | {"optimizer.stochastic_rounding": "true"}
VARIANTS = {
    "float32 weights": {},
    "float32 weights, bfloat16 moments": {"optimizer.state_dtype": "bfloat16"},
    "float32 weights, 8-bit moments": {"optimizer.state_dtype": "8bit"},
    "bfloat16 weights, round to nearest": BF16,
    "bfloat16 weights, stochastic rounding": STOCHASTIC,
    "bfloat16 weights, stochastic rounding, 8-bit moments": STOCHASTIC | {"optimizer.state_dtype": "8bit"},
}


def measure(changes: dict[str, str]) -> dict[str, float]:
    """Returns the bytes per parameter of weights and moments, and the final validation loss, of one run."""
    with tempfile.TemporaryDirectory() as runs:
        keys = changes | {
            "training.steps": "200",
            "training.global_batch_size": "16",
            "training.max_norm": "1.0",
            "optimizer.lr": "1.5e-3",
            "optimizer.groups": "[]",
            "schedule.warmup_steps": "20",
            "schedule.decay": "cosine",
            "schedule.min_ratio": "0.1",
            "run.dir": runs,
            "run.name": "run",
            "validation.batches": "4",
            "sample.tokens": "0",
            "metrics.trackers": "[]",
        }
        command = [str(ROOT / "run_train.sh"), str(ROOT / "train_configs/debug.toml")]
        subprocess.run([*command, *(f"--{key}={value}" for key, value in keys.items())], check=True)
        folder = Path(runs) / "run"
        state = read_whole(sorted((folder / "checkpoints").glob("step-*[0-9]"))[-1])
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    num_parameters = sum(tensor.numel() for tensor in state["model"].values())
    num_bytes = {
        kind: sum(t.numel() * t.element_size() for name, t in tensors.items() if kind == "model" or ".exp_avg" in name)
        for kind, tensors in state.items()
    }
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    return {
        "weights": num_bytes["model"] / num_parameters,
        "moments": num_bytes["optimizer"] / num_parameters,
        "validation_loss": losses[-1],
    }


def table(measured: dict[str, dict[str, float]]) -> str:
    """Returns the table of the documentation."""
    lines = ["| Precision | Bytes per parameter: weights + moments | Validation loss |", "|---|---|---|"]
    for name, found in measured.items():
        total = f"{found['weights']:.2f} + {found['moments']:.2f} = {found['weights'] + found['moments']:.2f}"
        lines.append(f"| {name} | {total} | {found['validation_loss']:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if "--table" not in sys.argv:
        results = {name: measure(changes) for name, changes in VARIANTS.items()}
        target.write_text(json.dumps(results, indent=1) + "\n")
    print(table(json.loads(target.read_text())))
