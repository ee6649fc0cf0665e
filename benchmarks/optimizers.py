"""What an optimizer that keeps less saves, and what it costs: 200 steps of the debug recipe with each, on a CPU.

    python benchmarks/optimizers.py docs/optimizers.json

Bytes are counted in the run's last checkpoint, the loss is its last validation's.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from titanlike.checkpoint import read_whole

ROOT = Path(__file__).parents[1]
BF16 = {"training.master_dtype": "bfloat16"}
CHANCE = BF16 | {"optimizer.stochastic_rounding": "true"}
VARIANTS = {
    "float32 weights": {},
    "float32 weights, bfloat16 averages": {"optimizer.state_dtype": "bfloat16"},
    "float32 weights, 8-bit averages": {"optimizer.state_dtype": "8bit"},
    "bfloat16 weights, rounded to the nearest": BF16,
    "bfloat16 weights, rounded by chance": CHANCE,
    "bfloat16 weights, rounded by chance, 8-bit averages": CHANCE | {"optimizer.state_dtype": "8bit"},
}


def measure(changes: dict[str, str]) -> dict[str, float]:
    """Bytes a parameter of the weights and of the averages, and the loss, of one run."""
    with tempfile.TemporaryDirectory() as runs:
        keys = changes | {
            "training.steps": "200",
            "run.dir": runs,
            "run.name": "run",
            "sample.tokens": "0",
            "metrics.tensorboard": "false",
        }
        words = [str(ROOT / "run_train.sh"), str(ROOT / "train_configs/debug.toml")]
        subprocess.run([*words, *(f"--{key}={value}" for key, value in keys.items())], check=True)
        folder = Path(runs) / "run"
        state = read_whole(sorted((folder / "checkpoints").glob("step-*[0-9]"))[-1])
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = sum(tensor.numel() for tensor in state["model"].values())
    kept = {
        kind: sum(t.numel() * t.element_size() for name, t in tensors.items() if kind == "model" or ".exp_avg" in name)
        for kind, tensors in state.items()
    }
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    return {"weights": kept["model"] / numbers, "averages": kept["optimizer"] / numbers, "validation_loss": losses[-1]}


def table(measured: dict[str, dict[str, float]]) -> str:
    """The figures as the documents have them."""
    lines = ["| Kept | Bytes a parameter: weights + averages | Validation loss |", "|---|---|---|"]
    for name, found in measured.items():
        both = f"{found['weights']:.2f} + {found['averages']:.2f} = {found['weights'] + found['averages']:.2f}"
        lines.append(f"| {name} | {both} | {found['validation_loss']:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if "--table" not in sys.argv:
        results = {name: measure(changes) for name, changes in VARIANTS.items()}
        target.write_text(json.dumps(results, indent=1) + "\n")
    print(table(json.loads(target.read_text())))
