"""The text of `--help`."""

import difflib
import json
import shutil
import textwrap
from itertools import groupby

from titanlike.config.base import UserError, shown
from titanlike.config.schema import describe
from titanlike.config.shipped import train_command

USAGE = """\
usage: {command} [RECIPE] [--section.key=value ...]
       {command} RECIPE --check N     check the recipe for N processes on any machine, and plan its memory and
       {indent}                      time on --metrics.hardware=NAME (default: h100); starts nothing
       {command} RECIPE --resolved    print the resolved recipe with every key
       {command} [RECIPE] --help      print this text and the sections of a recipe
       {command} --help SECTION       print the keys of a section with type, default and purpose; or of one key, as in
       {indent}                      --help training.steps; or all keys: --help all

RECIPE is a TOML file, or the name of a shipped recipe (`titanlike recipes`); the default is debug. `titanlike train A B` trains
several in order. `--recipe RECIPE.toml` names one too, `--program NAME` another program. NPROC=n sets the number of processes
on this machine (default: one per GPU, or one). MAX_RESTARTS=n restarts all processes after a failure, at most n times, from the
newest checkpoint. Keys on the command line override the recipe, which overrides a recipe that it extends."""


def help_text(recipe_type: type, topic: str) -> str:
    """Returns the text of `--help`: the usage and the sections, or the keys of a topic with type, default and documentation.

    `topic` is a section, a key, `all`, or empty for the list of sections. Raises `UserError` for another one.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    topic = topic.strip("[]-")
    if not topic:
        return "\n".join([_usage(), "", *_section_lines(recipe_type, width)])
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


def _usage() -> str:
    """Returns how to start a program, with the command that trains here."""
    command = train_command()
    return USAGE.format(command=command, indent=" " * len(command))


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
