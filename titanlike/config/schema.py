"""Describes every key of a recipe: type, default and documentation, for `--help`, errors and tools."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from titanlike.config.base import LIMIT

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class SchemaKey:
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


def describe(recipe_type: type) -> tuple[SchemaKey, ...]:
    """Returns every key of a recipe type, in the order in which the sections define them."""
    return _describe(recipe_type)


@cache
def _describe(recipe_type: Any) -> tuple[SchemaKey, ...]:
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


def _key(name: str, section: str, section_doc: str, variant: str, prop: dict[str, Any]) -> SchemaKey:
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
    return SchemaKey(
        name=name,
        section=section,
        section_doc=section_doc,
        variant=variant,
        type=f"{type_name} {bounds}".rstrip(),
        choices=choices,
        default=prop.get("default"),
        doc=_one_line(prop.get("description", "")),
    )
