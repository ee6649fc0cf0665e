"""What the options of `titanlike verify` say."""

import math
import re
from collections.abc import Mapping

from titanlike.config import UserError
from titanlike.config.base import nearest
from titanlike.config.layout import DIMENSIONS, LAYOUT_KEYS
from titanlike.config.sections import Parallelism
from titanlike.utils.arguments import parse_int

MAX_PROCESSES = 32


def parse_layout(layout: str) -> dict[str, str]:
    """Returns the dimensions and any other given key of [parallelism], as text."""
    chosen = dict.fromkeys(LAYOUT_KEYS, "1")
    keys = list(Parallelism.__dataclass_fields__)
    for item in filter(None, re.split(r",(?=\s*[a-z_]+=)", layout)):
        key, equals, value = item.strip().partition("=")
        if key not in keys or not equals:
            near = nearest(key, keys)
            raise UserError(
                f"--layout {layout}: {item!r} is not KEY=VALUE with a key of [parallelism], such as tensor=2"
                + (f"; did you mean {near}?" if near and near != key else "")
            )
        if key in LAYOUT_KEYS and (parse_int(value) or 0) < 1:
            raise UserError(f"--layout {layout}: {item!r}: give a number of processes, such as {key}=2")
        chosen[key] = value
    if math.prod(int(chosen[name]) for name in DIMENSIONS) > MAX_PROCESSES:
        raise UserError(f"--layout {layout}: more than {MAX_PROCESSES} processes on one machine; fewer show the same")
    return chosen


def parse_tolerance(text: str, defaults: Mapping[str, float]) -> dict[str, float]:
    """Returns the tolerance of each quantity: `text` is one number for all, or QUANTITY=NUMBER,... for some."""
    found = dict(defaults)
    *others, last = (quantity.replace(" ", "_") for quantity in defaults)
    quantities = f"{', '.join(others)} or {last}"
    for item in filter(None, text.split(",")):
        name, _, number = item.rpartition("=")
        quantity = name.strip().replace("_", " ")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if (name and quantity not in found) or not 0 <= value < math.inf:
            raise UserError(
                f"--tolerance {text}: {item!r} is neither a number, such as 1e-3, nor a quantity ({quantities}) "
                "with its number, such as weights=1e-3"
            )
        found |= {quantity: value} if name else dict.fromkeys(found, value)
    return found


def parse_mesh(layout: str) -> dict[str, int]:
    """Returns the dimensions of a mesh in their order, outermost first, from "shard=2,tensor=2"."""
    sizes: dict[str, int] = {}
    for item in filter(None, (each.strip() for each in layout.split(","))):
        name, _, size = item.partition("=")
        number = parse_int(size) or 0
        if not name.isidentifier() or number < 1 or name in sizes:
            raise UserError(
                f"--layout {layout}: {item!r} is not NAME=RANKS with a dimension of the mesh of parallelize, such as tensor=2"
            )
        sizes[name] = number
    num_ranks = math.prod(sizes.values())
    if not 2 <= num_ranks <= MAX_PROCESSES:
        raise UserError(f"--layout {layout}: give 2 to {MAX_PROCESSES} processes, such as tensor=2")
    return sizes
