"""Runs the subjects of `benchmarks/run.py` one after another on the null GPU, and compares what a step does.

    python -m benchmarks.side_by_side --out benchmarks/results/null_gpu_side_by_side.json \\
        --python torchtitan=PYTHON --python torchtitan_0_2=PYTHON --python litgpt=PYTHON --python hf=PYTHON \\
        --path nanochat=FOLDER --path nanogpt=FOLDER

The rows are those that the file does not have yet; `--again` repeats them. The environments of peers need the PyTorch of this one.
Prints the file as tables in Markdown.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import facts, parser_of, write
from benchmarks.common import table as table_of
from benchmarks.models import MODELS, config_of
from benchmarks.protocol import Task
from benchmarks.run import Subject, add_peers, options_of_rows, take_turns
from titanlike.tools.null_gpu import record

WARMUP, STEPS = 4, 10  # the compiler is done, and a log line of every tenth step is in the measured ones
# torchtitan 0.3.0 captures forward and backward passes in CUDA graphs, in which the single launches are not counted.
WITHOUT_GRAPHS = "torchtitan, no CUDA graphs"
OPTIONS = {WITHOUT_GRAPHS: {"training.disable_cuda_graphs": "true"}}
TORCHTITAN = ("torchtitan", WITHOUT_GRAPHS, "torchtitan_0_2")
LLAMA = ("plain", "titanlike", *TORCHTITAN, "litgpt", "hf", "nanochat")


class Case(NamedTuple):
    """A table."""

    model: str
    precision: str
    micro_batch: int  # sequences
    subjects: tuple[str, ...]


CASES = {
    "gpt2": Case("gpt2_124m", "bfloat16", 64, ("plain", "titanlike", "nanogpt", "hf", "nanochat")),
    "1b": Case("llama3_1b", "bfloat16", 4, LLAMA),
    "1b-single": Case("llama3_1b", "bfloat16", 1, LLAMA),
    "8b": Case("llama3_8b_8layers", "bfloat16", 2, LLAMA),
    "1b-float8": Case("llama3_1b", "float8", 4, ("titanlike", *TORCHTITAN, "nanochat")),
    "8b-float8": Case("llama3_8b_8layers", "float8", 2, ("titanlike", *TORCHTITAN, "nanochat")),
}


def task_of(case: Case, folder: Path) -> Task:
    """Returns the task of a case, whose weights and tokens are zeros: nothing depends on them here."""
    import torch

    from titanlike.models.registry import build_model

    model = MODELS[case.model]
    steps = WARMUP + STEPS + 2
    with torch.device("meta"):
        network = build_model(config_of(model))
    # Each has a single element in the file.
    torch.save(
        {name: torch.zeros(()).expand(p.shape) for name, p in network.state_dict().items()}, folder / "weights.pt"
    )
    np.save(folder / "tokens.npy", np.zeros(steps * model.batch_size * model.seq_len + 1, np.uint32))
    np.save(folder / "batches.npy", np.zeros((steps, model.batch_size, model.seq_len + 1), np.uint32))
    return model.task(
        folder,
        case.micro_batch,
        row="best",
        device="cuda",
        precision=case.precision,
        warmup=WARMUP,
        steps=STEPS + 1,
        block=STEPS + 1,
    )


def measure(task: Task, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a row."""
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as messages:
        variables = record.environment("h100", 1, Path(messages))

        def start(_: str, task: Task) -> Subject:
            return Subject(task, folder, options, variables)

        result = take_turns({task.subject: task}, start)[task.subject]
        if "failed" in result:
            return {"failed": reason(result["failed"]), "log": result["failed"]}
        (process,) = record.read(Path(messages))["processes"]
    steps = process["steps"][WARMUP:]
    assert len(steps) == STEPS
    counted = steps[-2]["launches"]  # without a log line
    return {
        "launches": {"total": sum(counted.values()), **counted},
        "host_cpu_ms": [round(1e3 * step["host_cpu_seconds"], 2) for step in steps],
        "host_wall_ms": [round(1e3 * step["host_seconds"], 2) for step in steps],
        "synchronizations": sum(step["synchronizations"] for step in steps) / STEPS,
        "locations": {place: n / STEPS for place, n in _sum(step["locations"] for step in steps).items()},
        "allocated_peak_gib": round(process["allocated_peak"] / 2**30, 2),
        "reserved_peak_gib": round(process["reserved_peak"] / 2**30, 2),
        "seconds_to_second_step": round(result["seconds_to_second_step"], 1),
        "graphs": process["graphs"],
        "graph_breaks": sum(process["graph_breaks"].values()),
        "kernels": steps[-2]["kernels"],
        "versions": result["versions"],
    }  # fmt: skip


def _sum(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, n in each.items():
            total[name] = total.get(name, 0) + n
    return total


def reason(log: str) -> str:
    """Returns the last line of a log, without the addresses and figures of an error of memory."""
    lines = [line for line in log.strip().splitlines() if line.strip()]
    return "out of memory" if "OutOfMemoryError" in log else lines[-1].strip() if lines else "killed"


def table(result: dict[str, Any]) -> str:
    """Returns the result as a Markdown table for each case."""
    heads = (
        "", "launches", "matmul", "attention", "generated", "other", "host ms", "synchronizations", "allocated GiB", "reserved GiB",
    )  # fmt: skip
    tables = []
    for name, rows in result["cases"].items():
        case, model = CASES[name], MODELS[CASES[name].model]
        sequences = f"{model.batch_size // case.micro_batch} x {case.micro_batch} x {model.seq_len:,} tokens"
        cells = []
        for subject in (each for each in case.subjects if each in rows):
            row = rows[subject]
            if "failed" in row:
                cells.append((subject, row["failed"], *[""] * 8))
                continue
            counts = [f"{row['launches'][kind]:,}" for kind in ("total", *record.KINDS)]
            memory = (f"{row[key]:.2f}" for key in ("allocated_peak_gib", "reserved_peak_gib"))
            cells.append((subject, *counts, f"{min(row['host_cpu_ms']):.1f}", f"{row['synchronizations']:g}", *memory))
        tables.append(f"**{case.model}, {case.precision}, {sequences}**\n\n{table_of(heads, cells)}\n")
    return "\n".join(tables)


def main() -> None:
    """Measures the rows that are missing, and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--case", default=",".join(CASES))
    parser.add_argument(
        "--subject", default=",".join(sorted({s.partition(",")[0] for c in CASES.values() for s in c.subjects}))
    )
    parser.add_argument("--again", action="store_true", help="also measure the rows that the file has")
    add_peers(parser)
    options = parser.parse_args()
    changes = options_of_rows(options)
    result = json.loads(options.out.read_text()) if options.out and options.out.exists() else {"cases": {}}
    result |= facts() | {"device": "h100", "warmup": WARMUP, "steps": STEPS}
    for name in options.case.split(","):
        rows = result["cases"].setdefault(name, {})
        with tempfile.TemporaryDirectory() as folder:
            task = task_of(CASES[name], Path(folder))
            for subject in CASES[name].subjects:
                program = subject.partition(",")[0]
                if program not in options.subject.split(",") or (subject in rows and not options.again):
                    continue
                own = OPTIONS.get(subject, {}) | changes.get(f"{program}.best", {})
                one = replace(task, subject=program, options=own)
                print(name, end=" ", flush=True, file=sys.stderr)
                rows[subject] = measure(one, Path(folder, subject), options)
                write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
