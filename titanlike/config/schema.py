"""Describes every key of a recipe: type, default and documentation, for `--help`, errors, editors and docs/config.md."""

import difflib
import json
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter

from titanlike.config.base import LIMIT, UserError, shown

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    name: str  # dotted: training.seq_len
    section: str  # "[training]"
    section_doc: str
    variant: str  # "llama" if the table has variants
    type: str  # "integer >= 1"
    choices: tuple[str, ...]
    default: Any
    doc: str

    @property
    def is_string(self) -> bool:
        """Whether a command-line value is used as it is, without parsing."""
        return self.type == "string" or self.type.startswith("name of") or bool(self.choices)

    @property
    def expected(self) -> str:
        """The valid values, for an error message after "must be"."""
        if self.type == "boolean":
            return "true or false"
        example = {"list of integers": ", such as [1, 2]", "list of strings": ', such as ["a", "b"]'}
        suffix = next((text for prefix, text in example.items() if self.type.startswith(prefix)), "")
        return f"{'an' if self.type.startswith('integer') else 'a'} {self.type}{suffix}"


def describe(recipe_type: type) -> tuple[Key, ...]:
    """Returns every key of a recipe type, in the order in which the sections define them."""
    return _describe(recipe_type)


@cache
def _describe(recipe_type: Any) -> tuple[Key, ...]:
    schema = TypeAdapter(recipe_type).json_schema()
    keys = []
    for name, prop in schema["properties"].items():
        references = prop.get("oneOf") or ([prop] if "$ref" in prop else [])
        for reference in references:
            definition = schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]
            properties = definition["properties"]
            variant = properties["name"]["default"] if len(references) > 1 else ""
            title = f'[{name}] with name = "{variant}"' if variant else f"[{name}]"
            doc = _one_line(definition.get("description", ""))
            keys += [_key(f"{name}.{field}", title, doc, variant, value) for field, value in properties.items()]
            for field, value in properties.items():  # lists of tables
                if "$ref" in value.get("items", {}):
                    table = schema["$defs"][value["items"]["$ref"].removeprefix("#/$defs/")]
                    title, doc = f"[[{name}.{field}]]", _one_line(table.get("description", ""))
                    keys += [
                        _key(f"{name}.{field}.{inner}", title, doc, variant, each)
                        for inner, each in table["properties"].items()
                    ]
        if not references:
            keys.append(_key(name, "", "", "", prop))
    return tuple(keys)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _key(name: str, section: str, section_doc: str, variant: str, prop: dict[str, Any]) -> Key:
    for alternative in prop.get("anyOf", []):  # a value or null
        prop = prop if alternative["type"] == "null" else alternative | prop
    choices = tuple(prop.get("enum", [prop["const"]] if "const" in prop else []))
    elements = prop.get("items", prop)
    if choices:
        type_name = f"one of {', '.join(choices)}"
    elif "pattern" in prop:
        type_name = "name of letters, digits and . _ + = @ -"
    elif elements is not prop:
        type_name = f"list of {elements.get('type', 'table')}s"
    else:
        type_name = prop.get("type", "value")
    bounds = " and ".join(
        f"{symbol} {elements[bound]:.10g}"
        for bound, symbol in BOUNDS.items()
        if bound in elements and elements[bound] != LIMIT  # applies to all numbers
    )
    return Key(
        name=name,
        section=section,
        section_doc=section_doc,
        variant=variant,
        type=f"{type_name} {bounds}".rstrip(),
        choices=choices,
        default=prop.get("default"),
        doc=_one_line(prop.get("description", "")),
    )


def help_text(recipe_type: type, usage: str, topic: str) -> str:
    """Returns the text of `--help`: the usage and the sections, or the keys of a topic with type, default and documentation.

    `topic` is a section, a key, `all`, or empty for the list of sections. Raises `UserError` for another one.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    topic = topic.strip("[]-")
    if not topic:
        return "\n".join([usage.rstrip(), "", *_section_lines(recipe_type, width)])
    selected = [key for key in describe(recipe_type) if topic == "all" or f"{key.name}.".startswith(f"{topic}.")]
    if not selected:
        known = dict.fromkeys(name for key in describe(recipe_type) for name in (key.name, key.name.partition(".")[0]))
        near = difflib.get_close_matches(topic, known, n=1, cutoff=0.6)
        hint = f"did you mean --help {near[0]}?" if near else "--help lists the sections"
        raise UserError(f"--help {shown(topic)}: no such section or key; {hint}")
    lines = []
    for section, keys in groupby(selected, key=lambda key: f"{key.section}  {key.section_doc}".strip()):
        lines += ["", section] if section else [""]
        for key in keys:
            lines.append(f"  --{key.name}  ({key.type}; default {json.dumps(key.default)})")
            lines += textwrap.wrap(
                key.doc, width, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
            )
    return "\n".join(lines).strip("\n")


def _section_lines(recipe_type: type, width: int) -> list[str]:
    """Returns a line for each section: its name, the number of its keys, and its documentation."""
    lines = ["sections (--help SECTION):"]
    for name, group in groupby(describe(recipe_type), key=lambda key: key.name.partition(".")[0]):
        keys = list(group)
        variants = len({key.variant for key in keys})
        number = len({key.name for key in keys})
        prefix = f"  {name:<22} {number:>3} key{'s' if number > 1 else ' '}  "
        doc = f"{variants} variants, selected by {name}.name" if variants > 1 else keys[0].section_doc or keys[0].doc
        lines.append(prefix + textwrap.shorten(doc, width - len(prefix), placeholder=" ..."))
    return lines


def markdown(programs: Mapping[str, type]) -> str:
    """Returns the configuration reference (docs/config.md): a table for each section.

    `programs` are the recipe types of programs by name. The last one has all keys."""
    *_, widest = programs.values()
    defaults = {
        name: {(key.name, key.variant): json.dumps(key.default) for key in describe(each)}
        for name, each in programs.items()
    }
    lines = [
        "# Configuration reference",
        "",
        "<!-- Generated by `titanlike schema --markdown > docs/config.md`. Edit the docstrings in titanlike/config instead. -->",
        "",
        f"Every key of the recipes of the programs {' and '.join(f'`{name}`' for name in programs)}. A key is set in the recipe's "
        "TOML file or on the command line, as `--section.key=value`.",
        "[Recipes](recipes.md) explains the file format and the precedence of values. Numbers without an upper bound are at most "
        f"{LIMIT:,}.",
    ]
    for (section, doc), keys in groupby(describe(widest), key=lambda key: (key.section, key.section_doc)):
        lines += ["", f"## {_as_code(section) or 'Top level'}", ""]
        lines += [doc, ""] if doc else []
        lines += ["| Key | Type | Default | Description |", "|---|---|---|---|"]
        for key in keys:
            type_name = ", ".join(f"`{choice}`" for choice in key.choices) or key.type
            of_programs = {name: known.get((key.name, key.variant)) for name, known in defaults.items()}
            having = [name for name, default in of_programs.items() if default is not None]
            only = "" if len(having) == len(programs) else f"For `{'`, `'.join(having)}`. "
            shown_defaults = dict.fromkeys(default for default in of_programs.values() if default is not None)
            default = " or ".join(f"`{default}`" for default in shown_defaults)
            lines.append(f"| `{key.name}` | {type_name} | {default} | {only}{key.doc} |")
    return "\n".join(lines) + "\n"


def _as_code(section: str) -> str:
    """Formats the brackets of a section's title as code."""
    table, brackets, rest = section.rpartition("]")
    return f"`{table}]`{rest}" if brackets else section


def editor_schema(recipe_type: type) -> dict[str, Any]:
    """Returns the JSON Schema of a recipe in draft 4, the latest that common TOML editor plug-ins support."""
    schema = TypeAdapter(recipe_type).json_schema()
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Path of another recipe, relative to this file. This file overrides its values; tables are merged "
        "and lists are replaced.",
    }
    return {"$schema": "http://json-schema.org/draft-04/schema#", **_to_draft4(schema)}


def _to_draft4(node: Any) -> Any:
    if isinstance(node, list):
        return [_to_draft4(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {}
    for key, value in node.items():
        if key == "$defs":
            result["definitions"] = _to_draft4(value)
        elif key == "const":
            result["enum"] = [value]
        elif key == "exclusiveMinimum":
            result["minimum"], result["exclusiveMinimum"] = value, True
        elif key == "exclusiveMaximum":
            result["maximum"], result["exclusiveMaximum"] = value, True
        elif key == "$ref":
            result["$ref"] = value.replace("#/$defs/", "#/definitions/")
        elif key == "oneOf":  # a recipe with `extends` may omit the discriminator
            result["anyOf"] = _to_draft4(value)
        elif key != "discriminator":
            result[key] = _to_draft4(value)
    if "$ref" in result:  # draft 4 ignores the siblings of a reference
        return {"$ref": result["$ref"]}
    return result
