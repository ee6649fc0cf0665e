"""The effect of float8 on the loss: the study's four recipes on a small model, two processes on a CPU, 500 steps.

python benchmarks/float8_quality.py docs/float8          trains, writes the metrics and the plot
python benchmarks/float8_quality.py docs/float8 --draw   plots existing metrics
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VARIANTS = ["baseline", "compile", "float8", "float8_all_gather"]

# The model and data of the debug recipe; all other settings are the study's. Float8 is emulated, which rounds alike.
SMALL = {
    "model.size": "debug",
    "tokenizer.encoding": "bytes",
    "data.source": "python_stdlib",
    "training.steps": 500,
    "training.seq_len": 128,
    "training.global_batch_size": 16,
    "training.local_batch_size": 8,
    "optimizer.lr": 6e-4,
    "schedule.warmup_steps": 100,  # after an unstable start, rounding alone makes equal runs diverge
    "activation_checkpoint.mode": "none",
    "checkpoint.enabled": "false",
    "validation.interval": 25,
    "validation.batches": 8,
    "metrics.interval": 5,
    "metrics.trackers": "[]",
}
FLOAT8 = {"float8.emulate": "true", "float8.layers": '["*"]'}


def train(variant: str, folder: Path, overrides: list[str]) -> None:
    """Runs one recipe and copies its metrics."""
    with tempfile.TemporaryDirectory() as runs:
        keys = SMALL | (FLOAT8 if variant.startswith("float8") else {}) | {"run.dir": runs, "run.name": variant}
        recipe = ROOT / "train_configs" / "study" / f"{variant}.toml"
        command = [
            str(ROOT / "run_train.sh"),
            str(recipe),
            *(f"--{key}={value}" for key, value in keys.items()),
            *overrides,
        ]
        subprocess.run(command, env=os.environ | {"NPROC": "2"}, check=True)
        (folder / f"{variant}.jsonl").write_text((Path(runs) / variant / "metrics.jsonl").read_text())


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Reads the validation losses of each variant, by step."""
    runs = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in VARIANTS
    }
    return {
        name: {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
        for name, records in runs.items()
    }


def draw(folder: Path) -> None:
    """Plots the four variants, and prints the final loss of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    validation = read(folder)
    figure, (losses, differences) = plt.subplots(1, 2, figsize=(10, 3.6), dpi=130)
    for name, style in zip(VARIANTS, ["-", "--", "-.", ":"], strict=True):
        found = validation[name]
        losses.plot(list(found), list(found.values()), style, linewidth=1.6, label=name)
        percent = [100 * (found[step] / validation["baseline"][step] - 1) for step in found]
        differences.plot(list(found), percent, style, linewidth=1.6, label=name)
        last = max(found)
        print(
            f"{name:<18} validation loss {found[last]:.4f} after {last} steps, {percent[-1]:+.2f}% relative to the baseline"
        )
    losses.set(xlabel="step", ylabel="validation loss per byte (nats)")
    differences.set(xlabel="step", ylabel="% relative to the baseline")
    differences.axhspan(-1, 1, color="black", alpha=0.06)
    for axes in (losses, differences):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "loss.png")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    if "--draw" not in sys.argv:
        for variant in VARIANTS:
            train(variant, target, sys.argv[2:])
    draw(target)
