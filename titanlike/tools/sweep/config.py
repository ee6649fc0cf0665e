"""The sweep file: its keys, and the checks of its search space before the first trial. Does not import torch or Optuna."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titanlike.config import UserError
from titanlike.config.base import (
    FilePath,
    Name,
    NonNegative,
    Positive,
    has_control_characters,
    nearest,
    section,
    show_value,
    shown,
)
from titanlike.config.schema import describe
from titanlike.config.shipped import recipe_path
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.load import COMMAND_LINE, _toml, dump, effective, read, similar_recipe
from titanlike.run.checks import check_machine, check_recipe
from titanlike.run.start import name_of, program_of
from titanlike.tools.programs import SHIPPED, effective_overrides, load_known, recipe_types, run_program
from titanlike.utils.system import visible_gpus

METRICS = ("validation_loss", "loss", "tokens_per_second", "memory_gib")
RANGE_KEYS, VALUE_KEYS = ("low", "high", "log", "step"), ("values",)
OWN_KEYS = ("program", "run.name", "run.dir", "checkpoint.dir", "checkpoint.resume_from")  # set by the sweep
JOB_OF_TRIAL = "titanlike.tools.clusters.sagemaker.trial"


@section
class Pruning:
    """Early stop of trials that are worse than the others."""

    pruner: Literal["median", "none"] = "median"
    """`median` stops a trial whose best value so far is worse than the median of the complete trials at the same step."""
    warmup_steps: NonNegative = 0
    """Steps of a trial during which it is not pruned."""
    startup_trials: Positive = 4
    """Complete trials that the median requires. Fewer prune nothing."""


@section
class Resources:
    """Where trials run, and how many at a time."""

    backend: Literal["local", "sagemaker", "ray"] = "local"
    """`local`: processes on this machine. `sagemaker`: one SageMaker job per trial. `ray`: a Ray cluster."""
    gpus_per_trial: NonNegative = 1
    """GPUs of each trial. Without a GPU, trials run on the CPU."""
    processes_per_trial: NonNegative = 0
    """Processes of each trial. 0: one per GPU, or one on a CPU. A SageMaker job always has one per GPU of its instances; then this
    number is the one that the recipe is checked for before the first trial, and 0 omits that check."""
    parallel: NonNegative = 0
    """Trials at a time. 0: as many as there are GPUs for; one on a CPU, with SageMaker and with Ray."""
    options: tuple[str, ...] = ()
    """Options of `titanlike launch sagemaker` for every job, such as "--nodes=4"."""


@section
class Sweep:
    """A sweep file."""

    name: Name = ""
    """Name of the sweep's directory. The same command resumes the sweep. Default: the name of the sweep file."""
    dir: FilePath = "runs"
    """Directory that contains the sweep's directory, relative to the working directory."""
    recipe: FilePath = ""
    """Recipe of the trials, relative to the sweep file, or the name of a shipped one."""
    trials: Positive = 20
    """Number of trials, with pruned and failed ones. May be increased later."""
    metric: str = "validation_loss"
    """Metric of the runs to optimize, as `metrics.jsonl` names it. The value of a trial is the last one."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Whether smaller or larger values are better."""
    seed: NonNegative = 0
    """Seed of the suggestions."""
    startup_trials: Positive = 10
    """Trials with random values, before TPE suggests values from the results of earlier trials."""
    pruning: Pruning = Pruning()
    resources: Resources = Resources()
    search: dict[str, Any] = field(default_factory=dict)
    """One table for each key of the recipe to search over: `values`, or `low` and `high` with `log` and `step`."""


@dataclass(frozen=True)
class Dimension:
    """The values of one key of the recipe: a list, or a range."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None
    is_integer: bool = False

    def extremes(self) -> tuple[str, ...]:
        """Returns all values of a list, or both ends of a range, as command-line values."""
        return tuple(map(as_text, self.values or dict.fromkeys((self.low, self.high))))

    def describe(self) -> str:
        """Returns the values as text."""
        if self.values:
            return ", ".join(map(as_text, self.values))
        scale = ", logarithmic" if self.log else f", in steps of {self.step}" if self.step else ""
        return f"{self.low} to {self.high}{scale}"


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep."""

    sweep: Sweep
    file: Path
    recipe: Path
    dimensions: tuple[Dimension, ...]
    definition: Mapping[str, Any]  # what makes two sweeps the same
    known: PretrainRecipe  # the sections of the recipe that the shipped recipes have

    @property
    def path(self) -> Path:
        """The sweep's directory."""
        return Path(self.sweep.dir, self.sweep.name)

    def run_path(self, number: int) -> Path:
        """Returns the run directory of a trial."""
        return self.path / self.run_name(number)

    def run_name(self, number: int) -> str:
        """Returns the name of a trial's run."""
        return f"{self.sweep.name}-{number:03}"

    def num_processes(self) -> int:
        """Returns the number of processes of a trial on this machine."""
        resources = self.sweep.resources
        return resources.processes_per_trial or (max(1, resources.gpus_per_trial) if visible_gpus() else 1)


def load_sweep(file: Path, overrides: Mapping[str, str]) -> SweepPlan:
    """Loads a sweep file and checks every key and every extreme of its search space. Raises `UserError`."""
    if not file.exists():
        raise UserError(f"{file}: sweep file not found; give a TOML file with a recipe and what to search over")
    sweep = load(Sweep, file, overrides)
    for key, text in _texts("", asdict(sweep)):
        if has_control_characters(text):  # it becomes part of commands and of best.toml
            raise UserError(f"{file}: {shown(key)} = '{shown(text)}' contains control characters; remove them")
    if not sweep.recipe:
        raise UserError(f'{file}: recipe is missing; name the recipe of the trials, as in recipe = "debug.toml"')
    recipe = file.parent / recipe_path(sweep.recipe)
    if not recipe.is_file():
        raise UserError(
            f"{file}: recipe = {show_value(sweep.recipe)}: file {shown(str(recipe))} not found; {similar_recipe(recipe)}"
        )
    sweep = replace(sweep, name=sweep.name or name_of(file.stem))
    dimensions = tuple(_dimension(file, key, table) for key, table in _tables(sweep.search))
    if not dimensions:
        raise UserError(f'{file}: there is nothing to search over; add a table such as [search."optimizer.lr"]')
    known = load_known(recipe, {})
    problems = [*_metric_problems(file, sweep, known)]
    plan = SweepPlan(
        sweep,
        file,
        recipe,
        dimensions,
        _definition(sweep, recipe, dimensions),
        known,
    )
    if problems := [*problems, *_space_problems(plan)]:
        raise UserError("\n".join(problems))
    return plan


def recipe_text(plan: SweepPlan, values: Mapping[str, Any]) -> str:
    """Returns the recipe and everything it extends as the text of one file, with other values of some keys."""
    program = program_of(plan.recipe)
    merged = read(plan.recipe)[0] | {"program": program.stem if program in SHIPPED else str(program.resolve())}
    for key, value in values.items():
        table, _, leaf = key.rpartition(".")
        (merged.setdefault(table, {}) if table else merged)[leaf] = value
    return dump(effective(SHIPPED[program], merged, values) if program in SHIPPED else merged)


def as_text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    return value if isinstance(value, str) else _toml(value)


def _definition(sweep: Sweep, recipe: Path, dimensions: tuple[Dimension, ...]) -> dict[str, Any]:
    """Returns everything that the results of the trials depend on."""
    values = {name: getattr(sweep, name) for name in ("metric", "direction", "seed", "startup_trials")}
    values["pruning"] = asdict(sweep.pruning)
    values["search"] = [repr(dimension) for dimension in dimensions]
    values["recipe"] = read(recipe)[0]
    return json.loads(json.dumps(values, default=str))


def _tables(search: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each dotted key and its table: [search."optimizer.lr"] and [search.optimizer.lr] are the same."""
    for name, table in search.items():
        key = f"{prefix}{name}"
        if isinstance(table, dict) and table and all(isinstance(value, dict) for value in table.values()):
            yield from _tables(table, f"{key}.")
        else:
            yield key, table


def _dimension(file: Path, key: str, table: Any) -> Dimension:
    where = f'{file}: [search."{shown(key)}"]'
    if key in OWN_KEYS:
        raise UserError(f"{where}: the sweep sets this key for each trial; remove the table")
    if not isinstance(table, dict):
        raise UserError(f"{where} = {show_value(table)} is not a table; give values = [...], or low and high")
    for name in table:
        if name not in RANGE_KEYS + VALUE_KEYS:
            near = nearest(name, RANGE_KEYS + VALUE_KEYS)
            remedy = f"did you mean {near}?" if near else f"the keys are {', '.join(VALUE_KEYS + RANGE_KEYS)}"
            raise UserError(f"{where}: {shown(name)}: unknown key; {remedy}")
    if "values" in table:
        values = table["values"]
        if len(table) > 1:
            raise UserError(f"{where}: values excludes {', '.join(sorted(table.keys() - {'values'}))}; use one of them")
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: values = {show_value(values)} must be a list with at least one value")
        if len({as_text(value) for value in values}) < len(values):
            raise UserError(f"{where}: values = {show_value(values)} has a value twice; remove one")
        return Dimension(key, values=tuple(values))
    low, high, log, step = (table.get(name) for name in RANGE_KEYS)
    for name, number in (("low", low), ("high", high), *([("step", step)] if "step" in table else [])):
        if number is None:
            raise UserError(f"{where}: {name} is missing; give low and high, or values = [...]")
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UserError(f"{where}: {name} = {show_value(number)} must be a finite number")
    if not isinstance(log, bool | None):
        raise UserError(f"{where}: log = {show_value(log)} must be true or false")
    assert low is not None and high is not None
    if low > high:
        raise UserError(f"{where}: low = {low} is above high = {high}; exchange them")
    if log and low <= 0:
        raise UserError(f"{where}: log = true requires low > 0, got {low}")
    if step is not None and (log or step <= 0):
        raise UserError(f"{where}: step = {step} must be positive, and excludes log = true; change one of them")
    keys = (key for recipe_type in recipe_types().values() for key in describe(recipe_type))
    types = {description.name: description.type for description in keys}
    numbers = (low, high, *([] if step is None else [step]))
    is_integer = all(isinstance(number, int) for number in numbers) and not types.get(key, "").startswith("number")
    return Dimension(key, low=low, high=high, log=bool(log), step=step, is_integer=is_integer)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields each text in a section, keys of tables too, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            inner_key = f"{key}.{name}".removeprefix(".")
            yield inner_key, name
            yield from _texts(inner_key, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(key, inner)


def _metric_problems(file: Path, sweep: Sweep, recipe: PretrainRecipe) -> Iterator[str]:
    metric = sweep.metric
    if metric not in METRICS and not metric.startswith("evaluation/"):
        near = nearest(metric, METRICS)
        hint = f"did you mean {near}? " if near else ""
        yield f"{file}: metric = {show_value(metric)}: no such metric; {hint}choose from {', '.join(METRICS)}, evaluation/NAME/..."
    elif metric == "validation_loss" and not recipe.validation.interval:
        yield f"{file}: metric = 'validation_loss', but the recipe has validation.interval = 0; set it to a number of steps"
    elif metric.startswith("evaluation/") and not recipe.evaluation.interval:
        yield f"{file}: metric = {show_value(metric)}, but the recipe has evaluation.interval = 0; set it to a number of steps"


def _space_problems(plan: SweepPlan) -> Iterator[str]:
    """Checks the recipe with each extreme of each key, beside the first one of the others. Yields the first problem of each key."""
    first = {dimension.key: dimension.extremes()[0] for dimension in plan.dimensions}
    found: set[str] = set()
    for dimension in plan.dimensions:
        for value in dimension.extremes():
            setting = first | {dimension.key: value}
            if problem := _problem(plan, setting):
                if problem not in found:
                    text = ", ".join(f"{key} = {shown(value)}" for key, value in setting.items() if key in problem)
                    yield f"{plan.file}: search: " + (problem if problem.startswith(text) else f"{text}: {problem}")
                found.add(problem)
                break


def _problem(plan: SweepPlan, overrides: Mapping[str, str]) -> str:
    """Returns why the recipe is refused with these values, or an empty string."""
    try:
        program, processes = program_of(plan.recipe), plan.num_processes()
        if program in SHIPPED:
            recipe = load(SHIPPED[program], plan.recipe, effective_overrides(plan.recipe, overrides))
            if plan.sweep.resources.backend != "sagemaker" or plan.sweep.resources.processes_per_trial:
                check_recipe(recipe, processes)
            if plan.sweep.resources.backend == "local":
                check_machine(recipe, processes, processes)
        else:
            arguments = [f"--{key}={value}" for key, value in overrides.items()]
            run_program(program, str(plan.recipe), *arguments, f"--check={processes}")
    except UserError as error:
        return "; ".join(line.removeprefix(f"{COMMAND_LINE}: ") for line in str(error).split("\n"))
    return ""
