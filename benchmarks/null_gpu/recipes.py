"""Trains shipped recipes on null GPUs for a few steps, and prints what a step does beside the plan.

    python -m benchmarks.null_gpu.recipes [--record FILE] [--gpus N] [--blocks N] RECIPE... [--section.key=value ...]

Each recipe runs with its own width, and synthetic data. `--blocks` cuts the depth of large models.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.null_gpu import library, record
from titanlike.run.start import program_of

STEPS = 4
SHORT = (
    "--data.source=synthetic", "--tokenizer.encoding=bytes", "--schedule.warmup_steps=1", f"--training.steps={STEPS}",
    "--checkpoint.enabled=false", "--sample.tokens=0", "--validation.interval=0", "--metrics.trackers=[]",
)  # fmt: skip
COLUMNS = (
    "recipe", "GPUs", "allocated GiB", "planned GiB", "reserved GiB", "launches", "matmuls", "attention", "generated", "host ms",
    "synchronizations", "collectives", "graphs", "graph breaks",
)  # fmt: skip


def measure(recipe: Path, gpus: int, arguments: list[str], device: str) -> dict[str, Any]:
    """Trains a recipe. Returns a row of the table: the last step of the rank with the highest peak."""
    with tempfile.TemporaryDirectory() as folder:
        program = [str(program_of(recipe)), str(recipe), *SHORT, f"--run.dir={folder}", "--run.name=run", *arguments]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
        code, found = record.run([sys.executable, *launcher, *program], device, max(gpus, 1), cwd=record.ROOT)
        if code or found["mismatch"]:
            sys.exit(found["mismatch"] or f"{recipe} ended with code {code}")
        last = json.loads(Path(folder, "run/metrics.jsonl").read_text().splitlines()[-1])
    process = max(found["processes"], key=lambda each: each["allocated_peak"])
    step = process["steps"][-1]
    launches = step["launches"]
    calls = [call for group in step["collectives"] for call in group["calls"].values()]
    return {
        "recipe": recipe.stem + (f" ({', '.join(arguments)})" if arguments else ""),
        "GPUs": gpus,
        "allocated GiB": round(process["allocated_peak"] / 2**30, 2),
        "planned GiB": round(last["planned_memory_gib"], 2),
        "reserved GiB": round(process["reserved_peak"] / 2**30, 2),
        "launches": sum(launches.values()),
        "matmuls": launches["matmul"],
        "attention": launches["attention"],
        "generated": launches["generated"],
        "host ms": round(1e3 * min(each["host_seconds"] for each in process["steps"])),
        "synchronizations": step["synchronizations"],
        "collectives": sum(call["count"] for call in calls),
        "graphs": process["graphs"],
        "graph breaks": sum(process["graph_breaks"].values()),
        "locations": step["locations"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in rows)])


def main() -> None:
    """Measures the recipes and prints the table."""
    parser = argparse.ArgumentParser(description="Trains shipped recipes on null GPUs for a few steps.")
    parser.add_argument("recipes", nargs="+", type=Path, metavar="RECIPE")
    parser.add_argument("--device", choices=sorted(library.devices()), default="h100")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--blocks", type=int, help="number of blocks of the model, instead of the recipe's")
    parser.add_argument("--record", type=Path, metavar="FILE", help="JSON with a row per recipe")
    options, overrides = parser.parse_known_args()
    if options.blocks:
        overrides.append(f"--model.num_layers={options.blocks}")
    rows = []
    for recipe in options.recipes:
        rows.append(measure(recipe, options.gpus, overrides, options.device))
        print(table(rows[-1:]), file=sys.stderr, flush=True)
    if options.record:
        options.record.write_text(json.dumps({"device": options.device, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
