"""The `@section` decorator and the constrained types of recipe fields.

A section is a frozen pydantic dataclass. It rejects unknown keys, values of another type (such as "3" for an integer),
NaN and infinity. The docstring under a field is its documentation in `--help`, the schema and docs/config.md.
"""

from dataclasses import field
from typing import Annotated, TypeVar, cast

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import dataclass_transform

STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
)

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]  # a fraction that excludes 1
Name = Annotated[str, Field(pattern=r"^([\w+=@-][\w.+=@-]*)?$")]  # a directory name: not a path, not hidden

T = TypeVar("T")


class UserError(ValueError):
    """An error that the user can correct. Programs print its message without a stack trace."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def section(cls: type[T]) -> type[T]:
    """Turns a class of annotated fields into a recipe section, or into a recipe made of sections."""
    return cast(type[T], pydantic_dataclass(frozen=True, config=STRICT)(cls))


def one_of(values: list[int]) -> str:
    """Formats numbers as a list of alternatives: "1, 2 or 4"."""
    *others, last = [str(value) for value in values]
    return f"{', '.join(others)} or {last}" if others else last
