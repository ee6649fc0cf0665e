"""Loads a recipe from TOML files and command-line overrides.

Precedence: defaults < `extends` < file < command line. `to_toml` writes a resolved recipe.
"""

import dataclasses
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tomli
from pydantic import TypeAdapter, ValidationError

from titanlike.config.base import UserError, nearest, refuse_credentials, show_value, shown
from titanlike.config.effect import drop_overridden
from titanlike.config.errors import explain
from titanlike.config.schema import describe
from titanlike.config.shipped import shipped_recipes
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import FAMILIES, config_class

T = TypeVar("T")
COMMAND_LINE = "command line"
MAX_DEPTH = 8  # of tables and lists in a recipe; sections have two


def load(
    recipe_type: type[T],
    path: Path,
    overrides: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    on_ignored: Callable[[str], None] = lambda line: None,
    given: Mapping[str, Any] | None = None,
) -> T:
    """Loads a recipe of the given type. Raises `UserError` with one line for each invalid key.

    Args:
        defaults: values of keys that neither the file nor the overrides set, as nested tables.
        on_ignored: called with a sentence about keys that have their default, because a later setting disables them.
        given: the values of a recipe that is no file; `path` is then what errors call it.
    """
    values, origins = read(path) if given is None else (dict(given), {})
    values = _merge(dict(defaults or {}), values)
    refuse_credentials("", [values, dict(overrides or {})])  # before any message that contains values
    _apply_overrides(recipe_type, values, origins, overrides or {})
    _apply_model_size(recipe_type, values)
    try:
        recipe = TypeAdapter(recipe_type).validate_json(json.dumps(values, default=partial(_refuse_dates, path)))
    except ValidationError as error:
        raise UserError(explain(recipe_type, error, origins, path)) from None
    levels = {key: int(origin == str(path)) for key, origin in origins.items()}
    levels |= {key: number for number, key in enumerate(overrides or {}, start=2)}
    recipe, ignored = drop_overridden(recipe, levels)
    for line in ignored:
        on_ignored(f"{line}: ignored")
    return recipe


def read(path: Path, _inheriting: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads a TOML file and the files it extends. Returns the merged values and, for each dotted key, the file that sets it."""
    try:
        # A pipe could be read only once, and /dev/zero for ever.
        is_no_file = path.exists() and not path.is_file()
        text = "" if is_no_file else path.read_text(encoding="utf-8-sig")
        values = parse(text)
    except FileNotFoundError:
        raise UserError(f"{path}: recipe not found; {similar_recipe(path)}") from None
    except OSError as error:
        raise UserError(f"{shown(str(path))}: cannot be read as a recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as a recipe: {error}") from None
    except ValueError as error:
        if path.suffix == ".json":
            raise UserError(_foreign(path, "no recipe, but a model's config", is_job=False)) from None
        if "pretrain_gpt.py" in text:
            raise UserError(_foreign(path, "a script of Megatron-LM")) from None
        raise UserError(f"{path}: invalid TOML: {error}") from None
    if is_torchtitan(values):
        raise UserError(_foreign(path, "a job config of torchtitan"))
    if is_no_file:
        raise UserError(f"{path} is not a file; give the file of a recipe")
    base = values.pop("extends", None)
    origins = {key: str(path) for key in _dotted_keys(values)}
    if base is None:
        return values, origins
    if not isinstance(base, str):
        raise UserError(f"{path}: extends = {show_value(base)} must be a string, the path of one recipe")
    chain = (*_inheriting, path.resolve())
    target = path.parent / base
    try:
        is_file = base.isprintable() and target.is_file()
    except OSError:  # such as a name that is too long
        is_file = False
    if not is_file:
        raise UserError(f"{path}: extends = {show_value(base)}: file {shown(str(target))} not found")
    if target.resolve() in chain:
        raise UserError(f"{path}: extends = {show_value(base)} is circular; remove it from one of the files")
    inherited, inherited_origins = read(target, chain)
    return _merge(inherited, values), inherited_origins | origins


def is_torchtitan(values: Mapping[str, Any]) -> bool:
    """Whether the values of a TOML file are a job config of torchtitan."""
    model, job = values.get("model"), values.get("job")
    return (isinstance(model, dict) and "flavor" in model) or (isinstance(job, dict) and "dump_folder" in job)


def _foreign(path: Path, kind: str, *, is_job: bool = True) -> str:
    """Returns the sentence that answers the file of another program."""
    convert = f"`titanlike import {path} recipe.toml` writes it as a recipe, and " if is_job else ""
    return f"{path} is {kind}: {convert}`titanlike plan {path} --gpus N` plans it as it is"


def similar_recipe(path: Path) -> str:
    """Returns the remedy for a recipe that does not exist: a file beside it, or a shipped recipe."""
    files = {file.stem: str(file) for file in path.parent.glob("*.toml")}
    shipped = {name: name for name in shipped_recipes()}
    for known in (files, shipped):
        if near := nearest(path.name.removesuffix(".toml"), list(known)):
            return f"did you mean {known[near]}?"
    return "give a TOML file, or the name of a shipped recipe, which `titanlike recipes` lists"


def joined(path: Path, recipe_type: type | None = None, **changes: Any) -> str:
    """Returns a recipe and everything it extends as the text of one file, which sets no key that the recipe disables in what it
    extends, if its type is given. `changes` replace top-level keys."""
    values, origins = read(path)
    if recipe_type:
        values = effective(recipe_type, values, [key for key, origin in origins.items() if origin == str(path)])
    return dump(values | changes)


def effective(recipe_type: type, values: Mapping[str, Any], later: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the values of a recipe without the keys that have no effect, except for those in `later` that only an earlier one
    disables."""
    sized = {name: dict(table) if isinstance(table, dict) else table for name, table in values.items()}
    _apply_model_size(recipe_type, sized)
    recipe: Any = TypeAdapter(recipe_type).validate_json(json.dumps(sized))
    kept: Any = drop_overridden(recipe, dict.fromkeys(later, 1))[0]

    def is_kept(section: str, key: str) -> bool:
        return bool(getattr(getattr(recipe, section), key) == getattr(getattr(kept, section), key))

    return {
        name: {key: value for key, value in table.items() if is_kept(name, key)} if isinstance(table, dict) else table
        for name, table in values.items()
    }


def dump(values: Mapping[str, Any]) -> str:
    """Returns the values of a recipe, as `read` returns them, as TOML."""
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def to_toml(recipe: Any, comment: str = "") -> str:
    """Returns a recipe as TOML with every key written out. Loading the text gives an equal recipe."""
    lines = [f"# {line}" for line in comment.splitlines()]
    tables = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if dataclasses.is_dataclass(value):
            fields = {inner.name: getattr(value, inner.name) for inner in dataclasses.fields(value)}
            # TOML has no null: a key whose value is None is omitted.
            tables += ["", f"[{field.name}]"]
            tables += [f"{name} = {_toml(inner)}" for name, inner in fields.items() if inner is not None]
        elif value is not None:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines + tables) + "\n"


def parse_value(text: str) -> Any:
    """Parses a command-line value as TOML. Returns the text itself if it is not exactly one TOML value."""
    text = {"True": "true", "False": "false"}.get(text, text)  # Python's, which launchers of jobs pass on
    try:
        document, in_list = parse(f"value = {text}"), parse(f"value = [{text}]")
    except ValueError:
        return text
    # A document ends a value at a comment or a new line, a list at a comma. What follows must not be lost.
    return document["value"] if len(document) == len(in_list) == len(in_list["value"]) == 1 else text


def parse(text: str) -> dict[str, Any]:
    """Parses TOML. Raises `ValueError` also for values that TOML allows and no program could use."""
    try:
        values = tomli.loads(text)
    except RecursionError:
        raise ValueError(f"tables or lists are nested more than {MAX_DEPTH} deep") from None
    except tomli.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("an integer has too many digits") from None
    _check_values(values, "")
    return values


def _check_values(value: Any, name: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{shown(name)}: tables or lists are nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_values(inner, f"{name}.{key}" if name else key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, name, depth + 1)
    elif isinstance(value, int) and value.bit_length() > 128:
        raise ValueError(f"{shown(name)}: an integer has too many digits")
    elif isinstance(value, str) and "\0" in value:
        raise ValueError(f"{shown(name)} = {show_value(value)} contains the character NUL; remove it")


def _toml(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        value = {name: inner for name, inner in fields.items() if inner is not None}
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def _dotted_keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += _dotted_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return keys


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _apply_overrides(
    recipe_type: type, values: dict[str, Any], origins: dict[str, str], overrides: Mapping[str, str]
) -> None:
    if not overrides:
        return
    string_keys = {key.name for key in describe(recipe_type) if key.is_string}
    for name, text in overrides.items():
        *tables, leaf = name.split(".")
        if len(tables) >= MAX_DEPTH:
            raise UserError(f"--{shown(name)}: unknown key; a key has a section and a name, as in --training.steps=100")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"{COMMAND_LINE}: {name} = {shown(text)}: {part} is a value in the recipe, not a table")
        table[leaf] = text if name in string_keys else parse_value(text)
        origins[name] = COMMAND_LINE


def _apply_model_size(recipe_type: type, values: dict[str, Any]) -> None:
    """Sets the fields of a named model size that the recipe does not set. Validation reports an unknown size."""
    recipe: Any = recipe_type
    for field, hint in typing.get_type_hints(recipe_type).items():
        table = values.get(field)
        if not isinstance(table, dict):
            continue
        if hint is TransformerConfig:  # of a family, by name
            name = table.get("name", recipe.__dataclass_fields__[field].default.name)
            hint = config_class(name) if isinstance(name, str) and name in FAMILIES else hint
        for candidate in typing.get_args(hint) or (hint,):
            sizes = getattr(candidate, "sizes", None)
            if sizes and table.get("name", candidate.name) == candidate.name:
                size = table.get("size", candidate.size)
                fields = sizes.get(size, {}) if isinstance(size, str) else {}
                values[field] = {"name": candidate.name, **fields, **table}
                break


def _refuse_dates(path: Path, value: Any) -> str:
    raise UserError(f"{path}: {value} is a date or time, and no key has that type; write it as a string, in quotes")
