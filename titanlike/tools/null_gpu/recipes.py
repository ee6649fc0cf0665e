"""Trains shipped recipes on null GPUs for a few steps, and prints what a step does beside the plan.

    python -m titanlike.tools.null_gpu.recipes [--record FILE] [RECIPE...] [--gpus N] [--section.key=value ...]

Without names, all recipes. Each has its own model, its full depth and the number of GPUs that it is written for, of which this
runs rank 0: the other ranks are absent. Data is synthetic, and a step has few micro-batches. `--all-ranks` starts a process for
each GPU, which compares the order of their collectives.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlike.config.distill import RANDOM
from titanlike.config.shipped import RECIPES
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.start import program_of
from titanlike.tools.null_gpu import library, record
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import Memory, memory
from titanlike.tools.programs import ONLY_STEPS, load_known, options_of

GPUS = {
    1: ("debug", "distill_debug", "dpo_debug", "finetune_debug", "gemma2_2b", "gemma3_1b", "gemma3_270m", "llama3_1b",
        "llama3_1b_fineweb_edu", "mlm_debug", "qwen3_0_6b", "qwen3_1_7b", "seq2seq_debug",
        "stages/chat", "stages/decay", "stages/pretrain"),
    8: ("distill_llama3_1b", "dpo_llama3_8b", "finetune_llama3_8b", "gemma2_9b", "gemma3_12b", "gemma3_4b", "gpt2_124m",
        "gpt2_124m_c4", "gpt2_124m_speedrun", "llama3_8b", "llama3_8b_float8", "modernbert_base", "qwen2_5_7b", "qwen3_14b",
        "qwen3_4b", "qwen3_8b", "t5_base"),
    32: ("study/baseline", "study/compile", "study/float8", "study/float8_all_gather"),
    64: ("gemma2_27b", "gemma3_27b", "llama3_8b_128k", "llama3_8b_128k_float8", "mixtral_8x7b", "qwen3_30b_a3b", "qwen3_32b",
        "deepseek_v2_lite", "gpt_oss_20b"),
    256: ("gpt_oss_120b", "llama3_70b", "llama3_70b_float8"),
    512: ("llama3_405b", "llama3_405b_float8"),
    1024: ("deepseek_v3_671b",),
}  # fmt: skip
GPUS_OF = {name: gpus for gpus, names in GPUS.items() for name in names}
STEPS = 4
SHORT = (
    "--data.source=synthetic", "--tokenizer.encoding=bytes", "--schedule.warmup_steps=1", f"--training.steps={STEPS}",
    "--checkpoint.initial=", *options_of(ONLY_STEPS),
)  # fmt: skip
COLUMNS = (
    "recipe", "GPUs", "allocated GiB", "difference", "reserved GiB", "reserved difference", "launches", "synchronizations",
    "graph breaks",
)  # fmt: skip


def short(recipe: PretrainRecipe, gpus: int) -> list[str]:
    """Returns the options with which a step has two micro-batches at most or, with pipeline stages, two for each rank of the
    pipeline."""
    layout = recipe.parallelism.resolve(gpus)
    sequences = layout.replicate * layout.shard * recipe.training.local_batch_size
    most = 2 * layout.pipeline * sequences
    return [f"--training.global_batch_size={min(recipe.training.global_batch_size, most)}"]


def plan(name: str, gpus: int, options: Sequence[str]) -> Memory:
    """Returns the memory that is planned for rank 0 of a recipe with options of the command line."""
    return memory(job_of(name, gpus, options))


def job_of(name: str, gpus: int, options: Sequence[str]) -> Job:
    """Returns the job of a recipe with options of the command line."""
    overrides = dict(option.removeprefix("--").split("=", 1) for option in options)
    return Job(load_known(RECIPES / f"{name}.toml", overrides), gpus)


def train(
    path: Path,
    gpus: int,
    overrides: Sequence[str],
    device: str,
    defaults: Sequence[str] = SHORT,
    *,
    all_ranks: bool = False,
    **options: Any,
) -> tuple[list[str], dict[str, Any]]:
    """Trains a recipe with these defaults, where none of the overrides has the key.

    Returns:
        The keys that it was trained with, and the record. `options` are of `record.run`.
    """
    overridden = {override.split("=")[0] for override in overrides}
    recipe = load_known(path, {})
    arguments = [*defaults, *overrides]
    if isinstance(recipe, DistillRecipe):
        arguments.append(f"--distillation.teacher={RANDOM}")
    if isinstance(recipe, DpoRecipe):
        arguments[:1] = ["--data.source=synthetic_preference", "--data.path="]
    arguments = [each for each in arguments if each in overrides or each.split("=")[0] not in overridden]
    with tempfile.TemporaryDirectory() as folder:
        program = [str(program_of(path)), str(path), *arguments, f"--run.dir={folder}", "--run.name=run"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if all_ranks else []
        ranks = 0 if all_ranks or gpus == 1 else gpus
        command = [sys.executable, *launcher, *program]
        code, found = record.run(command, device, gpus if all_ranks else 8, ranks=ranks, **options)
        if code or found["mismatch"]:
            raise RuntimeError(found["mismatch"] or f"{path.stem} ended with code {code}")
    return arguments, found


def measure(name: str, gpus: int, overrides: Sequence[str], device: str, *, all_ranks: bool = False) -> dict[str, Any]:
    """Trains a recipe. Returns a row of the table: the last step of the rank with the highest peak."""
    path = RECIPES / f"{name}.toml"
    defaults = [*SHORT, *short(load_known(path, {}), gpus)]
    arguments, found = train(path, gpus, overrides, device, defaults, all_ranks=all_ranks)
    process = max(found["processes"], key=lambda each: each["allocated_peak"])
    step = process["steps"][-1]
    launches = step["launches"]
    calls = [call for group in step["collectives"] for call in group["calls"].values()]
    return {
        "recipe": name,
        "options": arguments,
        "GPUs": gpus,
        "allocated": process["allocated_peak"],
        "reserved": process["reserved_peak"],
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


def beside_plan(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the cells of a row, with today's plan."""
    planned = plan(row["recipe"], row["GPUs"], row["options"])
    return row | {
        "allocated GiB": f"{row['allocated'] / 2**30:.2f}",
        "difference": f"{planned.allocated / row['allocated'] - 1:+.1%}",
        "reserved GiB": f"{row['reserved'] / 2**30:.2f}",
        "reserved difference": f"{planned.reserved / row['reserved'] - 1:+.1%}",
        "launches": f"{row['launches']:,}",
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    cells = [[str(beside_plan(row)[name]) for name in COLUMNS] for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(each) + " |" for each in cells)])


def main() -> None:
    """Measures the recipes and prints the table. With `--record`, rows of recipes that are in the file are replaced."""
    parser = argparse.ArgumentParser(description="Trains shipped recipes on null GPUs for a few steps.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="such as llama3_8b; default: all")
    parser.add_argument("--device", choices=sorted(library.devices()), default="h100")
    parser.add_argument("--gpus", type=int, help="instead of the number that the recipe is written for")
    parser.add_argument("--all-ranks", action="store_true", help="a process for each GPU")
    parser.add_argument("--record", type=Path, metavar="FILE", help="JSON with a row per recipe")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and train nothing")
    options, overrides = parser.parse_known_args()
    unknown = [name for name in options.recipes if name not in GPUS_OF]
    if unknown:
        parser.error(f"{unknown[0]}: unknown; choose from {', '.join(sorted(GPUS_OF))}")
    rows: dict[str, dict[str, Any]] = {}
    if options.record and options.record.exists():
        rows = {row["recipe"]: row for row in json.loads(options.record.read_text())["rows"]}
    failed = []
    for name in [] if options.table else options.recipes or sorted(GPUS_OF):
        gpus = options.gpus or GPUS_OF[name]
        try:
            rows[name] = measure(name, gpus, overrides, options.device, all_ranks=options.all_ranks)
        except RuntimeError as error:
            failed.append(str(error))
            continue
        print(table([rows[name]]), file=sys.stderr, flush=True)
        if options.record:
            shown = {"device": options.device, "rows": [rows[each] for each in sorted(rows)]}
            options.record.write_text(json.dumps(shown, indent=1) + "\n")
    print(table([rows[each] for each in sorted(rows)]))
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
