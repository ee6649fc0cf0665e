"""The environment that chat templates run in: Jinja's sandbox, with limits under which every template ends. No torch."""

import datetime
import json
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titanlike.data.documents.readers import BadRecord

# Noncharacters of Unicode, which no text may contain: they enclose plain text, and the assistant's part.
PLAIN, PLAIN_END, LABEL, LABEL_END = MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"
# Templates write today's date into the conversation. The tokens of a run must not depend on the day of its start.
DATE = datetime.datetime(2024, 7, 26)
MAX_STEPS = 100_000  # of a rendering; a long conversation takes some thousand
MAX_SIZE = 10_000_000  # characters of a text that is repeated, and bits of a number


class _Steps(Extension):
    """Counts iterations of loops and calls of macros, so that every template ends."""

    done = 0

    def count(self, steps: int = 1) -> bool:
        """Adds to the number of steps. Returns True."""
        self.done += steps
        if self.done > MAX_STEPS:
            raise BadRecord(f"more than {MAX_STEPS:,} iterations of loops and calls of macros")
        return True

    def count_range(self, *limits: int) -> range:
        """Returns a range of numbers, which count as steps."""
        numbers = range(*limits)
        self.count(len(numbers[: MAX_STEPS + 1]))
        return numbers


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which templates cannot compute for ever."""

    intercepted_binops = frozenset(("*", "**"))

    @property
    def steps(self) -> _Steps:
        """The steps of the rendering."""
        return cast(_Steps, self.extensions[_Steps.identifier])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a product or a power whose result is not too large."""
        sizes = [value.bit_length() if isinstance(value, int) else 64 for value in (left, right)]
        if operator == "**":
            size = sizes[0] * abs(right) if isinstance(right, int) else sizes[0]
        elif texts := [value for value in (left, right) if isinstance(value, str | list | tuple)]:
            size = len(texts[0]) * max([value for value in (left, right) if isinstance(value, int)], default=1)
        else:
            size = sum(sizes)
        if size > MAX_SIZE:
            raise BadRecord(f"the operator {operator} has a result that is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro))):
            step = self.steps.call_method("count", lineno=node.lineno)
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(step, node.test, lineno=node.lineno)
            elif isinstance(node, nodes.For | nodes.Macro):
                node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return tree


def template_environment() -> TemplateEnvironment:
    """Returns the environment that templates are written for."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Steps, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["range"] = environment.steps.count_range
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = DATE.strftime
    return environment


class _Generation(Extension):
    """The block `{% generation %}`, whose content is the assistant's."""

    tags = {"generation"}  # noqa: RUF012  not annotated in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        """Encloses the content of a block in marks."""
        return f"{LABEL}{caller()}{LABEL_END}"
