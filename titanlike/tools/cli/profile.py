"""`titanlike profile`: ten steps of a recipe, and where their time went, beside the plan. Imports late, to start fast."""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.config.shipped import REPOSITORY, recipe_path
from titanlike.recipe import PretrainRecipe
from titanlike.tools.cli.command import OVERRIDE_TEXT, RECIPE_KEYS, add_command
from titanlike.tools.output_files import refuse_existing
from titanlike.tools.programs import ONLY_STEPS, options_of

if TYPE_CHECKING:
    from titanlike.tools.planning.hardware import Hardware
    from titanlike.tools.planning.plan import Plan
    from titanlike.tools.trace import Profile

DESCRIPTION = """\
Measures where the time of a step goes. Runs ten steps of a recipe, traces three of them, and prints the time of matmuls, attention,
elementwise kernels, the optimizer, exposed communication of each mesh dimension, waiting for data, and gaps in which the host
launches nothing. Beside it: what `titanlike plan` expects. The trace itself is for ui.perfetto.dev. A run directory that has traces
is not run again. Without a GPU, the same is predicted from the kernels of a step, for rank 0 of NPROC.

  titanlike profile debug
  NPROC=8 titanlike profile llama3_8b --ranks 0,7 --parallelism.tensor=2
  titanlike profile runs/mine
  NPROC=8 titanlike profile llama3_8b --without-gpu h100"""

STEPS, FIRST_TRACED, NUM_TRACED = 10, 6, 3
# Only what trains: nothing else is in the time of a step. The schedule has no effect on it, and must be valid for ten steps.
OVERRIDES = ONLY_STEPS | {
    "training.steps": STEPS, "training.batch_ramp": [], "schedule.warmup_steps": 0, "schedule.decay": "none",
    "schedule.decay_ratio": 0, "metrics.interval": 1, "profiling.steps": [FIRST_TRACED], "profiling.num_steps": NUM_TRACED,
}  # fmt: skip

# Parts of a plan that a trace cannot tell apart, and the part of a trace that contains them.
SAME_PART = {
    "orthogonalization": "optimizer", "weight copies": "elementwise", "pipeline bubble": "exposed pipeline",
    "kernel launches": "host gaps",
}  # fmt: skip
WITHIN_OTHERS = ("recomputation", "overlap slowdown")  # a trace has them in the kernels of other parts


def add(commands: Any) -> None:
    """Adds `profile` to the commands of `titanlike`."""
    parser = add_command(
        commands,
        "profile",
        DESCRIPTION,
        run,
        overrides=RECIPE_KEYS,
    )
    text = f"recipe, where {OVERRIDE_TEXT}, or a run with traces"
    parser.add_argument("path", type=recipe_path, metavar="RECIPE|RUN", help=text)
    parser.add_argument("--ranks", default="0", metavar="R[,R...]", help="ranks to trace")
    text = "hardware of the plan (default: the GPU's; on a CPU, no plan)"
    parser.add_argument("--hardware", metavar="NAME|FILE", help=text)
    text = "predict the profile on this hardware, from a step whose kernels are recorded and not computed: docs/performance.md"
    parser.add_argument("--without-gpu", metavar="NAME|FILE", help=text)
    text = "run directory (default: runs/profile-RECIPE-TIME)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from titanlike.tools.metrics_file import read_records
    from titanlike.tools.planning.hardware import load_hardware
    from titanlike.tools.programs import load_known
    from titanlike.tools.trace import read_profile, traces

    overrides = arguments.overrides
    hardware = load_hardware(arguments.hardware) if arguments.hardware else None  # before what takes long
    folder = arguments.path
    if arguments.without_gpu:
        _predict(arguments, overrides)
        return
    if folder.is_dir():
        if overrides:
            raise UserError(f"{folder} is a run, whose recipe is not changed; leave out {shown(overrides[0])}")
    else:
        folder = _new_folder(arguments)
        _train(arguments, overrides, folder)
    found = traces(folder)
    if not found:
        raise UserError(f"{folder} has no traces; profile its recipe, or train with --profiling.steps='[10]'")
    step = max(step for step, _ in found)
    facts = json.loads((folder / "environment.json").read_text())
    recipe, num_ranks = load_known(folder / "recipe.toml", {}), facts["processes"]
    sizes = recipe.parallelism.resolve(num_ranks).dimensions()
    axes = [name for name, size in sizes.items() if size > 1]
    axis = axes[0] if len(axes) == 1 else "shard" if set(axes) == {"shard", "context"} else ""
    profiles = [read_profile(path, axis) for (first, _), path in found.items() if first == step]
    plan = _plan(recipe, num_ranks, hardware, facts)
    measured = _measured(read_records(folder / "metrics.jsonl"), range(step, step + profiles[0].num_steps))
    if arguments.json:
        print(json.dumps(_as_json(profiles, plan, measured), indent=1))
    else:
        files = [found[step, profile.rank] for profile in profiles]
        _print(profiles, plan, measured, files, on_gpu=facts["device"] != "cpu")


def _new_folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.out or Path("runs", f"profile-{arguments.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    refuse_existing(folder)
    return folder


def _predict(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Prints the predicted profile of rank 0 on a GPU that this machine does not have, and writes its trace."""
    from titanlike.distributed.launch_config import launch_config
    from titanlike.metrics.profiler import DIRECTORY
    from titanlike.tools.null_gpu import ledger, library, predicted_trace
    from titanlike.tools.planning.plan import plan_or_none
    from titanlike.tools.planning.report import table
    from titanlike.tools.rich_console import RichConsole
    from titanlike.tools.trace import read_profile

    folder, num_ranks = _new_folder(arguments), launch_config(default_processes=1).world_size
    print(f"compiles and records a step of rank 0 of {num_ranks} on {arguments.without_gpu}", file=sys.stderr)
    try:
        found, rates, process = ledger.measure(
            arguments.path, overrides, num_ranks, arguments.without_gpu, stdout=subprocess.DEVNULL
        )
    except (library.Unavailable, RuntimeError) as error:
        raise UserError(f"--without-gpu: {error}") from None
    file = folder / DIRECTORY / "step-1-rank-0.json.gz"
    predicted_trace.write(file, found, rates)
    profiles, sums = [read_profile(file)], ledger.summary(found, rates, process)
    plan = plan_or_none(rates.job.recipe, num_ranks, rates.hardware)
    measured = {"memory_gib": sums["allocated_gib"]}
    if arguments.json:
        print(json.dumps(_as_json(profiles, plan, measured) | {"ledger": sums}, indent=1))
        return
    classes = table("Kernels by what they compute", "", "calls", "GB", "milliseconds")
    for name, row in sums["classes"].items():
        classes.add_row(name, f"{row['calls']:,.0f}", f"{row['GB']:.1f}", f"{row['ms']:.2f}")
    _print(profiles, plan, measured, [file], on_gpu=True)
    console = RichConsole(highlight=False, markup=False, emoji=False)
    console.print()
    console.print(classes)
    pipeline = " and without the bubble of the pipeline" if rates.job.layout.pipeline > 1 else ""
    console.print(f"\nAll times are predicted{pipeline}: docs/performance.md")


def _train(arguments: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Runs the recipe's program for ten steps."""
    ours = OVERRIDES | {"profiling.ranks": f"[{arguments.ranks}]", "run.dir": folder.parent, "run.name": folder.name}
    launcher = REPOSITORY / "titanlike/run/launch.py"
    command = [sys.executable, str(launcher), str(arguments.path), *overrides, *options_of(ours)]
    done = subprocess.run(command, stdout=sys.stderr if arguments.json else None, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _plan(
    recipe: PretrainRecipe, num_ranks: int, hardware: "Hardware | None", facts: Mapping[str, Any]
) -> "Plan | None":
    from titanlike.hardware.files import file_of_device
    from titanlike.tools.planning.hardware import load_hardware
    from titanlike.tools.planning.plan import plan_or_none

    if not hardware and (file := file_of_device(facts["device"])):
        hardware = load_hardware(file)
    return plan_or_none(recipe, num_ranks, hardware) if hardware else None


def _measured(records: Sequence[Mapping[str, Any]], traced: range) -> dict[str, float]:
    """Returns the median step time without the profiler, after warmup, and the peak memory of rank 0."""
    steps = [record for record in records if "step_seconds" in record]
    others = [record["step_seconds"] for record in steps if record["step"] > 2 and record["step"] not in traced]
    found = {"memory_gib": max(record["memory_gib"] for record in steps)}
    return found | ({"step_seconds": statistics.median(others)} if others else {})


def _planned_parts(plan: "Plan") -> dict[str, float]:
    """Returns the seconds of a plan by the names that a trace has."""
    parts: dict[str, float] = {}
    for name, seconds in plan.time.parts.items():
        name = SAME_PART.get(name, name)
        parts[name] = parts.get(name, 0.0) + seconds
    return parts


def _print(
    profiles: "Sequence[Profile]",
    plan: "Plan | None",
    measured: Mapping[str, float],
    files: Sequence[Path],
    *,
    on_gpu: bool,
) -> None:
    from titanlike.tools.planning.report import table
    from titanlike.tools.rich_console import RichConsole

    planned = _planned_parts(plan) if plan else {}
    longest = max(profile.seconds for profile in profiles)
    scale, unit, digits = (1, "seconds", 3) if longest >= 1 else (1e3, "milliseconds", 2)
    columns = [column for profile in profiles for column in (f"rank {profile.rank}", "share")]
    result = table(f"Time of a step, {unit}", "", *columns, *(["plan", "share"] if plan else []))
    totals = [*(profile.seconds for profile in profiles), *([plan.time.seconds] if plan else [])]
    parts = [*(profile.parts for profile in profiles), *([planned] if plan else [])]
    names = sorted(
        {name for each in parts for name in each}, key=lambda name: -max(each.get(name, 0.0) for each in parts)
    )

    def cells(name: str) -> list[str]:
        found = []
        for index, (each, total) in enumerate(zip(parts, totals, strict=True)):
            if name in WITHIN_OTHERS and index < len(profiles):
                found += ["in others", ""]
            else:
                value = each.get(name, 0.0)
                found += [f"{value * scale:,.{digits}f}", f"{value / total:.1%}"]
        return found

    for name in names:
        result.add_row(name, *cells(name))
    result.add_row("step", *(text for total in totals for text in (f"{total * scale:,.{digits}f}", "")), style="bold")
    console = RichConsole(highlight=False, markup=False, emoji=False)
    console.print()
    console.print(result)
    for axis in dict.fromkeys(axis for profile in profiles for axis in profile.hidden):
        values = [f"{profile.hidden.get(axis, 0.0) * scale:,.{digits}f}" for profile in profiles]
        expected = f", planned {plan.time.hidden.get(axis, 0.0) * scale:,.{digits}f}" if plan else ""
        console.print(f"hidden behind computation: {axis} {', '.join(values)}{expected}", style="dim")
    kernels = table("Longest kernels or operators, rank " + str(profiles[0].rank), "", "calls", unit)
    for name, calls, seconds in profiles[0].longest[:10]:
        steps = profiles[0].num_steps
        kernels.add_row(name[:70], f"{calls / steps:,.0f}", f"{seconds / steps * scale:,.{digits}f}")
    console.print()
    console.print(kernels)
    console.print()
    if "step_seconds" in measured:
        seconds = measured["step_seconds"]
        console.print(
            f"without the profiler, a step takes {seconds * scale:,.{digits}f} {unit}; with it "
            f"{profiles[0].seconds / seconds - 1:+.0%}"
        )
    expected = f", planned {plan.allocated / 2**30:.2f} GiB" if plan and on_gpu else ""
    what = "allocated at the peak" if on_gpu else "resident at the peak, with Python and the libraries"
    console.print(f"memory  {measured['memory_gib']:.2f} GiB {what}{expected}")
    for file in files:
        console.print(f"trace   {file} (open it in ui.perfetto.dev)", soft_wrap=True)


def _as_json(profiles: "Sequence[Profile]", plan: "Plan | None", measured: Mapping[str, float]) -> dict[str, Any]:
    ranks = [
        {
            "rank": profile.rank,
            "num_steps": profile.num_steps,
            "step_seconds": profile.seconds,
            "step_parts_seconds": profile.parts,
            "hidden_communication_seconds": profile.hidden,
            "longest": [{"name": name, "calls": calls, "seconds": seconds} for name, calls, seconds in profile.longest],
        }
        for profile in profiles
    ]
    result: dict[str, Any] = {"ranks": ranks, "without_profiler": dict(measured)}
    if plan:
        result["plan"] = {
            "step_seconds": plan.time.seconds,
            "step_parts_seconds": _planned_parts(plan),
            "hidden_communication_seconds": plan.time.hidden,
            "peak_allocated_bytes": plan.allocated,
        }
    return result
