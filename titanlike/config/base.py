"""`@section`: a frozen, strict dataclass, and the kinds of number its fields are made of.

Strict means: no unknown key, no "3" for 3, no NaN. The text under a field is its documentation: it feeds `--help` and
the schema.
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
Share = Annotated[float, Field(ge=0.0, lt=1.0)]  # some may be left out, not all
Name = Annotated[str, Field(pattern=r"^([\w+=@-][\w.+=@-]*)?$")]  # of a folder: no path, not hidden

T = TypeVar("T")


class UserError(ValueError):
    """Something that the user can put right. Shown as one sentence, without a stack trace."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def section(cls: type[T]) -> type[T]:
    """Make a class of annotated fields into one section of a recipe, or into a recipe of such sections."""
    return cast(type[T], pydantic_dataclass(frozen=True, config=STRICT)(cls))


def one_of(values: list[int]) -> str:
    """Numbers as a sentence names them: "1, 2 or 4"."""
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last
