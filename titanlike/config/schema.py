"""What a recipe may say: every key with its kind, default and reason, for `--help`, for error messages and for editors."""

import json
import shutil
import textwrap
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
)
KINDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    name: str  # dotted: training.seq_len
    section: str  # the heading in --help
    variant: str  # "llama" where the table has variants
    kind: str  # "a whole number, at least 1"
    is_text: bool
    choices: tuple[str, ...]
    default: Any
    reason: str


def describe(recipe_type: type) -> list[Key]:
    """Every key that a recipe of this type may have, in the order in which they are written in the sections."""
    schema = TypeAdapter(recipe_type).json_schema()
    keys = []
    for name, prop in schema["properties"].items():
        references = prop.get("oneOf") or ([prop] if "$ref" in prop else [])
        for reference in references:
            definition = schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]
            properties = definition["properties"]
            variant = properties["name"]["default"] if len(references) > 1 else ""
            title = f"[{name}], name = {variant}" if variant else f"[{name}]"
            heading = f"{title}  {definition.get('description', '')}".rstrip()
            keys += [_key(f"{name}.{field}", heading, variant, value) for field, value in properties.items()]
        if not references:
            keys.append(_key(name, "", "", prop))
    return keys


def _key(name: str, section: str, variant: str, prop: dict[str, Any]) -> Key:
    choices = tuple(prop.get("enum", [prop["const"]] if "const" in prop else []))
    kind = f"one of {', '.join(choices)}" if choices else KINDS.get(prop.get("type", ""), prop.get("type", "value"))
    if "pattern" in prop:
        kind = "a name of letters, digits and . _ + = @ -"
    numbers = prop.get("items", prop)
    if numbers is not prop:
        kind = f"a list in brackets, each {KINDS[numbers['type']]}" + (
            " in quotes" if numbers["type"] == "string" else ""
        )
    bounds = [f"{phrase} {numbers[bound]:g}" for bound, phrase in BOUNDS if bound in numbers]
    reason = " ".join(prop.get("description", "").split())
    return Key(
        name=name,
        section=section,
        variant=variant,
        kind=", ".join([kind, *bounds]),
        is_text=prop.get("type") == "string",
        choices=choices,
        default=prop.get("default"),
        reason=reason,
    )


def help_text(recipe_type: type, usage: str) -> str:
    """The text of `--help`: usage, then every key with its kind, its default and its reason."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    lines = [usage.rstrip(), ""]
    section = None
    for key in describe(recipe_type):
        if key.section != section:
            section = key.section
            lines += ["", section]
        lines.append(f"  --{key.name}  ({key.kind}; default {json.dumps(key.default)})")
        lines += textwrap.wrap(key.reason, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def editor_schema(recipe_type: type) -> dict[str, Any]:
    """JSON Schema of a recipe in draft 4, the newest that the usual TOML editor plug-in understands."""
    schema = TypeAdapter(recipe_type).json_schema()
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Another recipe, relative to this file. Keys here win over its keys, lists replace, tables merge.",
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
        elif key == "oneOf":  # a recipe that extends another may leave out the key that tells the variants apart
            result["anyOf"] = _to_draft4(value)
        elif key != "discriminator":
            result[key] = _to_draft4(value)
    if "$ref" in result:  # draft 4 ignores everything beside a reference
        return {"$ref": result["$ref"]}
    return result
