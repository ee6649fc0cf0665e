"""The sweep file: its keys, and the checks of its search space before the first trial. Does not import torch or Optuna."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titanlike.config import UserError
from titanlike.config.base import FilePath, Name, NonNegative, Positive, nearest, section, show_value, shown
from titanlike.config.shipped import recipe_path
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.load import COMMAND_LINE, _toml, dump, effective, read, similar_recipe
from titanlike.run.checks import check_machine, check_recipe
from titanlike.run.start import name_of, program_of
from titanlike.tools.programs import SHIPPED, effective_overrides, load_known, run_program
from titanlike.utils.system import visible_gpus

METRICS = ("validation_loss", "loss", "tokens_per_second", "memory_gib")
OWN_KEYS = ("program", "run.name", "run.dir", "checkpoint.dir", "checkpoint.resume_from")  # set by the sweep


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

    backend: Literal["local", "sagemaker"] = "local"
    """`local`: processes on this machine. `sagemaker`: one SageMaker job per trial."""
    gpus_per_trial: NonNegative = 1
    """GPUs of each trial. Without a GPU, trials run on the CPU."""
    processes_per_trial: NonNegative = 0
    """Processes of each trial. 0: one per GPU, or one on a CPU. A SageMaker job always has one per GPU of its instances; then this
    number is the one that the recipe is checked for before the first trial, and 0 omits that check."""
    parallel: NonNegative = 0
    """Trials at a time. 0: as many as there are GPUs for; one on a CPU and with SageMaker."""
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


@section
class Dimension:
    """The values of one key of the recipe: a list, or a range."""

    values: tuple[Any, ...] = ()
    """The values to choose from."""
    low: int | float | None = None
    """Smallest value of the range."""
    high: int | float | None = None
    """Largest value of the range. If both are integers, and the key is not a number with a fraction, so are all values."""
    log: bool = False
    """Samples the logarithm."""
    step: int | float | None = None
    """Distance of two values. Default: 1 for integers, and any number between `low` and `high` otherwise."""

    def problem(self) -> str:
        """Returns what is wrong with the keys together, or an empty string."""
        low, high, step = self.low, self.high, self.step
        if self.values:
            others = [name for name in ("high", "log", "low", "step") if getattr(self, name) not in (None, False)]
            if others:
                return f"values excludes {', '.join(others)}; use one of them"
            twice = len(set(map(as_text, self.values))) < len(self.values)
            return f"values = {show_value(self.values)} has a value twice; remove one" if twice else ""
        if low is None or high is None:
            return f"{'low' if low is None else 'high'} is missing; give low and high, or values = [...]"
        if low > high:
            return f"low = {low} is above high = {high}; exchange them"
        if self.log and low <= 0:
            return f"log = true requires low > 0, got {low}"
        if step is not None and (self.log or step <= 0):
            return f"step = {step} must be positive, and excludes log = true; change one of them"
        return ""

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
    dimensions: Mapping[str, Dimension]  # by key
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

    def definition(self) -> dict[str, Any]:
        """Returns everything that the results of the trials depend on."""
        values: dict[str, Any] = {
            key: getattr(self.sweep, key) for key in ("metric", "direction", "seed", "startup_trials")
        }
        values["pruning"] = asdict(self.sweep.pruning)
        values["search"] = {key: asdict(dimension) for key, dimension in self.dimensions.items()}
        values["recipe"] = read(self.recipe)[0]
        return json.loads(json.dumps(values, default=str))

    def num_processes(self) -> int:
        """Returns the number of processes of a trial on this machine."""
        resources = self.sweep.resources
        return resources.processes_per_trial or (max(1, resources.gpus_per_trial) if visible_gpus() else 1)


def load_sweep(file: Path, overrides: Mapping[str, str]) -> SweepPlan:
    """Loads a sweep file and checks every key and every extreme of its search space. Raises `UserError`."""
    if not file.exists():
        raise UserError(f"{file}: sweep file not found; give a TOML file with a recipe and what to search over")
    sweep = load(Sweep, file, overrides)
    if not sweep.recipe:
        raise UserError(f'{file}: recipe is missing; name the recipe of the trials, as in recipe = "debug.toml"')
    recipe = file.parent / recipe_path(sweep.recipe)
    if not recipe.is_file():
        raise UserError(
            f"{file}: recipe = {show_value(sweep.recipe)}: file {shown(str(recipe))} not found; {similar_recipe(recipe)}"
        )
    sweep = replace(sweep, name=sweep.name or name_of(file.stem))
    dimensions = {key: _dimension(file, key, table) for key, table in _tables(sweep.search)}
    if not dimensions:
        raise UserError(f'{file}: there is nothing to search over; add a table such as [search."optimizer.lr"]')
    plan = SweepPlan(sweep, file, recipe, dimensions, load_known(recipe, {}))
    if problems := [*_metric_problems(plan), *_space_problems(plan)]:
        raise UserError("\n".join(dict.fromkeys(problems)))
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
    dimension = load(Dimension, Path(where), given=table)
    if problem := dimension.problem():
        raise UserError(f"{where}: {problem}")
    return dimension


def _metric_problems(plan: SweepPlan) -> Iterator[str]:
    file, recipe, metric = plan.file, plan.known, plan.sweep.metric
    if metric not in METRICS and not metric.startswith("evaluation/"):
        near = nearest(metric, METRICS)
        hint = f"did you mean {near}? " if near else ""
        yield f"{file}: metric = {show_value(metric)}: no such metric; {hint}choose from {', '.join(METRICS)}, evaluation/NAME/..."
    section = "validation" if metric == "validation_loss" else metric.partition("/")[0]
    if section in ("validation", "evaluation") and not getattr(recipe, section).interval:
        yield f"{file}: metric = {show_value(metric)}, but the recipe has {section}.interval = 0; set it to a number of steps"


def _space_problems(plan: SweepPlan) -> Iterator[str]:
    """Checks the recipe with each extreme of each key, beside the first one of the others. Yields the first problem of each key."""
    first = {key: dimension.extremes()[0] for key, dimension in plan.dimensions.items()}
    for searched, dimension in plan.dimensions.items():
        for value in dimension.extremes():
            setting = first | {searched: value}
            if problem := _problem(plan, setting):
                text = ", ".join(f"{key} = {shown(value)}" for key, value in setting.items() if key in problem)
                yield f"{plan.file}: search: " + (problem if problem.startswith(text) else f"{text}: {problem}")
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
