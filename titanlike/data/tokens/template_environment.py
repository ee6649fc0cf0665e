"""The environment that chat templates run in: Jinja's sandbox, with what templates are written for. No torch."""

import datetime
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Noncharacters of Unicode, which no text may contain: they enclose plain text, and the assistant's part.
PLAIN, PLAIN_END, LABEL, LABEL_END = MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"
# Templates write today's date into the conversation. The tokens of a run must not depend on the day of its start.
DATE = datetime.datetime(2024, 7, 26)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that templates are written for."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
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
