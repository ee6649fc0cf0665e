"""Strong scaling: the cost of a token with the same recipe and global batch on 1, 2, 4 ... processes.

    python -m benchmarks.scaling --out benchmarks/results/scaling_cpu.json
    python -m benchmarks.scaling train_configs/llama3_1b.toml --processes 1,2,4,8 --data.source=synthetic --tokenizer.encoding=bytes

On a CPU all processes share the same cores, so the cost rises only by the overhead of parallelism. With `--own-devices` each
process has its own device, and the cost is device-seconds. Each round runs all layouts; results are medians over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import cpu_name

ROOT = Path(__file__).parents[1]
STEPS = 30
# Layouts by the dimension that has all ranks; N is the number of processes.
LAYOUTS = {
    "shard": {},
    "replicate": {"parallelism.replicate": "N", "parallelism.shard": "1"},
    "tensor": {"parallelism.tensor": "N", "parallelism.shard": "1"},
    "context": {"parallelism.context": "N", "parallelism.shard": "1"},
    "pipeline": {"parallelism.pipeline": "N", "parallelism.shard": "1", "training.local_batch_size": "1"},
}
SMALL = {
    "model.dim": "256", "model.num_heads": "4", "model.num_kv_heads": "4", "model.ffn_dim": "768",
    "model.vocab_size": "4096", "data.source": "synthetic", "training.seq_len": "256", "training.global_batch_size": "8",
}  # fmt: skip


def step_seconds(recipe: str, processes: int, changes: dict[str, str]) -> float:
    """Returns the median step time of one run, without its first ten steps."""
    with tempfile.TemporaryDirectory() as runs:
        keys = changes | {
            "training.steps": str(STEPS), "schedule.warmup_steps": "0", "schedule.decay_ratio": "0",
            "run.dir": runs, "run.name": "run", "checkpoint.enabled": "false",
            "validation.interval": "0", "sample.tokens": "0", "metrics.interval": "5", "metrics.trackers": "[]",
        }  # fmt: skip
        command = [str(ROOT / "run_train.sh"), recipe, *(f"--{key}={value}" for key, value in keys.items())]
        subprocess.run(command, check=True, env=os.environ | {"NPROC": str(processes)}, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(runs) / "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["step_seconds"] for record in records if record["step"] > 10)


def table(result: dict[str, Any]) -> str:
    """Returns the result as a table."""
    counts = result["processes"]
    lines = [
        "| Dimension | " + " | ".join(f"{count} processes" for count in counts if count > 1) + " |",
        "|---|" + "---|" * sum(count > 1 for count in counts),
    ]
    for layout, costs in result["relative_cost"].items():
        lines.append(f"| {layout} | " + " | ".join(f"{costs[str(count)]:.2f}" for count in counts if count > 1) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures, writes and prints the cost of a token relative to one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "train_configs/debug.toml"))
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--own-devices", action="store_true", help="each process has its own device")
    parser.add_argument("--out", type=Path)
    arguments, others = parser.parse_known_args()
    overrides = dict(argument.removeprefix("--").split("=", 1) for argument in others)
    small = SMALL if Path(arguments.recipe).stem == "debug" else {}
    counts = [int(count) for count in arguments.processes.split(",")]
    cases = [("shard", 1)] + [(layout, n) for layout in arguments.layouts.split(",") for n in counts if n > 1]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for layout, processes in cases:
            changes = {key: value.replace("N", str(processes)) for key, value in LAYOUTS[layout].items()}
            found[layout, processes].append(step_seconds(arguments.recipe, processes, small | overrides | changes))
            print(f"{layout} {processes}: {found[layout, processes][-1]:.3f} s per step", flush=True)
    baseline = statistics.median(found["shard", 1])
    relative: dict[str, dict[str, float]] = {}
    for (layout, processes), times in found.items():
        devices = processes if arguments.own_devices else 1
        relative.setdefault(layout, {})[str(processes)] = devices * statistics.median(times) / baseline
    result = {
        "command": "python -m benchmarks.scaling " + " ".join(others),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))},
        "recipe": Path(arguments.recipe).name, "overrides": small | overrides, "processes": counts,
        "step_seconds": {f"{layout}-{n}": times for (layout, n), times in found.items()},
        "relative_cost": relative,
    }  # fmt: skip
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
