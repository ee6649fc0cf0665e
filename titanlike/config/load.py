"""From TOML files and command-line overrides to one frozen recipe, or to a refusal that says what to change.

Precedence: defaults < `extends` < file < command line. The way back, a resolved recipe as TOML, is `to_toml`.
"""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tomli
from pydantic import TypeAdapter, ValidationError

from titanlike.config.base import UserError
from titanlike.config.schema import describe

T = TypeVar("T")
COMMAND_LINE = "command line"


def load(recipe_type: type[T], path: Path, overrides: Mapping[str, str] | None = None) -> T:
    """Read a recipe of the given type. Raises `UserError` with one line for each thing that is wrong."""
    values, origins = read(path)
    _apply_overrides(recipe_type, values, origins, overrides or {})
    _expand_sizes(recipe_type, values)
    try:
        return TypeAdapter(recipe_type).validate_json(json.dumps(values, default=partial(_refuse_dates, path)))
    except ValidationError as error:
        lines = [_explain(recipe_type, dict(detail), origins, path) for detail in error.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def read(path: Path, _inheriting: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a TOML file and of what it extends, and for each dotted key the file that it comes from."""
    try:
        values = tomli.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path("train_configs")
        near = nearest(path.name, [file.name for file in folder.glob("*.toml")])
        raise UserError(
            f"{path}: there is no such recipe" + (f"; did you mean {folder / near}?" if near else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a recipe: {error}") from None
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{path}: is not valid TOML: {error}") from None
    base = values.pop("extends", None)
    origins = {key: str(path) for key in _leaves(values)}
    if base is None:
        return values, origins
    if not isinstance(base, str):
        raise UserError(f"{path}: extends = {json.dumps(base)} must be the path of one recipe, as text")
    chain = (*_inheriting, path.resolve())
    target = path.parent / base
    if target.resolve() in chain:
        raise UserError(f"{path}: extends = {json.dumps(base)} comes back to itself; take it out of one of the files")
    if not target.is_file():
        raise UserError(f"{path}: extends = {json.dumps(base)}, but there is no file {target}")
    inherited, inherited_origins = read(target, chain)
    return _merge(inherited, values), inherited_origins | origins


def joined(path: Path, **changes: Any) -> str:
    """A recipe file and what it extends as the text of one file, with other values for some keys outside of tables."""
    values = read(path)[0] | changes
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def to_toml(recipe: Any, comment: str = "") -> str:
    """A recipe with every key written out. Running it again gives the same recipe."""
    lines = [f"# {line}" for line in comment.splitlines()]
    tables = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{field.name}]"]
            given = {inner.name: getattr(value, inner.name) for inner in dataclasses.fields(value)}
            # TOML has no null: a key that is None is one that is not there.
            tables += [f"{name} = {_toml(inner)}" for name, inner in given.items() if inner is not None]
        elif value is not None:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines + tables) + "\n"


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """The choice that a misspelt word most likely meant."""
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _apply_overrides(
    recipe_type: type, values: dict[str, Any], origins: dict[str, str], overrides: Mapping[str, str]
) -> None:
    texts = {key.name for key in describe(recipe_type) if key.is_text}
    for name, text in overrides.items():
        *tables, leaf = name.split(".")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"{COMMAND_LINE}: {name} = {text}: the recipe has a value, not a table, at {part}")
        table[leaf] = text if name in texts else parse_value(text)
        origins[name] = COMMAND_LINE


def _refuse_dates(path: Path, value: Any) -> str:
    raise UserError(f"{path}: {value} is a date or a time, which no key takes; as text it stands in quotes")


def parse_value(text: str) -> Any:
    """A word of the command line as TOML would read it, or as text where that is no TOML."""
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _expand_sizes(recipe_type: type, values: dict[str, Any]) -> None:
    """Put a section's published size below the fields that the recipe gives. An unknown size is left for validation."""
    for field, hint in typing.get_type_hints(recipe_type).items():
        given = values.get(field)
        if not isinstance(given, dict):
            continue
        for candidate in typing.get_args(hint) or (hint,):
            sizes = getattr(candidate, "sizes", None)
            if sizes is not None and given.get("name", candidate.name) == candidate.name:
                size = (
                    sizes.get(given.get("size", candidate.size), {}) if isinstance(given.get("size", ""), str) else {}
                )
                values[field] = {"name": candidate.name, **size, **given}
                break


def _explain(recipe_type: type, detail: dict[str, Any], origins: Mapping[str, str], path: Path) -> str:
    """One pydantic complaint as: where, which key, which value, and what to change."""
    location = [str(part) for part in detail["loc"]]
    # Where a table has variants, pydantic puts the variant's name between the table and the key.
    variants = {key.variant for key in describe(recipe_type) if key.name.startswith(f"{location[0]}.")}
    variant = location.pop(1) if location[1:] and location[1] in variants else ""
    # Below a key there is only the place in its list.
    name = ".".join(location[:2])
    keys = {key.name: key for key in describe(recipe_type) if key.variant in ("", variant)}
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    where = origins.get(name) or next((origins[key] for key in origins if key.startswith(name + ".")), str(path))
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where}: {_unknown_key(name, value, list(keys))}"
    subject = f"{where}: {name} = {json.dumps(value, default=str)}"
    if kind == "union_tag_invalid":
        tags = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        return f"{where}: {name}.name = {json.dumps(context['tag'])} is not known; {_one_of(context['tag'], tags)}"
    if kind == "literal_error":
        return f"{subject} is not known; {_one_of(str(value), keys[name].choices)}"
    if kind in ("dataclass_type", "dict_type"):
        return f"{subject} is not a table; write [{name}] and its keys below"
    if name in keys and isinstance(value, float) and not math.isfinite(value):
        return f"{where}: {name} = {value} is not a finite number; it must be {keys[name].kind}"
    if name in keys:
        return f"{subject} must be {keys[name].kind}"
    return f"{subject}: {detail['msg']}"


def _one_of(word: str, choices: Sequence[str]) -> str:
    near = nearest(word, choices)
    return f"did you mean {json.dumps(near)}? There are {', '.join(choices)}" if near else f"use {', '.join(choices)}"


def _unknown_key(name: str, value: Any, keys: Sequence[str]) -> str:
    section, _, leaf = name.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    sections = sorted({key.partition(".")[0] for key in keys})
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    shown = name if isinstance(value, dict) else f"{name} = {json.dumps(value, default=str)}"
    near = nearest(leaf, [key.rpartition(".")[2] for key in siblings])
    if near:
        remedy = f"did you mean {section + '.' if section else ''}{near}?"
    elif same_leaf:
        remedy = f"did you mean {same_leaf[0]}?"
    elif not section and nearest(leaf, sections):
        remedy = f"did you mean [{nearest(leaf, sections)}]?"
    elif siblings and section:
        remedy = f"[{section}] has {', '.join(key.rpartition('.')[2] for key in siblings)}"
    else:
        remedy = f"a recipe has {', '.join(sections)}"
    return f"{shown}: there is no such key; {remedy}"
