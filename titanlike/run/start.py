"""Start of every program in `recipes/`: parses the command line, and loads and checks the recipe.

Runs before torch is imported, so that a mistake in a recipe is reported within a second and not after the start of a job.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from titanlike.config import PretrainRecipe, UserError, load, to_toml
from titanlike.config.load import nearest, parse_value, read
from titanlike.config.schema import describe, help_text
from titanlike.config.sections import Run
from titanlike.distributed import environment
from titanlike.run.preflight import check_machine, check_recipe
from titanlike.utils import system
from titanlike.utils.live_line import LiveLine

R = TypeVar("R", bound=PretrainRecipe)

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_RECIPE = REPOSITORY / "train_configs" / "debug.toml"

USAGE = """\
usage: ./run_train.sh [RECIPE.toml] [--section.key=value ...]
       ./run_train.sh RECIPE.toml --check N     check the recipe for N processes on any machine; starts nothing
       ./run_train.sh RECIPE.toml --resolved    print the resolved recipe with every key
       ./run_train.sh --help                    print this text: every key, its type, its default and its purpose

The default recipe is train_configs/debug.toml. NPROC=n sets the number of processes on this machine (default: one per GPU, or
one). MAX_RESTARTS=n restarts all processes after a failure, at most n times, from the newest checkpoint. Keys on the command
line override those of the recipe, which override those of a recipe that it extends."""


class Arguments:
    """A parsed command line."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.recipe = DEFAULT_RECIPE
        self.overrides: dict[str, str] = {}
        self.help = False
        self.resolved = False
        self.check: int | None = None  # number of processes
        self.check_files = True
        remaining = list(argv)
        paths = []
        while remaining:
            argument = remaining.pop(0)
            name, equals, value = argument.removeprefix("--").partition("=")
            if argument in ("-h", "--help"):
                self.help = True
            elif argument == "--resolved":
                self.resolved = True
            elif not argument.startswith("-"):
                paths.append(argument)
            elif not argument.startswith("--") or not name:
                raise UserError(f"{argument}: an option starts with two dashes and names a key: --training.steps=100")
            elif not equals and (not remaining or remaining[0].startswith("--")):
                raise UserError(f"{argument} needs a value: {argument}=...")
            else:
                value = value if equals else remaining.pop(0)
                if name in ("check", "preflight"):
                    if not value.isdigit() or int(value) < 1:
                        raise UserError(f"--{name} {value}: give a number of processes, such as --{name} 8")
                    self.check, self.check_files = int(value), name == "preflight"
                elif any("\ud800" <= character <= "\udfff" for character in value):  # undecodable bytes
                    raise UserError(f"--{name}: {value!r} is not text in this terminal's encoding")
                else:
                    self.overrides[name] = value
        if len(paths) > 1:
            raise UserError(f"{' '.join(paths)}: give one recipe; an override is written --section.key=value")
        if paths:
            self.recipe = Path(paths[0])


def start(recipe_type: type[R], argv: Sequence[str] | None = None) -> R:
    """Returns the checked recipe of a command line.

    Exits after `--help`, `--resolved` and `--check`, and prints a user's mistake without a stack trace.
    """
    system.exit_on_interrupt()
    environment.terminate_with_launcher()
    output = LiveLine()
    try:
        ranks = environment.rank_info()
        arguments = Arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help or arguments.resolved:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a stack trace
        if arguments.help:
            output.print(help_text(recipe_type, USAGE))
            sys.exit(0)
        _refuse_unknown_options(recipe_type, arguments)
        recipe = load(recipe_type, arguments.recipe, arguments.overrides)
        if arguments.resolved:
            output.print(to_toml(recipe).removesuffix("\n"))
            sys.exit(0)
        check_recipe(recipe, arguments.check or ranks.world_size)
        if arguments.check_files:
            check_machine(recipe)
        run = _select_run_dir(recipe.run, arguments, ranks)
    except UserError as error:
        environment.fail(error)
    if arguments.check:
        processes = f"{arguments.check} process{'es' if arguments.check > 1 else ''}"
        output.print(f"{arguments.recipe}: valid for {processes} (data files not checked)")
        sys.exit(0)
    recipe = replace(recipe, run=run)
    if ranks.restart_count:  # the first start has applied it, and a restart resumes from the newest checkpoint
        recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=0))
    if recipe.compile.cache:  # read when torch is imported
        system.set_variables({"TORCHINDUCTOR_CACHE_DIR": str(Path(recipe.compile.cache).absolute())})
    if recipe.compile.mode != "none" and recipe.run.device != "cuda":
        system.set_variables(system.skip_isa_checks())
    if ranks.rank == 0:
        output.print(f"run     {Path(run.dir, run.name)}")  # visible during the slow import of torch
    program = Path(sys.argv[0]).resolve()
    if program.parent != REPOSITORY / "recipes" and program.suffix == ".py":
        recipe = replace(recipe, recipe=str(program))  # the resolved recipe is in another directory
    return recipe


def _select_run_dir(run: Run, arguments: Arguments, ranks: environment.RankInfo) -> Run:
    """Sets the run directory: the one that contains a resolved recipe, the one that is named, or a new one."""
    directory = arguments.recipe.parent
    if (directory / "environment.json").exists() and not {"run.name", "run.dir"} & arguments.overrides.keys():
        directory = directory.absolute()
        return replace(run, dir=os.path.relpath(directory.parent), name=directory.name)
    if run.name:
        return run
    if ranks.max_restarts and ranks.launch_id is None:
        raise UserError(
            f"torchrun may restart this job (--max-restarts={ranks.max_restarts}), and every restart would create a new run; "
            "give --run.name so that a restart resumes the run, or use MAX_RESTARTS and ./run_train.sh"
        )
    return replace(run, name=f"{arguments.recipe.stem}-{ranks.launch_id or environment.new_launch_id()}")


def shutdown_timeout_of(arguments: Arguments) -> int:
    """Reads `run.shutdown_timeout` of a checked recipe, which may have sections that only its program defines."""
    values, _ = read(arguments.recipe)
    override = arguments.overrides.get("run.shutdown_timeout")
    if override:
        return int(parse_value(override))
    return int(values.get("run", {}).get("shutdown_timeout", Run().shutdown_timeout))


def program_of(recipe: Path, override: str | None = None) -> Path:
    """Returns the program of a recipe: `override`, or the one that the recipe names."""
    values, origins = read(recipe)
    name = override or values.get("recipe", "pretrain")
    if not isinstance(name, str):
        raise UserError(f"{origins['recipe']}: recipe = {name} must be the name of a program, as text")
    file = name if name.endswith(".py") else f"{name}.py"
    beside_recipe = Path(origins.get("recipe", recipe)).parent / file
    # Without a name the program is the shipped one, even if a file of that name is beside the recipe.
    is_named = override is not None or "recipe" in values
    for program in ([beside_recipe] if is_named else []) + [REPOSITORY / "recipes" / file]:
        if program.is_file():
            return program
    shipped = sorted(program.stem for program in (REPOSITORY / "recipes").glob("*.py"))
    raise UserError(
        f"{recipe}: recipe = {name!r}: there is no program {beside_recipe}, and the shipped ones are {', '.join(shipped)}"
    )


def _refuse_unknown_options(recipe_type: type, arguments: Arguments) -> None:
    """Reports options without a dot, and suggests the key that was probably meant."""
    keys = [key.name for key in describe(recipe_type)]
    for name in arguments.overrides:
        keys_of_table = [key for key in keys if key.startswith(f"{name}.")]
        if keys_of_table:
            raise UserError(f"--{name} is a table; name one of its keys, as in --{keys_of_table[0]}=...")
        if "." not in name and name not in keys:
            full_names = {key.rpartition(".")[2]: key for key in keys}
            near = nearest(name.replace("-", "_"), list(full_names))
            suggestion = f"did you mean --{full_names[near]}?" if near else "see --help"
            raise UserError(f"--{name}: unknown option; {suggestion}")
