"""Start of every program in `recipes/`: parses the command line, and loads and checks the recipe.

Runs before torch is imported, so that a mistake in a recipe is reported within a second and not after the start of a job.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from titanlike.config import UserError
from titanlike.config.base import MAX_PATH, show_value, shown
from titanlike.config.errors import REMOVED, refuse_unknown_options
from titanlike.config.help import help_text
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Run as RunSection
from titanlike.config.shipped import PROGRAMS, RECIPES, recipe_path, train_command
from titanlike.distributed import environment
from titanlike.distributed.command_line import command_line, exit_if_output_failed
from titanlike.distributed.sagemaker import OBJECTIVE, sagemaker_job
from titanlike.recipe import PretrainRecipe, load, to_toml
from titanlike.recipe.load import parse_value, read
from titanlike.run.checks import check_machine, check_recipe
from titanlike.run.hooks import call_hooks
from titanlike.utils import system
from titanlike.utils.arguments import parse_int
from titanlike.utils.live_line import LiveLine

R = TypeVar("R", bound=PretrainRecipe)

OPTIONS = ("recipe", "program", "check", "preflight")  # options with a value that are no keys of a section
MAX_DERIVED_NAME = 200  # bytes; a launch id follows
DEFAULT_RECIPE = RECIPES / "debug.toml"


class Arguments:
    """A parsed command line."""

    def __init__(self, argv: Sequence[str], *, many: bool = False) -> None:
        self.recipe = DEFAULT_RECIPE
        self.recipes: list[Path] = []  # those that are named; several only if `many`
        self.overrides: dict[str, str] = {}
        self.help: str | None = None  # a section, a key, "all", or "" for the list of sections
        self.resolved = False
        self.check: int | None = None  # number of processes
        self.check_files = True
        remaining = list(argv)
        paths = []
        while remaining:
            argument = remaining.pop(0)
            name, equals, value = argument.removeprefix("--").partition("=")
            if argument in ("-h", "--help"):
                has_topic = remaining and not remaining[0].startswith("-") and not remaining[0].endswith(".toml")
                self.help = remaining.pop(0) if has_topic else ""
            elif argument == "--resolved":
                self.resolved = True
            elif not argument.startswith("-"):
                paths.append(argument)
            elif not argument.startswith("--") or not name:
                raise UserError(
                    f"{shown(argument)}: an option starts with two dashes and names a key: --training.steps=100"
                )
            elif not equals and (not remaining or remaining[0].startswith("--")):
                if "." not in name and name not in OPTIONS:
                    self.overrides[name] = ""  # reported as an unknown option, which is not to be given a value
                    continue
                raise UserError(f"{shown(argument)} needs a value: {shown(argument)}=...")
            else:
                value = value if equals else remaining.pop(0)
                name = name if "." in name else name.replace("__", ".")
                if name in ("check", "preflight"):
                    self.check, self.check_files = parse_int(value), name == "preflight"
                    if not self.check or not 1 <= self.check <= environment.MAX_PROCESSES:
                        raise UserError(f"--{name} {shown(value)}: give a number of processes, such as --{name} 8")
                elif name == "recipe":  # launchers such as SageMaker's pass no positional arguments
                    if not recipe_path(value).suffix == ".toml":
                        raise UserError(f"--recipe {shown(value)}: give a TOML file, or name a program with --program")
                    paths.append(value)
                elif name != OBJECTIVE and not name.startswith("sagemaker_"):
                    self.overrides.pop(name, None)  # the order of the options matters
                    self.overrides[name] = value
        if len(paths) > 1 and not many:
            raise UserError(
                f"{shown(' '.join(paths))}: give one recipe (`titanlike train` trains several in order); an override is "
                "written --section.key=value"
            )
        if unprintable := [path for path in paths if not (path and path.isprintable())]:
            raise UserError(
                f"{unprintable[0]!r} is not the name of a recipe: it is empty or contains control characters"
            )
        if paths:
            self.recipes = [recipe_path(path) for path in paths]
            self.recipe = self.recipes[0]


@command_line()
def start(recipe_type: type[R], argv: Sequence[str] | None = None) -> R:
    """Returns the checked recipe of a command line.

    Exits after `--help`, `--resolved` and `--check`, and prints a user's mistake without a stack trace.
    """
    system.exit_on_interrupt()
    environment.terminate_with_launcher()
    try:
        ranks = environment.rank_info()
        arguments = Arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help is not None:
            print(help_text(recipe_type, arguments.help))
            sys.exit(0)
        if arguments.overrides:
            refuse_unknown_options(recipe_type, arguments.overrides)
        program = Path(sys.argv[0]).resolve()
        if arguments.check_files and not arguments.resolved:
            _check_program(program, arguments)  # another one may have other keys
        overrides, defaults = arguments.overrides, dict[str, Any]()
        if job := sagemaker_job():
            overrides = job.data_paths(read(arguments.recipe)[0].get("data"), overrides) | overrides
            defaults = job.defaults(name_of(arguments.recipe.stem))
        ignored: list[str] = []
        recipe = load(recipe_type, arguments.recipe, overrides, defaults, on_ignored=ignored.append)
        if arguments.resolved:
            print(to_toml(recipe), end="")
            sys.exit(0)
        if ranks.is_elastic:
            from titanlike.run.spares import without_spares  # imports torch

            ranks = without_spares(recipe, ranks)
        check_recipe(recipe, arguments.check or ranks.world_size)
        texts = []
        if arguments.check and not arguments.check_files:
            texts = call_hooks("checked", may_refuse=True, recipe=recipe, num_processes=arguments.check)
        if arguments.check_files:
            check_machine(recipe, arguments.check or ranks.world_size, ranks.local_world_size)
        if ranks.started_by_launcher:
            environment.check_rank_variables()
        if job:
            job.check_checkpoints(recipe.run, recipe.checkpoint, ranks)
        run = select_run_dir(recipe.run, arguments, ranks)
    except UserError as error:
        environment.fail(error)
    except OSError as error:  # such as a directory that this user may not search
        exit_if_output_failed(error)
        if error.filename is None:
            raise
        environment.fail(
            UserError(f"{error.filename}: {error.strerror}; choose another path, or change its permissions")
        )
    if ranks.rank == 0:
        traces = _missing_traces(recipe, arguments.check or ranks.world_size)
        ignored += _ignored_program(program, arguments.recipe)
        for warning in (*ignored, *_rounded_steps(recipe), *traces, *_other_tokenizer(recipe)):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    if arguments.check:
        processes = f"{arguments.check} process{'es' if arguments.check > 1 else ''}"
        print(f"{arguments.recipe}: valid for {processes} (data files not checked)")
        for text in texts:
            print(text)
        sys.exit(0)
    recipe = replace(recipe, run=run)
    if ranks.restart_count:  # the first start has applied it, and a restart resumes from the newest checkpoint
        recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=0))
    system.set_variables(system.wait_policy())  # read when torch is imported
    if recipe.profiling.steps:
        system.set_variables({"KINETO_LOG_LEVEL": "99"})  # the profiler would print lines; read when torch is imported
    if recipe.run.allows_cuda:
        system.reduce_fragmentation()
    if recipe.compile.mode != "none" and recipe.run.device != "cuda":
        system.set_variables(system.skip_isa_checks())
    if ranks.rank == 0:
        others = f" and joining {ranks.world_size} processes" if ranks.world_size > 1 else ""
        LiveLine().print(
            f"run     {Path(run.dir, run.name)}\n"
            f"program {_from_here(program)}, recipe {_from_here(arguments.recipe)}\n"
            f"start   importing torch{others}"  # which takes seconds
        )
    if program.parent != PROGRAMS and program.suffix == ".py":
        recipe = replace(recipe, program=str(program))  # the resolved recipe is in another directory
    return recipe


def select_run_dir(run: RunSection, arguments: Arguments, ranks: environment.RankInfo) -> RunSection:
    """Sets the run directory: the one that contains a resolved recipe, the one that is named, or a new one."""
    directory = arguments.recipe.parent
    if (directory / "environment.json").exists() and not {"run.name", "run.dir"} & arguments.overrides.keys():
        directory = directory.absolute()
        try:
            return replace(run, dir=os.path.relpath(directory.parent), name=directory.name)
        except ValidationError:
            raise UserError(
                f"{directory}: the name of a run directory has letters, digits and . _ + = @ - only, and does not begin with a "
                f"point, and its path at most {MAX_PATH} bytes; rename the directory, or give --run.name to start a new run"
            ) from None
    if run.name:
        return run
    if ranks.is_elastic:
        raise UserError(
            "a job whose number of nodes may change needs a name, by which nodes that join find its run; give --run.name"
        )
    if ranks.max_restarts and ranks.launch_id is None:
        raise UserError(
            f"torchrun may restart this job (--max-restarts={ranks.max_restarts}), and every restart would create a new run; "
            f"give --run.name so that a restart resumes the run, or use MAX_RESTARTS and {train_command()}"
        )
    return replace(run, name=f"{name_of(arguments.recipe.stem)}-{ranks.launch_id or environment.new_launch_id()}")


def name_of(text: str) -> str:
    """Returns a name for a run directory that is like the text: without spaces, brackets and points at the start, for example."""
    name = "".join(character if character.isalpha() or character in "0123456789_.+=@-" else "_" for character in text)
    name = name.encode()[:MAX_DERIVED_NAME].decode(errors="ignore")
    return f"_{name[1:]}" if name.startswith(".") else name


def shutdown_timeout_of(arguments: Arguments) -> int:
    """Reads `run.shutdown_timeout` of a checked recipe, which may have sections that only its program defines."""
    values, _ = read(arguments.recipe)
    override = arguments.overrides.get("run.shutdown_timeout")
    if override:
        return int(parse_value(override))
    return int(values.get("run", {}).get("shutdown_timeout", RunSection().shutdown_timeout))


def program_of(recipe: Path, override: str | None = None) -> Path:
    """Returns the program of a recipe: the one that it names, or `override`, whose path is relative to the working directory."""
    values, origins = read(recipe)
    if "recipe" in values:
        old = show_value(values["recipe"])
        remedy = REMOVED["recipe"].format(value=old)
        raise UserError(f"{origins.get('recipe', recipe)}: recipe = {old}: unknown key; {remedy}")
    name = values.get("program", "pretrain") if override is None else override
    origin = origins.get("program", str(recipe)) if override is None else "command line"
    if not isinstance(name, str):
        raise UserError(f"{origin}: program = {show_value(name)} must be the name of a program, as text")
    file = name if name.endswith(".py") else f"{name}.py"
    beside_recipe = Path(origins.get("program", recipe) if override is None else recipe).parent / file
    named = Path(file) if override is not None and "/" in file else beside_recipe
    # Without a name the program is the shipped one, even if a file of that name is beside the recipe.
    is_named = override is not None or "program" in values
    for program in ([named] if is_named else []) + [PROGRAMS / file]:
        if program.is_file():
            return program
    shipped = sorted(program.stem for program in PROGRAMS.glob("*.py"))
    raise UserError(
        f"{origin}: program = '{shown(name)}': there is no program '{shown(named.name)}' in {named.parent}, and the shipped ones "
        f"are {', '.join(shipped)}; the file of a recipe ends in .toml"
    )


def _check_program(program: Path, arguments: Arguments) -> None:
    """Raises `UserError` if another program than the running one is named, by the command line or the recipe."""
    override = arguments.overrides.get("program")
    names_recipe = bool(arguments.recipes) or program.parent == PROGRAMS
    is_named = override is not None or (names_recipe and "program" in read(arguments.recipe)[0])
    if program.suffix != ".py" or not is_named:
        return
    named = program_of(arguments.recipe, override).resolve()
    if named != program:
        folders = (PROGRAMS, arguments.recipe.parent.resolve())
        name = program.stem if program.parent in folders else program
        raise UserError(
            f"{_from_here(program)} is running, but the program of {_from_here(arguments.recipe)} is {_from_here(named)}; set "
            f'program = "{name}" in the recipe, or start it with {train_command()}, which runs the program that it names'
        )


def _ignored_program(program: Path, recipe: Path) -> Iterator[str]:
    """Yields a warning about a program beside the recipe that has the recipe's name and is not the running one."""
    beside = recipe.with_suffix(".py")
    if beside.is_file() and beside.resolve() != program:
        yield (
            f"{_from_here(beside)} is not used: the program of {_from_here(recipe)} is {_from_here(program)}; to use it, set "
            f'program = "{beside.stem}" in the recipe'
        )


def _missing_traces(recipe: PretrainRecipe, num_processes: int) -> Iterator[str]:
    """Yields a warning for the steps and the ranks of `[profiling]` that the run does not have, beside others that it has."""
    for key, values, end in (
        ("steps", recipe.profiling.steps, recipe.training.steps + 1),
        ("ranks", recipe.profiling.ranks, num_processes),
    ):
        if missing := [value for value in values if value >= end]:
            yield f"profiling.{key}: the run does not have {', '.join(map(str, missing))}, but {key} up to {end - 1}"


def _other_tokenizer(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a warning if the run starts from the weights of a Hugging Face folder with another tokenizer."""
    initial, encoding = recipe.checkpoint.initial, recipe.tokenizer.encoding
    if not Path(initial, "tokenizer.json").is_file() or initial == encoding:
        return
    from titanlike.data.tokens.tokenizer import build_tokenizer  # slow to import

    with suppress(UserError):  # reported where the tokenizer is used
        tokenizer, other = (build_tokenizer(replace(recipe.tokenizer, encoding=name)) for name in (encoding, initial))
        if difference := tokenizer.difference(other):
            yield (
                f"tokenizer.encoding = {encoding!r} is not the tokenizer in checkpoint.initial = {initial!r}: {difference}; its "
                f"weights know other tokens; set tokenizer.encoding = {initial!r}"
            )


def _rounded_steps(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a warning if the optimizer's steps are rounded away."""
    optimizer = recipe.optimizer
    rounds = recipe.training.master_dtype == "bfloat16" and recipe.trains_all_weights  # LoRA's matrices begin near 0
    if rounds and isinstance(optimizer, Optimizer) and not optimizer.stochastic_rounding:
        has_muon = any(group.optimizer == "muon" for group in optimizer.groups)  # it rounds to nearest only
        yield (
            f"training.master_dtype = 'bfloat16' without optimizer.stochastic_rounding: steps of optimizer.lr = {optimizer.lr:g} "
            f"do not move weights above {256 * optimizer.lr:.2g}, because they are rounded away (weights of norms are near 1); set "
            f"{'' if has_muon else 'optimizer.stochastic_rounding = true, or '}training.master_dtype = 'float32'"
        )


def _from_here(path: Path) -> str:
    """Returns a path relative to the working directory if it is below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
