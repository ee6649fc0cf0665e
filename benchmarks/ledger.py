"""Records the kernels of a step of the subjects of `benchmarks/run.py` on the null GPU, one after another, and of recipes.

    python -m benchmarks.ledger --out benchmarks/results/ledger.json --python torchtitan=PYTHON --python torchtitan_0_2=PYTHON

The rows are those that the file does not have yet; `--again` repeats them. The environments of peers need the PyTorch of this one.
Prints the file as tables in Markdown: GB and predicted milliseconds on an H200 by class of kernel.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import facts, parser_of, write
from benchmarks.common import table as table_of
from benchmarks.protocol import Task
from benchmarks.run import Subject, add_peers, take_turns
from benchmarks.side_by_side import OPTIONS, WITHOUT_GRAPHS, Case, reason, task_of
from benchmarks.subjects.titanlike import keys_of
from titanlike.config.shipped import recipe_path
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools.null_gpu import ledger, record
from titanlike.tools.null_gpu.rates import Rates
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job

GPU = "h200"
PEERS = (WITHOUT_GRAPHS, "torchtitan_0_2")
CASES = {
    "1b": Case("llama3_1b", "bfloat16", 2, ("titanlike", "plain", *PEERS)),
    "8b-float8": Case("llama3_8b_8layers", "float8", 2, ("titanlike", *PEERS)),
    "gpt2": Case("gpt2_124m", "bfloat16", 64, ("titanlike", "plain")),
}
TITLES = {
    "1b": "Llama 3.2 1B, bfloat16, 2 x 2 x 8,192 tokens",
    "8b-float8": "Llama 3 8B with 8 blocks, float8, 1 x 2 x 8,192 tokens",
    "gpt2": "GPT-2 124M, bfloat16, 1 x 64 x 1,024 tokens",
    "8b-fsdp": "Llama 3 8B, bfloat16, rank 0 of 8 with FSDP, 2 x 1 x 8,192 tokens",
}
# Recipes, of which rank 0 of so many GPUs trains a step of two micro-batches.
RECIPES = {"8b-fsdp": ("llama3_8b", 8, ("--training.global_batch_size=16",))}


def of_subject(task: Task, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the sums of a subject."""
    folder.mkdir()
    variables = record.environment(GPU, 1, folder, ledger=True)
    result = take_turns({task.subject: task}, lambda _, one: Subject(one, folder, options, variables))[task.subject]
    if "failed" in result:
        return {"failed": reason(result["failed"]), "log": result["failed"]}
    (process,) = record.read(folder)["processes"]
    toml = folder / "recipe.toml"
    toml.touch()
    keys = {key: str(value) for key, value in keys_of(replace(task, options={}), str(folder)).items()}
    recipe = load(PretrainRecipe, toml, keys)
    rates = Rates(Job(recipe, 1), load_hardware(GPU), GPU)
    return ledger.summary(ledger.read(folder), rates, process) | {"versions": result["versions"]}


def of_recipe(name: str) -> dict[str, Any]:
    """Returns the sums of a recipe."""
    recipe, gpus, overrides = RECIPES[name]
    return ledger.summary(*ledger.measure(recipe_path(recipe), overrides, gpus, GPU))


TOTALS = {
    "GB": ",.1f",
    "launches": ",",
    "predicted_ms": ",.1f",
    "predicted_tokens_per_second_per_gpu": ",.0f",
    "allocated_gib": ".2f",
}


def table(result: dict[str, Any]) -> str:
    """Returns the result as a Markdown table for each case. Matmuls and attention have milliseconds only."""
    tables = []
    for name, found in result["cases"].items():
        rows = {subject: row for subject, row in found.items() if "failed" not in row}
        classes = dict.fromkeys(each for row in rows.values() for each in row["classes"])
        cells = [[each, *(_cell(row["classes"].get(each)) for row in rows.values())] for each in classes]
        cells += [
            [key.replace("_", " "), *(format(row[key], form) for row in rows.values())] for key, form in TOTALS.items()
        ]
        tables.append(f"**{TITLES[name]}**\n\n{table_of(['GB, ms', *rows], cells)}\n")
    return "\n".join(tables)


def _cell(row: dict[str, float] | None) -> str:
    sizes = ("GB", "ms") if row and row["GB"] else ("ms",)
    return ", ".join(f"{row[each]:.1f}" for each in sizes) if row else ""


def main() -> None:
    """Records the rows that are missing, and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--case", default=",".join([*CASES, *RECIPES]))
    parser.add_argument(
        "--subject", default=f"titanlike,plain,{','.join(sorted({one.partition(',')[0] for one in PEERS}))}"
    )
    parser.add_argument("--again", action="store_true", help="also record the rows that the file has")
    add_peers(parser)
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out and options.out.exists() else {"cases": {}}
    result |= facts()
    for name in options.case.split(","):
        rows = result["cases"].setdefault(name, {})
        with tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True
        ) as temporary:  # workers of a compiler may still write
            for subject in CASES[name].subjects if name in CASES else ("titanlike",):
                program = subject.partition(",")[0]
                if program not in options.subject.split(",") or (subject in rows and not options.again):
                    continue
                print(name, end=" ", flush=True, file=sys.stderr)
                if name in RECIPES:
                    rows[subject] = of_recipe(name)
                else:
                    task = replace(
                        task_of(CASES[name], Path(temporary)), subject=program, options=OPTIONS.get(subject, {})
                    )
                    rows[subject] = of_subject(task, Path(temporary, subject), options)
                write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
