"""What float8 does to the loss: the study's four recipes on a small model, two processes on a CPU, 500 steps.

python benchmarks/float8_quality.py docs/float8        trains, keeps the runs' metrics there, and draws them
python benchmarks/float8_quality.py docs/float8 --draw  draws what is there
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
VARIANTS = ["baseline", "compile", "float8", "float8_all_gather"]

# The model of the debug recipe, and its data; everything else is the study's own. Float8 is emulated: rounded alike.
SMALL = {
    "model.size": "debug",
    "tokenizer.encoding": "bytes",
    "data.source": "python_stdlib",
    "training.steps": 500,
    "training.seq_len": 128,
    "training.global_batch_size": 16,
    "training.local_batch_size": 8,
    "optimizer.lr": 6e-4,
    "schedule.warmup_steps": 100,  # after a rough start, rounding alone sends equal runs to different places
    "activation_checkpoint.mode": "none",
    "checkpoint.enabled": "false",
    "validation.interval": 25,
    "validation.batches": 8,
    "metrics.interval": 5,
    "metrics.tensorboard": "false",
}
FLOAT8 = {"float8.emulate": "true", "float8.skip_small": "false"}


def train(variant: str, folder: Path, overrides: list[str]) -> None:
    """Run one recipe and keep its metrics."""
    with tempfile.TemporaryDirectory() as runs:
        keys = SMALL | (FLOAT8 if variant.startswith("float8") else {}) | {"run.dir": runs, "run.name": variant}
        recipe = ROOT / "train_configs" / "study" / f"{variant}.toml"
        words = [
            str(ROOT / "run_train.sh"),
            str(recipe),
            *(f"--{key}={value}" for key, value in keys.items()),
            *overrides,
        ]
        subprocess.run(words, env=os.environ | {"NPROC": "2"}, check=True)
        (folder / f"{variant}.jsonl").write_text((Path(runs) / variant / "metrics.jsonl").read_text())


def read(folder: Path) -> dict[str, dict[int, float]]:
    """The validation losses of each variant, by step."""
    runs = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in VARIANTS
    }
    return {
        name: {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
        for name, records in runs.items()
    }


def draw(folder: Path) -> None:
    """One picture of the four, and a line for each in the terminal."""
    validation = read(folder)
    figure, (losses, distances) = plt.subplots(1, 2, figsize=(10, 3.6), dpi=130)
    for name, style in zip(VARIANTS, ["-", "--", "-.", ":"], strict=True):
        found = validation[name]
        losses.plot(list(found), list(found.values()), style, linewidth=1.6, label=name)
        apart = [100 * (found[step] / validation["baseline"][step] - 1) for step in found]
        distances.plot(list(found), apart, style, linewidth=1.6, label=name)
        last = max(found)
        print(f"{name:<18} validation loss {found[last]:.4f} after {last} steps, {apart[-1]:+.2f}% of the baseline")
    losses.set(xlabel="step", ylabel="validation loss a byte (nats)")
    distances.set(xlabel="step", ylabel="% from the baseline")
    distances.axhspan(-1, 1, color="black", alpha=0.06)
    for axes in (losses, distances):
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
