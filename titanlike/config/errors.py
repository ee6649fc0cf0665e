"""Explains what is wrong with a key of a recipe or an option of the command line: where it is set, its value and the remedy."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlike.config.base import LIMIT, UserError, nearest, show_value, shown
from titanlike.config.schema import describe

MANY_UNKNOWN = 4  # keys: they are not typos, the recipe is for another program
# Keys that `recipe.toml` of earlier runs has, and what to do.
REMOVED = {
    "metrics.machine_interval": "remove it; exporters measure GPUs and hosts (docs/experiments.md)",
    "recipe": "the program has the key `program` now; write program = {value}",
}


def explain(recipe_type: type, error: ValidationError, origins: Mapping[str, str], path: Path) -> str:
    """Returns a line for each invalid key of a recipe. `origins` says which file sets a key, or that the command line does."""
    lines = [_format_error(recipe_type, dict(detail), origins, path) for detail in error.errors()]
    if sum("unknown key" in line for line in lines) >= MANY_UNKNOWN:
        lines.append(
            f"{path} has many unknown keys; docs/coming_from.md has the keys of torchtitan, Megatron-LM and HF Trainer"
        )
    return "\n".join(dict.fromkeys(lines))


def _format_error(recipe_type: type, detail: dict[str, Any], origins: Mapping[str, str], path: Path) -> str:
    """Formats one pydantic error as: origin, key, value and remedy."""
    location = [str(part) for part in detail["loc"]]
    # pydantic puts the variant of a table, such as "llama", between the table and the key.
    variants = {key.variant for key in describe(recipe_type) if key.name.startswith(f"{location[0]}.")}
    variant = location.pop(1) if location[1:] and location[1] in variants else ""
    keys = {key.name: key for key in describe(recipe_type) if key.variant in ("", variant)}
    name = ".".join(location[:2])
    is_list_of_tables = any(key.startswith(f"{name}.") for key in keys) and len(location) > 1
    if is_list_of_tables:  # a key of a table; other parts are indices into a list
        name = ".".join([name, *(part for part in location[2:] if not part.isdigit())])
    name = shown(name)
    elsewhere: Mapping[str, str] = getattr(recipe_type, "elsewhere", {})
    error_type, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    origin = origins.get(name) or next((origins[key] for key in origins if key.startswith(name + ".")), str(path))
    if error_type in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{origin}: {_unknown_key(name, value, list(keys), elsewhere.get(name))}"
    setting = f"{origin}: {name} = {show_value(value)}"
    if error_type == "union_tag_invalid":
        tags = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        return f"{origin}: {name}.name = {show_value(context['tag'])} {_unknown_choice(context['tag'], tags)}"
    if error_type == "literal_error":
        return f"{setting} {_unknown_choice(str(value), keys[name].choices, elsewhere.get(f'{name}={value}'))}"
    if error_type in ("dataclass_type", "dict_type"):
        table = f"[[{name}]]" if is_list_of_tables else f"[{name}]"
        return f"{setting} is not a table; write {table} and its keys below it"
    if error_type == "value_error":
        return f"{setting} {context['error']}"
    if error_type == "less_than_equal" and context["le"] == LIMIT:
        return f"{setting} must be at most {LIMIT}"
    if name in keys and isinstance(value, float) and not math.isfinite(value):
        return f"{origin}: {name} = {value} is not finite; it must be {keys[name].expected}"
    if name in keys:
        return f"{setting} must be {keys[name].expected}"
    return f"{setting}: {detail['msg']}"


def _unknown_choice(value: str, choices: Sequence[str], program: str | None = None) -> str:
    if program:
        return f'is for the program {program}; set program = "{program}"'
    near = nearest(value, choices)
    hint = f"did you mean {json.dumps(near)}? " if near else ""
    return f"is not valid; {hint}choose from {', '.join(choices)}"


def _unknown_key(name: str, value: Any, keys: Sequence[str], program: str | None) -> str:
    section, _, leaf = name.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    sections = sorted({key.partition(".")[0] for key in keys})
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    setting = name or '""'
    setting += "" if isinstance(value, dict) else f" = {show_value(value)}"
    near = nearest(leaf, [key.rpartition(".")[2] for key in siblings])
    if name in REMOVED:
        remedy = REMOVED[name].format(value=show_value(value))
    elif program:
        remedy = f'recipes/{program}.py has it; set program = "{program}"'
    elif near:
        remedy = f"did you mean {section + '.' if section else ''}{near}?"
    elif same_leaf and leaf != "name":
        remedy = f"did you mean {same_leaf[0]}?"
    elif not section and nearest(leaf, sections):
        remedy = f"did you mean [{nearest(leaf, sections)}]?"
    elif siblings and section:
        remedy = f"the keys of [{section}] are {', '.join(key.rpartition('.')[2] for key in siblings)}"
    else:
        remedy = f"choose from {', '.join(sections)}"
    return f"{setting}: unknown key; {remedy}"


def refuse_unknown_options(recipe_type: type, names: Iterable[str]) -> None:
    """Raises `UserError` for an option without a dot, with the key that was probably meant."""
    keys = [key.name for key in describe(recipe_type)]
    for name in names:
        keys_of_table = [key for key in keys if key.startswith(f"{name}.")]
        if keys_of_table and name not in keys:
            raise UserError(f"--{name} is a table; name one of its keys, as in --{keys_of_table[0]}=...")
        if "." not in name and name not in keys:
            raise UserError(f"--{shown(name)}: unknown option; {_suggestion(name.replace('-', '_'), keys)}")


def _suggestion(name: str, keys: Sequence[str]) -> str:
    """Returns the remedy for an option without a dot: the key that it spells with dashes, or whose last part it is."""
    whole = {key.replace(".", "_"): key for key in keys}
    last = {key.rpartition(".")[2]: key for key in reversed(keys)}  # the first section that has it
    for known in (whole, last):
        if near := nearest(name, list(known), cutoff=0.8):
            return f"did you mean --{known[near]}?"
    return (
        "keys are written --section.key=value (--help), and docs/coming_from.md has those for the options of Megatron-LM and "
        "Hugging Face's Trainer"
    )
