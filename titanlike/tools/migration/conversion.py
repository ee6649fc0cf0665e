"""A recipe made from another program's job config, and what became of each of its keys. Converters of a program fill it."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from titanlike.config.base import UserError, nearest, printable, show_value, shown, validate
from titanlike.config.optimizer import Schedule
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.load import dump, effective

T = TypeVar("T")

IDLE = "no effect beside the other keys"
MAX_VALUE = 10**13  # such as samples of a run
MAX_COMPARED = 100_000  # steps of a schedule
WIDTH = 40  # column of the comments beside keys
ORDER = tuple(PretrainRecipe.__dataclass_fields__)


class Key(NamedTuple):
    """What a converter knows of a key of another program."""

    default: Any = None
    """Its value if the file does not set it, which the recipe states as well."""
    ours: str = ""
    """The key of a recipe that means the same. A key without one is converted by a function, or has a reason."""
    reason: str = ""
    """Why a recipe has no such key."""
    changes: bool = False
    """Whether a value other than the default changes results, memory or speed, so that its loss has to be reported."""
    types: tuple[type, ...] = ()
    """Valid types, if the default does not tell them."""
    least: int = 0
    """The smallest valid number. A default of -1, which stands for something else, is valid too."""

    @property
    def valid_types(self) -> tuple[type, ...]:
        """The types of valid values. Empty if any is valid."""
        return self.types or ((type(self.default),) if self.default is not None else ())

    def accepts(self, value: Any) -> bool:
        """Whether a value has the type of this key."""
        types = self.valid_types
        if isinstance(value, bool):
            return not types or bool in types
        return not types or isinstance(value, (*types, int) if float in types else types)


def without_effect(names: Mapping[str, str]) -> dict[str, Key]:
    """Returns keys that a recipe has no need of, from their names by reason."""
    return {name: Key(reason=reason) for reason, group in names.items() for name in group.split()}


class NotMapped(NamedTuple):
    """A key of the file without a counterpart."""

    key: str
    value: Any
    reason: str
    changes: bool


@dataclass
class Conversion:
    """A recipe made from another program's job config."""

    program: str
    """Name and version of the other program."""
    source: str
    """Name of its file."""
    given: Mapping[str, Any]
    """The keys that the file sets, and their values."""
    keys: Mapping[str, Key]
    """What is known of the program's keys."""
    num_gpus: int | None = None
    is_job: bool = True
    """Whether the file describes a training run, and not a model only."""
    batch_grows: bool = False
    """Whether the other program's batch is proportional to the number of GPUs."""
    planned_as: str = ""
    """The program of `titanlike plan --program` that this one is."""
    plan_changes: dict[str, Any] = field(default_factory=dict)
    """What this job has otherwise than `planned_as` usually has."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the file calls some of `keys`, if otherwise."""
    tables: dict[str, Any] = field(default_factory=dict)
    """The recipe."""
    comments: dict[str, str] = field(default_factory=dict)
    mapped: dict[str, list[str]] = field(default_factory=dict)
    """Keys of the file, and the keys of the recipe that follow from each."""
    not_mapped: dict[str, NotMapped] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    """What the other program does otherwise whatever its keys say."""

    def __getitem__(self, key: str) -> Any:
        """The value of a key, or its default. A key that is read counts as mapped. Raises `UserError` for one of another type or
        out of range."""
        known = self.keys[key]
        if key not in self.given:
            return known.default
        value, name = self.given[key], f"{self.source}: {shown(self.name(key))} = {show_value(self.given[key])}"
        if not known.accepts(value):
            raise UserError(f"{name} must be of type {' or '.join(one.__name__ for one in known.valid_types)}")
        is_number = isinstance(value, int | float) and value != known.default
        if is_number and not known.least <= value <= MAX_VALUE:
            raise UserError(f"{name} must be a number from {known.least} to {MAX_VALUE:,}")
        if key not in self.not_mapped:
            self.mapped.setdefault(key, [])
        return value

    def name(self, key: str) -> str:
        """Returns what the file calls a key."""
        return self.names.get(key, key)

    def checked(self, type_: type[T], fields: Mapping[str, Any]) -> T:
        """Returns a section with these fields. Raises `UserError` if the values of the file are not valid for it."""
        try:
            return validate(type_, fields)
        except ValueError as error:
            raise UserError(f"{self.source}: [{type_.__name__}] of the recipe: {error}") from None

    def set(self, ours: str, value: Any, *keys: str, comment: str = "") -> None:
        """Sets a key of the recipe, which follows from these keys of the file or, if it sets none of them, their defaults."""
        section, name = ours.split(".")
        self.tables.setdefault(section, {})[name] = value
        for key in keys:
            if key in self.given and key not in self.not_mapped:
                self.mapped.setdefault(key, []).append(ours)
        # Keys of a file have dots, options of a command line do not.
        set_by = [self.name(key) for key in keys if key in self.given]
        origin = ", ".join(dict.fromkeys(set_by or map(self.name, keys[:1]))) + (
            "" if set_by or not keys else f", {self.program.split()[0]}'s default"
        )
        self.comments[ours] = "; ".join(filter(None, (origin, comment)))

    def leave(self, key: str, reason: str, *, changes: bool = True) -> None:
        """Notes that a key of the file has no counterpart."""
        if key in self.given:
            self.mapped.pop(key, None)
            self.not_mapped[key] = NotMapped(self.name(key), self.given[key], reason, changes)

    def lack(self, key: str, reason: str) -> None:
        """Notes that the value of a key has no counterpart, even if the file leaves it to its default."""
        if key in self.given:
            self.leave(key, reason)
        else:
            self.differ(f"{self.name(key)} = {show_value(self.keys[key].default)}, its default: {reason}")

    def differ(self, text: str) -> None:
        """Notes what the other program does otherwise."""
        self.differences.append(text)

    def compare_schedule(self, section: Schedule, num_steps: int, theirs: Callable[[int], float], why: str) -> None:
        """Notes how far the recipe's learning rate is from the other program's, both as fractions of the peak, at most."""
        from titanlike.optim.schedule import learning_rate  # imports torch

        steps = range(1, num_steps + 1, -(-num_steps // MAX_COMPARED))
        difference, step = max(
            (abs(learning_rate(step, num_steps, 1.0, section) - theirs(step)), step) for step in steps
        )
        if difference > 0:
            self.differ(
                f"learning rate: {why}; the largest difference is {difference:.2%} of the peak, at step {step:,}"
            )

    def finish(self) -> None:
        """Maps the keys that have one counterpart, and accounts for every key of the file."""
        for key, known in self.keys.items():
            if known.ours and not self.mapped.get(key) and key not in self.not_mapped:
                value = self[key]
                if value is not None:
                    self.set(known.ours, value, key)
            elif known.reason and key in self.given:
                changes = known.changes and self[key] != known.default
                self.leave(key, known.reason, changes=changes)
        for key in self.given:
            if key not in self.keys:
                near = nearest(key, list(self.keys), cutoff=0.8)
                meant = f"; did you mean {near}?" if near else ""
                self.leave(key, f"unknown to {self.program}{meant}")
            elif key not in self.mapped and key not in self.not_mapped:
                self.leave(key, IDLE, changes=False)
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Removes the keys that have no effect beside the others, as checkpoint keys in a job that saves none."""
        try:
            kept = effective(PretrainRecipe, self.tables)
        except ValidationError:  # explained where the recipe is loaded
            return
        for section, table in self.tables.items():
            for ours in [f"{section}.{name}" for name in table if name not in kept[section]]:
                for key in [key for key, targets in self.mapped.items() if targets == [ours]]:
                    self.leave(key, IDLE, changes=False)
        self.tables = kept

    def load(
        self, overrides: Mapping[str, str] | None = None, on_ignored: Callable[[str], None] = lambda line: None
    ) -> PretrainRecipe:
        """Loads the recipe."""
        name = Path(f"the recipe of {self.source}")
        return load(PretrainRecipe, name, overrides, on_ignored=on_ignored, given=deepcopy(self.tables))

    def text(self) -> str:
        """Returns the recipe as TOML, with what became of each key in comments."""
        processes = f", for {self.num_gpus} {'process' if self.num_gpus == 1 else 'processes'}" if self.num_gpus else ""
        lines = [f"# Converted from {shown(self.source)}, of {self.program}{processes}."]
        groups = (
            ("Not mapped, and of effect:", [one for one in self.not_mapped.values() if one.changes]),
            ("Not mapped, without effect on training:", [one for one in self.not_mapped.values() if not one.changes]),
        )
        for title, rows in groups:
            lines += ["#", f"# {title}"] if rows else []
            lines += [f"#   {shown(row.key)} = {show_value(row.value)}: {row.reason}" for row in rows]
        if self.differences:
            lines += ["#", "# Notes:"]
            lines += [f"#   {text}" for text in self.differences]
        section = ""
        for line in dump({name: self.tables[name] for name in ORDER if name in self.tables}).splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            comment = self.comments.get(f"{section}.{line.partition(' = ')[0]}", "")
            lines.append(f"{line.ljust(WIDTH)} # {comment}" if comment else line)
        # Names in comments come from the file.
        return "\n".join(map(printable, lines)) + "\n"

    def summary(self) -> list[str]:
        """Returns lines that say what was mapped and, of what was not, what has an effect."""
        effects = [one for one in self.not_mapped.values() if one.changes]
        quiet = len(self.not_mapped) - len(effects)
        counts = f"{len(self.mapped)} keys mapped, {len(effects)} not mapped and of effect, {quiet} without effect"
        return [
            *([f"{self.program}: {counts}"] if self.given else []),
            *(f"  not mapped: {shown(one.key)} = {show_value(one.value)}: {one.reason}" for one in effects),
            *(f"  note: {text}" for text in self.differences),
        ]
