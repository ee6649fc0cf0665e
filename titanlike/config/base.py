"""The `@section` decorator and the constrained types of recipe fields.

A section is a frozen pydantic dataclass. It rejects unknown keys, values of another type (such as "3" for an integer),
NaN and infinity. The docstring under a field is its documentation in `--help`, the schema and docs/config.md.
"""

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import dataclass_transform

STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
)

# No number of a recipe needs to be larger. Sums and products of several then stay far from overflow.
LIMIT = 10**9

MAX_SHOWN = 100  # characters of a value in an error

MAX_PATH = 1024  # bytes; file systems allow 4,096 for an absolute path
MAX_PART = 255  # bytes of one name in a path, the limit of common file systems


# Characters that end a line, control a terminal, or reverse the text around them.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

# In an address, a user and a password before the host, where a password may contain "/" but a port is not one; or a user of a web
# server, who may be a token.
CREDENTIALS = re.compile(r"://(?:[^/@:\s]*:(?!\d+/)[^@\s]*|(?<=https://)[^/@\s]+|(?<=http://)[^/@\s]+)@")


def has_control_characters(text: str) -> bool:
    """Whether a text must not be part of a generated file or a printed command."""
    return CONTROL.search(text) is not None


def check_path(text: str) -> str:
    """Returns a path or URL. Raises `ValueError` if a path is too long for file systems, or cannot be printed on a line."""
    if has_control_characters(text):
        raise ValueError("contains control characters; remove them")
    encoded = text.encode()
    if "://" not in text and (len(encoded) > MAX_PATH or max(map(len, encoded.split(b"/"))) > MAX_PART):
        raise ValueError(f"is too long for a path; use at most {MAX_PATH} bytes, and {MAX_PART} between slashes")
    return text


Positive = Annotated[int, Field(ge=1, le=LIMIT)]
NonNegative = Annotated[int, Field(ge=0, le=LIMIT)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=LIMIT)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=LIMIT)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]  # a fraction that excludes 1
FilePath = Annotated[str, AfterValidator(check_path)]
# A directory name: not a path, not hidden.
Name = Annotated[str, Field(pattern=r"^([\w+=@-][\w.+=@-]*)?$"), AfterValidator(check_path)]

T = TypeVar("T")


class UserError(ValueError):
    """An error that the user can correct. Programs print its message without a stack trace."""


def refuse_credentials(name: str, value: Any) -> None:
    """Raises `UserError` if a text, or a text in a list or table, is an address with credentials, which would be written to run
    directories and logs. The message masks them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_credentials(f"{name}.{key}".removeprefix("."), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_credentials(name, inner)
    elif isinstance(value, str) and CREDENTIALS.search(value):
        raise UserError(
            f"{name} = {CREDENTIALS.sub('://***@', value)!r} contains credentials, which would be written to the run directory, "
            "checkpoints and logs; remove them, and use ~/.netrc for web servers, or what the storage's client reads, such as "
            "~/.aws/credentials"
        )


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def section(cls: type[T]) -> type[T]:
    """Turns a class of annotated fields into a recipe section, or into a recipe made of sections.

    A section may derive from another one. It inherits fields with their docstrings, which pydantic alone would drop. Its attribute
    `defaults` has the defaults of inherited fields that differ.
    """
    own = inspect.get_annotations(cls)
    inherited = {
        name: Annotated[info.rebuild_annotation(), Field(description=info.description)]
        for name, info in getattr(cls, "__pydantic_fields__", {}).items()
        if name not in own and info.description
    }
    defaults = vars(cls).get("defaults", {})
    assert defaults.keys() <= inherited.keys()
    for name in inherited:  # without a default, the annotation would make the field required
        setattr(cls, name, defaults.get(name, getattr(cls, name)))
    cls.__annotations__ = inherited | own
    return cast(type[T], pydantic_dataclass(frozen=True, config=STRICT)(cls))


def printable(text: str) -> str:
    """Returns text with escape sequences for what a terminal cannot print or would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Returns text that a user has written as an error repeats it: on one line, and not too long."""
    text = printable(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def show_value(value: Any) -> str:
    """Formats a value of a recipe for an error: on one line, and not too long."""
    return shown(json.dumps(value, default=str))


@dataclass(frozen=True)
class OnlyWith:
    """In the annotation of a field: the condition under which the field has an effect (`config/effect.py`).

    Args:
        keys: what the condition depends on: keys of the same section or, with a dot, of another one.
        holds: whether the field has an effect, given their values. A key of a section that the program lacks has the value None.
        remedy: what to do for it to have one, with the full names of the keys in place of {0}, {1}, ...
        values: values of the first key with which the field has an effect, if there is no `remedy`.
    """

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    remedy: str = ""
    values: tuple[Any, ...] = ()


def only_with(key: str, *values: Any) -> OnlyWith:
    """The field has an effect with these values of the key only."""
    return OnlyWith((key,), lambda value: value is None or value in values, values=values)


def only_from(key: str, minimum: int) -> OnlyWith:
    """The field has an effect from this value of the key on."""
    return OnlyWith((key,), lambda value: value is None or value >= minimum, remedy=f"set {{0}} to {minimum} or more")


def only_if(holds: Callable[..., bool], *keys: str, remedy: str) -> OnlyWith:
    """The field has an effect if `holds` is true of the values of the keys."""
    return OnlyWith(keys, holds, remedy)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern, such as `wq` or `layers.*.attention`, matches a part of a dotted name."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Turns a class of annotated fields into the schema of a JSON file, which `validate` checks. Not part of a recipe."""
    return section(cls)


def validate(cls: type[T], values: Any) -> T:
    """Returns a record with the values of a JSON file. Raises `ValueError` with the first value that is missing or not valid."""
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values))
    except ValidationError as error:
        detail = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg']}") from None


def one_of(values: list[int]) -> str:
    """Formats numbers as a list of alternatives: "1, 2 or 4"."""
    *others, last = [str(value) for value in values]
    return f"{', '.join(others)} or {last}" if others else last


def nearest(name: str, choices: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Returns the choice most similar to a misspelled name, or None."""
    matches = difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
    return matches[0] if matches else None
