"""A student with a teacher beside the same student alone, on little text: the steps to the loss that it reaches alone.

python -m benchmarks.distillation --out benchmarks/results/distillation_cpu.json

The teacher, the model of `train_configs/debug.toml`, is trained on more text than the student has. The student trains alone for
a number of steps, and with the teacher for half of them. Model, initial weights, text, order, optimizer, peak learning rate and
shape of the schedule, which ends with the run, are the same. The loss is that of `train_configs/distill_debug.toml`. A run counts
with its best validation. No model trains on the text of the validation.
"""

import argparse
import hashlib
import json
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from titanlike.run.run_dir import versions

ROOT = Path(__file__).parents[1]
STEPS, TEACHER_STEPS, SEEDS = 400, 240, (0, 1, 2)
BATCH = dict(global_batch_size=4, local_batch_size=4)
STUDENT = {"dim": 96, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "ffn_dim": 256}
VALIDATION = dict(interval=20, batches=32)
WARMUP_STEPS = 20  # the two recipes differ in it


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


def train(folder: Path, name: str, recipe: str, text: str, steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """Trains in a run of a recipe. Returns its validations by step, and the seconds of its steps."""
    sections = {
        "run": dict(dir=str(folder), name=name) | sections.pop("run", {}),
        "data": dict(
            source="text", path=str(folder / text), validation_path=str(folder / "validation.txt"), cache=str(folder)
        ),
        "training": dict(steps=steps) | sections.pop("training", {}),
        "schedule": dict(warmup_steps=WARMUP_STEPS),
        "validation": VALIDATION,
        "sample": dict(tokens=0),
        "metrics": dict(interval=10, trackers=[]),
    } | sections
    options = [f"--{key}.{field}={value}" for key, values in sections.items() for field, value in values.items()]
    command = [
        sys.executable,
        str(ROOT / "titanlike/run/launch.py"),
        str(ROOT / f"train_configs/{recipe}.toml"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = {
        line["step"]: line.get("validation_cross_entropy", line["validation_loss"])
        for line in lines
        if "validation_loss" in line
    }
    steps_taken = [line for line in lines if "tokens_per_second" in line]
    speed = statistics.median(line["tokens_per_second"] for line in steps_taken)
    return {"steps": steps, "validation": losses, "best": min(losses.values()), "tokens_per_second": round(speed)}


def main() -> None:
    """Runs all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.distillation {shlex.join(sys.argv[1:])}",
        "versions": versions(),
        "student": STUDENT | BATCH,
        "seeds": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report["bytes"] = write_texts(folder)
        report["teacher"] = train(folder, "teacher", "debug", "teacher.txt", TEACHER_STEPS)
        print(f"teacher {report['teacher']['best']:.4f}", flush=True)
        for seed in SEEDS:
            of_student: dict[str, Any] = {"model": STUDENT, "training": BATCH, "run": dict(seed=seed)}
            alone, shorter = (
                train(folder, f"alone-{seed}-{steps}", "debug", "student.txt", steps, **of_student)
                for steps in (STEPS, STEPS // 2)
            )
            of_student["distillation"] = dict(teacher=str(folder / "teacher"))
            distilled = train(folder, f"distilled-{seed}", "distill_debug", "student.txt", STEPS // 2, **of_student)
            reached = next((step for step, loss in distilled["validation"].items() if loss <= alone["best"]), None)
            row = {
                "seed": seed,
                "alone": {str(each["steps"]): each["best"] for each in (alone, shorter)},
                "distilled": {str(STEPS // 2): distilled["best"]},
                "reached_at_step": reached,
                # At the median speeds, with the teacher's forward pass.
                "time_ratio": distilled["steps"]
                / alone["steps"]
                * alone["tokens_per_second"]
                / distilled["tokens_per_second"],
                "runs": {"alone": alone, "shorter": shorter, "distilled": distilled},
            }
            print({key: value for key, value in row.items() if key != "runs"}, flush=True)
            report["seeds"].append(row)
    rows = report["seeds"]
    report["median"] = {
        "alone": statistics.median(row["alone"][str(STEPS)] for row in rows),
        "alone, half": statistics.median(row["alone"][str(STEPS // 2)] for row in rows),
        "distilled, half": statistics.median(row["distilled"][str(STEPS // 2)] for row in rows),
        "time_ratio": statistics.median(row["time_ratio"] for row in rows),
    }
    print(report["median"])
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
