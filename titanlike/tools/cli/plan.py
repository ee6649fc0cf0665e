"""`titanlike plan`: memory, communication, time and cost of a recipe before it runs. Imports late, to start fast."""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed import environment
from titanlike.recipe import PretrainRecipe
from titanlike.tools.arguments import add_script_options
from titanlike.tools.cli import processes
from titanlike.tools.cli.command import OVERRIDE_TEXT, RECIPE_KEYS, add_command
from titanlike.tools.output_files import check_path, write_text
from titanlike.tools.planning.hardware import DEFAULT_HARDWARE
from titanlike.utils import system
from titanlike.utils.arguments import parse_int
from titanlike.utils.live_line import LiveLine

if TYPE_CHECKING:
    from titanlike.tools.migration.conversion import Conversion
    from titanlike.tools.planning.hardware import Hardware
    from titanlike.tools.planning.job import Job
    from titanlike.tools.planning.program import Program
    from titanlike.tools.rich_console import RichConsole

DESCRIPTION = """\
Computes memory, speed and cost of a recipe before it runs. It needs no GPU. Prints memory of each kind, collectives, time of a
step, tokens/s, hours, dollars and energy. Names what limits the layout, and the change that helps most. Exits with code 0 if the
recipe fits, otherwise with code 1.

  titanlike plan llama3_8b --gpus 64 --hardware h100
  titanlike plan llama3_70b --gpus 256 --search --write best.toml
  titanlike plan llama3_8b --gpus 8,64,512 --html plan.html
  titanlike plan llama3_8b --gpus 8,64,512 --measured 6284
  titanlike plan stages/pretrain stages/decay stages/chat --gpus 8
  titanlike plan torchtitan.toml --gpus 64    (or a script of Megatron-LM, or the config.json of a model)
  titanlike plan --calibrate mine.toml && titanlike plan debug --gpus 1 --hardware mine.toml"""

DOES_NOT_FIT = 1  # exit code
MAX_BLOCKS = 1000
"""Blocks of a model that is planned: each is planned by itself, many times. The deepest published models have some hundred."""


def add(commands: Any) -> None:
    """Adds `plan` to the commands of `titanlike`."""
    parser = add_command(commands, "plan", DESCRIPTION, run, overrides=RECIPE_KEYS)
    text = f"recipe, where {OVERRIDE_TEXT}, or a job of another program"
    parser.add_argument("recipe", nargs="*", metavar="RECIPE", help=f"{text}; several are the stages of one model")
    text = "number of GPUs; several, such as 8,64,512, print a table of scaling"
    parser.add_argument("--gpus", metavar="N[,N...]", help=text)
    text = "hardware: a name of docs/planning.md, or a file"
    parser.add_argument("--hardware", default=DEFAULT_HARDWARE, metavar="NAME|FILE", help=text)
    text = "plan another program's run of this recipe: a name or file of docs/planning.md#other-programs"
    parser.add_argument("--program", metavar="NAME|FILE", help=text)
    text = "measured tokens/s of one GPU with this recipe on the first number of GPUs: fits the efficiency of the hardware to it"
    parser.add_argument("--measured", type=float, metavar="SPEED", help=text)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    text = (
        "write a page that draws memory over a step, speed and cost, over layouts, micro-batches and sequence lengths"
    )
    parser.add_argument("--html", type=Path, metavar="FILE.html", help=text)
    text = "strong keeps the recipe's global batch, and so the result; weak makes it proportional to the GPUs"
    parser.add_argument("--scaling", choices=["strong", "weak"], default="strong", help=text)
    text = "compare all layouts, schedules, micro-batch sizes, checkpointing modes and float8; keys that are overridden stay"
    parser.add_argument("--search", action="store_true", help=text)
    text = "with --search: write the best candidate as a recipe that extends this one"
    parser.add_argument("--write", type=Path, metavar="BEST.toml", help=text)
    text = "measure this machine's GPUs and links (or CPU), write a hardware file, and exit"
    parser.add_argument("--calibrate", type=Path, metavar="FILE.toml", help=text)
    add_script_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    progress = ProgressBar(enabled=sys.stdout.isatty() and not arguments.json)
    try:
        return _run(arguments, arguments.overrides, progress)
    finally:
        progress.close()


class ProgressBar:
    """A progress bar on a terminal; nothing elsewhere, where the output may be read by a program."""

    def __init__(self, *, enabled: bool) -> None:
        self._line = LiveLine(bar=True, transient=True) if enabled else None

    def __call__(self, text: str, done: int, total: int) -> None:
        """Shows how much is done."""
        if self._line:
            self._line.update(text, done, total)

    def close(self) -> None:
        """Removes the bar, so that other lines can be printed."""
        if self._line:
            self._line.close()


@dataclass(frozen=True)
class Request:
    """A command line, with its files read."""

    arguments: argparse.Namespace
    path: Path
    overrides: Mapping[str, str]
    recipe: PretrainRecipe
    hardware: "Hardware"
    program: "Program"
    progress: ProgressBar

    def job(self, num_gpus: int) -> "Job":
        """Returns the recipe on this number of GPUs."""
        from titanlike.tools.planning.job import Job

        return Job(self.recipe, num_gpus, self.program)

    @property
    def measured(self) -> bool:
        """Whether the efficiency of the hardware is fitted to a measured speed."""
        return self.arguments.measured is not None


def _run(arguments: argparse.Namespace, overrides: Sequence[str], progress: ProgressBar) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    counts = _counts(arguments)
    if len(arguments.recipe) > 1:
        return _stages(arguments, overrides, counts)
    if arguments.write and not arguments.search:
        raise UserError("--write needs --search, which finds the recipe to write")
    if arguments.search and len(counts) > 1:
        raise UserError(f"--search takes one number of GPUs, not {arguments.gpus}")
    if arguments.search and arguments.program:
        raise UserError("--search writes recipes of this toolkit; leave out --program")
    if arguments.html:
        check_path(arguments.html, ".html", "--html")

    from titanlike.run.start import Arguments
    from titanlike.tools.migration import formats
    from titanlike.tools.planning.hardware import load_hardware
    from titanlike.tools.planning.program import TITANLIKE, load_program
    from titanlike.tools.programs import load_known

    hardware = load_hardware(arguments.hardware)
    command_line = Arguments([*arguments.recipe, *overrides])
    job = formats.convert(command_line.recipe, counts[0], dict(arguments.env), trust=arguments.trust)
    load = job.load if job else partial(load_known, command_line.recipe)
    recipe = load(command_line.overrides, _warn)
    hardware.check_dtype(recipe.training.compute_dtype)
    if recipe.model.num_layers > MAX_BLOCKS:
        raise UserError(
            f"model.num_layers = {recipe.model.num_layers:,}: plans are for up to {MAX_BLOCKS:,} blocks; use a smaller number"
        )
    planned_as = arguments.program or (job.planned_as if job and not arguments.search else "")
    program = load_program(planned_as) if planned_as not in ("", "titanlike") else TITANLIKE
    if job:
        if not arguments.program:
            program = replace(program, **(job.plan_changes if planned_as else {}))
        _print_converted(job, planned_as or "titanlike", counts)
    request = Request(arguments, command_line.recipe, command_line.overrides, recipe, hardware, program, progress)
    if request.measured:
        request = _anchored(request, counts[0])
    if arguments.write:
        from titanlike.tools.planning.search import refuse_to_replace

        refuse_to_replace(arguments.write)
        if job:
            raise UserError(
                f"--write extends a recipe: first `titanlike import {command_line.recipe} recipe.toml`, and plan that"
            )
    if len(counts) > 1:
        code = _scaling(request, counts)
    else:
        code = _search(request, counts[0]) if arguments.search else _plan(request, counts[0])
    if arguments.html:
        _write_page(request, counts)
    return code


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _print_converted(job: "Conversion", program: str, counts: list[int]) -> None:
    """Prints what was made of another program's file, and whose run is planned."""
    lines = job.summary()
    if job.batch_grows and len(counts) > 1:
        lines.append(
            f"the batch is for {counts[0]} GPUs; --scaling weak makes it proportional to them, as the other program does"
        )
    other = "; --program titanlike plans this toolkit's run of it" if program != "titanlike" else ""
    print("\n".join([*lines, f"planned as a run of {program}{other}\n"]), file=sys.stderr)


def _anchored(request: Request, num_gpus: int) -> Request:
    """Returns the request with the efficiency at which the recipe has the measured speed, which it prints."""
    from titanlike.run.checks import check_recipe
    from titanlike.tools.planning.ranges import anchored

    check_recipe(request.recipe, num_gpus)
    hardware = anchored(request.job(num_gpus), request.hardware, request.arguments.measured)
    names = ("efficiency", "float8_efficiency")
    values = ", ".join(
        f"{name} {getattr(hardware, name):.3f} instead of {getattr(request.hardware, name):g}" for name in names
    )
    print(
        f"measured  {request.arguments.measured:,.0f} tokens/s per GPU on {num_gpus:,} GPUs: {values}", file=sys.stderr
    )
    return replace(request, hardware=hardware)


def _plan(request: Request, num_gpus: int) -> int:
    from titanlike.run.checks import check_recipe
    from titanlike.tools.planning import report
    from titanlike.tools.planning.advice import advice, checkpointing_modes
    from titanlike.tools.planning.plan import make_plan

    check_recipe(request.recipe, num_gpus)
    plan = make_plan(request.job(num_gpus), request.hardware, measured=request.measured)
    recommendation = advice(plan, check_recipe)
    if recommendation.impossible:
        raise UserError(recommendation.text)
    modes = checkpointing_modes(plan, check_recipe)
    if request.arguments.json:
        print(json.dumps(report.as_json(plan, recommendation, modes), indent=1))
    else:
        report.print_plan(plan, recommendation, modes, _console())
    return 0 if plan.fits else DOES_NOT_FIT


def _search(request: Request, num_gpus: int) -> int:
    from titanlike.run.checks import check_recipe
    from titanlike.tools.planning import report
    from titanlike.tools.planning.changes import text_of
    from titanlike.tools.planning.plan import make_plan
    from titanlike.tools.planning.search import search, value_of, write_recipe
    from titanlike.tools.programs import load_known

    def on_progress(done: int, total: int) -> None:
        request.progress(f"layout {done} of {total}", done, total)

    result = search(
        request.recipe,
        num_gpus,
        request.hardware,
        check_recipe,
        fixed=request.overrides.keys(),
        measured=request.measured,
        on_progress=on_progress,
    )
    request.progress.close()
    if not result.candidates:
        check_recipe(request.recipe, num_gpus)
        fixed = text_of({key: value_of(request.recipe, key) for key in request.overrides if "." in key})
        raise UserError(
            f"no layout of {num_gpus} GPUs has {fixed}; use another number of GPUs, or leave out one of these"
        )
    if not result.best and result.invalid == result.candidates:
        raise UserError(result.problem)
    if not result.best:
        raise UserError(
            f"no layout of {request.path} fits on {num_gpus} x {request.hardware.name} ({report.counts_line(result)}); use "
            "more GPUs, a smaller optimizer.state_dtype or parallelism.cpu_offload = true"
        )
    original = None
    with suppress(UserError):  # the recipe's own layout need not be valid on this number of GPUs
        check_recipe(request.recipe, num_gpus)
        original = make_plan(request.job(num_gpus), request.hardware, measured=request.measured)
    if request.arguments.json:
        print(json.dumps(report.search_as_json(result), indent=1))
    else:
        report.print_search(result, original, _console())
    if request.arguments.write:
        write_recipe(request.arguments.write, request.path, request.overrides, result.best[0])
        try:
            check_recipe(load_known(request.arguments.write, {}), num_gpus)
        except UserError:
            request.arguments.write.unlink()
            raise
        _print_written(request, request.arguments.write)
    return 0


def _scaling(request: Request, counts: list[int]) -> int:
    from titanlike.run.checks import check_recipe
    from titanlike.tools.planning import report
    from titanlike.tools.planning.scaling import scaling

    mode = request.arguments.scaling
    points = scaling(request.recipe, counts, request.hardware, check_recipe, mode, request.program, request.measured)
    plans = [point.plan for point in points if point.plan]
    if not plans:
        raise UserError(f"none of --gpus {request.arguments.gpus} works: {points[0].problem}")
    if request.arguments.json:
        print(json.dumps(report.scaling_as_json(points, mode), indent=1))
    else:
        report.print_scaling(points, mode, request.hardware, _console())
    return 0 if any(plan.fits for plan in plans) else DOES_NOT_FIT


def _stages(arguments: argparse.Namespace, overrides: Sequence[str], counts: list[int]) -> int:
    """Plans recipes that are trained one after the other."""
    from titanlike.run.checks import check_recipe
    from titanlike.run.start import Arguments
    from titanlike.tools.planning import report
    from titanlike.tools.planning.hardware import load_hardware
    from titanlike.tools.planning.job import Job
    from titanlike.tools.planning.plan import make_plan
    from titanlike.tools.stages import load_stages

    options = {"--search": arguments.search, "--write": arguments.write, "--html": arguments.html}
    options |= {
        "--measured": arguments.measured,
        "--program": arguments.program,
        f"--gpus {arguments.gpus}": counts[1:],
    }
    if used := [name for name, value in options.items() if value]:
        raise UserError(f"{used[0]} is for one recipe; plan the stages one by one")
    hardware = load_hardware(arguments.hardware)
    command_line = Arguments([*arguments.recipe, *overrides], many=True)
    stages = load_stages(command_line.recipes, command_line.overrides, on_ignored=_warn)
    for stage in stages:
        hardware.check_dtype(stage.recipe.training.compute_dtype)
        check_recipe(stage.recipe, counts[0])
    plans = {str(stage.path): make_plan(Job(stage.recipe, counts[0]), hardware) for stage in stages}
    if arguments.json:
        print(json.dumps(report.stages_as_json(plans), indent=1))
    else:
        report.print_stages(plans, _console())
    return 0 if all(plan.fits for plan in plans.values()) else DOES_NOT_FIT


def _write_page(request: Request, counts: list[int]) -> None:
    """Writes the page, whose candidates `titanlike plan` plans with the command that it shows, but for a measured speed."""
    from titanlike.run.checks import check_recipe
    from titanlike.tools.planning.grid import Grid
    from titanlike.tools.planning.page import page

    def on_progress(done: int, total: int) -> None:
        request.progress(f"page {done} of {total}", done, total)

    arguments = request.arguments
    fixed = request.overrides.keys()
    grid = Grid(request.recipe, request.hardware, check_recipe, fixed, request.program, request.measured)
    candidates = grid.candidates(counts, arguments.scaling, on_progress)
    request.progress.close()
    if not candidates:
        raise UserError(f"--html {arguments.html}: none of the candidates is valid; leave out some of the overrides")
    command = ["titanlike", "plan", *arguments.recipe, "--hardware", arguments.hardware]
    command += ["--program", arguments.program] if arguments.program else []
    command += [word for name, value in arguments.env for word in ("--env", f"{name}={value}")]
    command += ["--trust"] if arguments.trust else []
    command += [f"--{name}={value}" for name, value in request.overrides.items()]
    write_text(arguments.html, page(candidates, command), "--html")
    _print_written(request, arguments.html)


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measures the hardware of this machine in one process per GPU or, without a GPU, in two processes."""
    processes.start_processes(None if system.num_gpus() else 2)
    from titanlike.tools.planning.calibrate import calibrate

    with processes.session("auto") as device:
        progress = ProgressBar(enabled=sys.stderr.isatty())
        calibrate(device, Path(arguments.calibrate), progress)
        progress.close()
    return 0


def _counts(arguments: argparse.Namespace) -> list[int]:
    """Returns the numbers of GPUs in ascending order."""
    if not arguments.recipe:
        raise UserError("give the recipe to plan: titanlike plan RECIPE.toml --gpus N")
    if not arguments.gpus:
        raise UserError("--gpus is missing: the number of GPUs to plan for, such as --gpus 64")
    counts = []
    for text in arguments.gpus.split(","):
        count = parse_int(text)
        if count is None or not 1 <= count <= environment.MAX_PROCESSES:
            raise UserError(
                f"--gpus {shown(arguments.gpus)}: {shown(text)!r} is not a number of GPUs; give 1 to {environment.MAX_PROCESSES:,}"
                ", or several with commas, such as 8,64,512"
            )
        counts.append(count)
    return sorted(set(counts))


def _console() -> "RichConsole":
    from titanlike.tools.rich_console import RichConsole

    return RichConsole(highlight=False, markup=False, emoji=False)


def _print_written(request: Request, path: Path) -> None:
    print(f"wrote {path}", file=sys.stderr if request.arguments.json else sys.stdout)
