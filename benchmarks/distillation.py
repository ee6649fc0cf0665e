"""A student with a teacher beside the same student alone, on little text: the steps to the loss that it reaches alone.

python -m benchmarks.distillation --out benchmarks/results/distillation_cpu.json

The teacher, the model of `train_configs/debug.toml`, is trained on more text than the student has. The student trains alone for
a number of steps, and with the teacher for half of them. Model, initial weights, text, order, optimizer, peak learning rate and
shape of the schedule, which ends with the run, are the same. The loss is that of `train_configs/distill_debug.toml`. A run counts
with its best validation. No model trains on the text of the validation.
"""

import argparse
import hashlib
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common

STEPS, TEACHER_STEPS, SEEDS = 400, 240, (0, 1, 2)
STUDENT = {
    "model.dim": 96, "model.num_layers": 3, "model.num_heads": 6, "model.num_kv_heads": 2, "model.ffn_dim": 256,
    "training.global_batch_size": 4, "training.local_batch_size": 4,
}  # fmt: skip


def write_texts(folder: Path) -> dict[str, int]:
    """Writes parts of Python's standard library, and returns their sizes."""
    files = [file for file in Path(sysconfig.get_path("stdlib")).glob("*.py") if file.stat().st_size > 4000]
    files.sort(key=lambda file: hashlib.sha256(file.name.encode()).hexdigest())
    held_out, rest = files[:40], files[40:]
    parts = {
        "validation": [file.read_text()[:8000] for file in held_out],
        "student": [file.read_text()[:6000] for file in rest[:16]],
        "teacher": [file.read_text() for file in rest],
    }
    for name, texts in parts.items():
        (folder / f"{name}.txt").write_text("".join(texts))
    return {name: (folder / f"{name}.txt").stat().st_size for name in parts}


def train(folder: Path, name: str, recipe: str, text: str, steps: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Trains in a run of a recipe. Returns its validations by step, and its speed."""
    keys = {
        "run.name": name, "data.source": "text", "data.path": folder / text, "data.validation_path": folder / "validation.txt",
        "data.cache": folder, "training.steps": steps, "schedule.warmup_steps": 20, "validation.interval": 20,
        "validation.batches": 32, "metrics.interval": 10,
    }  # fmt: skip
    records = common.train(recipe, keys | overrides, folder=folder)
    losses = common.losses(records, "validation_loss") | common.losses(records, "validation_cross_entropy")
    speed = statistics.median(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    return {"steps": steps, "validation": losses, "best": min(losses.values()), "tokens_per_second": round(speed)}


def measure_seed(folder: Path, seed: int) -> dict[str, Any]:
    """Trains the student alone, for all steps and for half of them, and with the teacher."""
    keys = STUDENT | {"run.seed": seed}
    alone, shorter = (
        train(folder, f"alone-{seed}-{steps}", "debug", "student.txt", steps, keys) for steps in (STEPS, STEPS // 2)
    )
    keys |= {"distillation.teacher": folder / "teacher"}
    distilled = train(folder, f"distilled-{seed}", "distill_debug", "student.txt", STEPS // 2, keys)
    ratio = distilled["steps"] / alone["steps"] * alone["tokens_per_second"] / distilled["tokens_per_second"]
    return {
        "seed": seed,
        "alone": {str(each["steps"]): each["best"] for each in (alone, shorter)},
        "distilled": {str(STEPS // 2): distilled["best"]},
        "reached_at_step": next(
            (step for step, loss in distilled["validation"].items() if loss <= alone["best"]), None
        ),
        "time_ratio": ratio,  # at the median speeds, with the teacher's forward pass
        "runs": {"alone": alone, "shorter": shorter, "distilled": distilled},
    }


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """Runs all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = write_texts(folder)
        teacher = train(folder, "teacher", "debug", "teacher.txt", TEACHER_STEPS, {})
        rows = [measure_seed(folder, seed) for seed in SEEDS]
    median = {
        "alone": statistics.median(row["alone"][str(STEPS)] for row in rows),
        "alone, half": statistics.median(row["alone"][str(STEPS // 2)] for row in rows),
        "distilled, half": statistics.median(row["distilled"][str(STEPS // 2)] for row in rows),
        "time_ratio": statistics.median(row["time_ratio"] for row in rows),
    }
    return {"student": STUDENT, "bytes": sizes, "teacher": teacher, "seeds": rows, "median": median}


def table(measured: dict[str, Any]) -> str:
    """Returns the lowest validation losses of the student as Markdown."""
    cells = []
    for name, kind, steps in (
        ("alone", "alone", STEPS),
        ("alone", "alone", STEPS // 2),
        ("with the teacher", "distilled", STEPS // 2),
    ):
        losses = [seed[kind][str(steps)] for seed in measured["seeds"]]
        of_seeds = ", ".join(f"{loss:.3f}" for loss in losses)
        cells.append((name, steps, f"{statistics.median(losses):.3f}", of_seeds))
    return common.table(("Student", "Steps", "Cross-entropy", "Seeds"), cells)


if __name__ == "__main__":
    common.script(__doc__, measure, table)
