"""The front door of every program in `recipes/`: read the command line, load the recipe, refuse it in one sentence.

Called before torch is imported, so that a wrong recipe costs a moment and not the start of a job.
"""

import os
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

R = TypeVar("R", bound=PretrainRecipe)

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_RECIPE = REPOSITORY / "train_configs" / "debug.toml"

USAGE = """\
usage: ./run_train.sh [RECIPE.toml] [--section.key=value ...]
       ./run_train.sh RECIPE.toml --check N     is this recipe right for N processes, anywhere? starts nothing
       ./run_train.sh RECIPE.toml --resolved    the whole recipe, every key written out
       ./run_train.sh --help                    this text: every key, its kind, its default and the reason for it

Without a recipe it trains train_configs/debug.toml. NPROC=n sets the number of processes on this machine; by default it is
one for each GPU, or one. MAX_RESTARTS=n starts all of them again when one dies, n times at most, and the run goes on from its
newest checkpoint. Keys on the command line win over the recipe's, which win over those of a recipe it extends."""


class Arguments:
    """A command line taken apart: the recipe, the overrides, and what is asked of it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.recipe = DEFAULT_RECIPE
        self.overrides: dict[str, str] = {}
        self.help = False
        self.resolved = False
        self.check: int | None = None  # for so many processes
        self.here = True  # and with the files of this machine
        words = list(argv)
        paths = []
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if word in ("-h", "--help"):
                self.help = True
            elif word == "--resolved":
                self.resolved = True
            elif not word.startswith("-"):
                paths.append(word)
            elif not word.startswith("--") or not name:
                raise UserError(f"{word}: an option starts with two dashes and names a key: --training.steps=100")
            elif not equals and (not words or words[0].startswith("--")):
                raise UserError(f"{word} needs a value: {word}=...")
            else:
                value = value if equals else words.pop(0)
                if name in ("check", "preflight"):
                    if not value.isdigit() or int(value) < 1:
                        raise UserError(f"--{name} {value}: give a number of processes, such as --{name} 8")
                    self.check, self.here = int(value), name == "preflight"
                elif any("\ud800" <= character <= "\udfff" for character in value):  # bytes that were not UTF-8
                    raise UserError(f"--{name}: {value!r} is not text in this terminal's encoding")
                else:
                    self.overrides[name] = value
        if len(paths) > 1:
            raise UserError(f"{' '.join(paths)}: one recipe at a time; an override is written --section.key=value")
        if paths:
            self.recipe = Path(paths[0])


def start(recipe_type: type[R], argv: Sequence[str] | None = None) -> R:
    """The checked recipe of this command line. Ends the process after `--help`, after `--check`, and on a user's mistake."""
    system.exit_on_interrupt()
    environment.terminate_with_launcher()
    try:
        ranks = environment.ranks()
        arguments = Arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help:
            print(help_text(recipe_type, USAGE))
            sys.exit(0)
        _refuse_unknown_options(recipe_type, arguments)
        recipe = load(recipe_type, arguments.recipe, arguments.overrides)
        if arguments.resolved:
            print(to_toml(recipe), end="")
            sys.exit(0)
        check_recipe(recipe, arguments.check or ranks.world_size)
        if arguments.here:
            check_machine(recipe)
        placed = _place(recipe.run, arguments)
    except UserError as error:
        environment.fail(error)
    if arguments.check:
        print(f"{arguments.recipe}: nothing speaks against {arguments.check} processes; its files are not looked for")
        sys.exit(0)
    recipe = replace(recipe, run=placed)
    if environment.restarts().count:  # the first start has gone back to that step
        recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=0))
    if recipe.compile.cache:  # torch looks when it is imported
        system.set_variables({"TORCHINDUCTOR_CACHE_DIR": str(Path(recipe.compile.cache).absolute())})
    if recipe.compile.mode != "none" and recipe.run.device != "cuda":
        system.set_variables(system.skip_isa_checks())
    if ranks.rank == 0:
        print(f"run     {Path(placed.dir, placed.name)}", flush=True)  # on the screen while torch is imported
    program = Path(sys.argv[0]).resolve()
    if program.parent != REPOSITORY / "recipes" and program.suffix == ".py":
        recipe = replace(recipe, recipe=str(program))  # so that the resolved recipe finds its program again
    return recipe


def _place(run: Run, arguments: Arguments) -> Run:
    """The run's folder: the one that a resolved recipe lies in, the one that is named, or a fresh one."""
    folder = arguments.recipe.parent
    if (folder / "environment.json").exists() and not {"run.name", "run.dir"} & arguments.overrides.keys():
        folder = folder.absolute()
        return replace(run, dir=os.path.relpath(folder.parent), name=folder.name)
    if run.name:
        return run
    stamp, limit = environment.launch_id(), environment.restarts().limit
    if limit and stamp is None:
        raise UserError(
            f"torchrun may restart this job (--max-restarts={limit}), and each start would make a run of its own; "
            "give --run.name so that a restart finds the run, or start it with MAX_RESTARTS and ./run_train.sh"
        )
    return replace(run, name=f"{arguments.recipe.stem}-{stamp or environment.new_launch_id()}")


def shutdown_timeout_of(arguments: Arguments) -> int:
    """`run.shutdown_timeout` of a recipe that was checked, without knowing the sections of its program."""
    values, _ = read(arguments.recipe)
    override = arguments.overrides.get("run.shutdown_timeout")
    given = parse_value(override) if override else values.get("run", {}).get("shutdown_timeout", Run().shutdown_timeout)
    return int(given)


def program_of(recipe: Path, override: str | None = None) -> Path:
    """The program that a recipe file names, or the command line in its place."""
    values, origins = read(recipe)
    name = override or values.get("recipe", "pretrain")
    if not isinstance(name, str):
        raise UserError(f"{origins['recipe']}: recipe = {name} must be the name of a program, as text")
    file = name if name.endswith(".py") else f"{name}.py"
    beside = Path(origins.get("recipe", recipe)).parent / file
    # A recipe that names no program means the shipped one, whatever lies beside it.
    named = override is not None or "recipe" in values
    for program in ([beside] if named else []) + [REPOSITORY / "recipes" / file]:
        if program.is_file():
            return program
    shipped = sorted(program.stem for program in (REPOSITORY / "recipes").glob("*.py"))
    raise UserError(
        f"{recipe}: recipe = {name!r}: there is no program {beside}, and the shipped ones are {', '.join(shipped)}"
    )


def _refuse_unknown_options(recipe_type: type, arguments: Arguments) -> None:
    """A word without a dot is not a key of a section: say which one was meant before it is taken for one."""
    keys = [key.name for key in describe(recipe_type)]
    for name in arguments.overrides:
        inside = [key for key in keys if key.startswith(f"{name}.")]
        if inside:
            raise UserError(f"--{name} is a table; name one of its keys, as in --{inside[0]}=...")
        if "." not in name and name not in keys:
            leaves = {key.rpartition(".")[2]: key for key in keys}
            near = nearest(name.replace("-", "_"), list(leaves))
            raise UserError(
                f"--{name}: there is no such option; " + (f"did you mean --{leaves[near]}?" if near else "see --help")
            )
