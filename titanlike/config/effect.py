"""Which keys of a recipe have no effect, by the conditions that their fields state (`OnlyWith`). Does not import torch.

A key that is set without effect is an error (`problems`), unless what disables it was set later: by a recipe that extends the one
that sets the key, or by an option further right on the command line. Such a key gets its default again, with a line that says so
(`drop_overridden`).
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, TypeVar

from titanlike.config.base import OnlyWith, show_value

T = TypeVar("T")
NEVER = -1  # the level of a key that nothing sets


@dataclasses.dataclass(frozen=True)
class Idle:
    """A key that has no effect."""

    section: str
    field: str
    value: Any
    default: Any
    condition: OnlyWith
    others: dict[str, Any]
    """The values of the keys that the condition depends on, by their full names."""

    @property
    def key(self) -> str:
        """The full name of the key."""
        return f"{self.section}.{self.field}"


def problems(recipe: Any) -> Iterator[str]:
    """Yields a sentence for all keys without effect that have one cause."""
    for described, idle in _by_cause(list(idle_keys(recipe))):
        remedies = [*_remedies(recipe, idle[0]), f"remove {'it' if len(idle) == 1 else 'them'}"]
        yield f"{described}; {', or '.join(remedies)}"


def drop_overridden(recipe: T, levels: Mapping[str, int]) -> tuple[T, list[str]]:
    """Returns a recipe without the keys that have no effect because of a later setting, and a sentence for all with one cause.

    Args:
        levels: 0 for keys of a recipe that the file extends, 1 for keys of the file, more for keys of the command line, in its
            order.
    """
    dropped: list[Idle] = []
    given, levels = levels, dict(levels)
    while idle := [each for each in idle_keys(recipe) if _is_overridden(each, levels)]:
        dropped += idle
        for each in idle:  # one at a time: another one may belong to the same section
            section: Any = getattr(recipe, each.section)
            recipe = dataclasses.replace(typing.cast(Any, recipe), **{
                each.section: dataclasses.replace(section, **{each.field: each.default})
            })  # fmt: skip
            levels[each.key] = _level_of_others(each, levels)  # which have set it to its default
    # A field of a model's size has no level: nobody has set it.
    said = [each for each in dropped if each.key in given]
    return recipe, [described for described, _ in _by_cause(said)]


def idle_keys(recipe: Any) -> Iterator[Idle]:
    """Yields the keys of a recipe that are set and have no effect."""
    return (each for each in disabled_keys(recipe) if each.value != each.default)


def disabled_keys(recipe: Any) -> Iterator[Idle]:
    """Yields the keys of a recipe that have no effect, whatever their values."""
    for section in dataclasses.fields(recipe):
        values = getattr(recipe, section.name)
        for name, info in getattr(type(values), "__pydantic_fields__", {}).items():
            for condition in (each for each in info.metadata if isinstance(each, OnlyWith)):
                keys = [key if "." in key else f"{section.name}.{key}" for key in condition.keys]
                found = {key: _value_of(recipe, key) for key in keys}
                if not condition.holds(*found.values()):
                    found.pop(f"{section.name}.{name}", None)
                    default = info.get_default(call_default_factory=True)
                    yield Idle(section.name, name, getattr(values, name), default, condition, found)


def _value_of(recipe: Any, key: str) -> Any:
    """Returns the value of a key, or None if the program has no such section."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name) if hasattr(recipe, section) else None


def _is_overridden(idle: Idle, levels: Mapping[str, int]) -> bool:
    own = levels.get(idle.key, 0)
    return own == 0 or own < _level_of_others(idle, levels)


def _level_of_others(idle: Idle, levels: Mapping[str, int]) -> int:
    return max(levels.get(key, NEVER) for key in idle.others)


def _by_cause(idle: list[Idle]) -> Iterator[tuple[str, list[Idle]]]:
    """Yields "a.b = 1 and a.c = 2 have no effect with a.d = 0" with these keys, for each cause."""
    for cause, group in groupby(sorted(idle, key=_cause), key=_cause):
        keys = list(group)
        settings = _listed([f"{each.key} = {show_value(each.value)}" for each in keys], "and")
        yield f"{settings} {'has' if len(keys) == 1 else 'have'} no effect with {cause}", keys


def _cause(idle: Idle) -> str:
    # Of keys that another program has, and of those that are not set, there is nothing to say.
    relevant = {key: value for key, value in idle.others.items() if value} or idle.others
    return _listed([f"{key} = {show_value(value)}" for key, value in relevant.items() if value is not None], "and")


def _remedies(recipe: Any, idle: Idle) -> list[str]:
    """Returns what gives the key an effect, or nothing, if the program has no such value."""
    condition, keys = idle.condition, list(idle.others)
    if condition.remedy:
        return [condition.remedy.format(*keys)]
    section, _, name = keys[0].partition(".")
    allowed = typing.get_args(type(getattr(recipe, section)).__pydantic_fields__[name].annotation)
    values = [show_value(value) for value in condition.values if not allowed or value in allowed]
    return [f"set {keys[0]} = {_listed(values, 'or')}"] if values else []


def _listed(items: list[str], conjunction: str) -> str:
    *others, last = items
    return f"{', '.join(others)} {conjunction} {last}" if others else last
