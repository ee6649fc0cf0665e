"""`titanlike compare`: tables, a page and a picture of runs. Imports late, to start fast."""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.tools.cli.command import add_command
from titanlike.tools.output_files import check_path, writing

if TYPE_CHECKING:
    from titanlike.tools.comparison.runs import ComparedRun

DESCRIPTION = """\
Compares runs in tables, on a page or in a picture. Shows progress, losses, throughput with the ratio to the first run, memory, and
the keys of their recipes that differ. RUN is the folder of a run, a folder that contains runs, or a metrics file. Without RUN, all
runs in runs/ are compared.

  titanlike compare runs/baseline runs/muon
  titanlike compare runs/baseline runs/muon --html compare.html --png compare.png
  titanlike compare --baseline runs/first --html compare.html --watch 10"""


def add(commands: Any) -> None:
    """Adds `compare` to the commands of `titanlike`."""
    parser = add_command(commands, "compare", DESCRIPTION, run)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs to compare (default: runs/)")
    text = "run of which ratios are relative, listed first (default: the first one)"
    parser.add_argument("--baseline", type=Path, metavar="RUN", help=text)
    text = (
        "write a page with curves, throughput and recipe differences: one file, which needs no network; requires plotly"
    )
    parser.add_argument("--html", type=Path, metavar="FILE.html", help=text)
    text = "draw the losses and the throughput; requires matplotlib"
    parser.add_argument("--png", type=Path, metavar="FILE.png", help=text)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    text = "update every so often until all runs are complete; the page reloads itself and keeps its view"
    parser.add_argument("--watch", type=_seconds, metavar="SECONDS", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for option, suffix, package in (("html", ".html", "plotly"), ("png", ".png", "matplotlib")):
        path = getattr(arguments, option)
        if path is not None:
            check_path(path, suffix, f"--{option}")
            if find_spec(package) is None:
                raise UserError(f'--{option} requires {package}; run: pip install "titanlike[plot]"')
    if arguments.watch and arguments.json:
        raise UserError("--watch updates a terminal and a page; leave out --json")
    if arguments.watch:
        _watch(arguments)
        return
    from titanlike.tools.comparison.runs import load

    runs = load(_paths(arguments))
    if arguments.json:
        from titanlike.tools.comparison.table import as_json

        print(json.dumps(as_json(runs), indent=1))
    else:
        from titanlike.tools.comparison.table import render
        from titanlike.tools.rich_console import RichConsole

        console = RichConsole(highlight=False, markup=False, emoji=False)
        console.print(render(runs, console))
    for path in _write(arguments, runs, refresh=0.0):
        print(f"wrote {path}", file=sys.stderr if arguments.json else sys.stdout)


def _paths(arguments: argparse.Namespace) -> list[Path]:
    """Returns the runs that are compared, with the baseline first."""
    from titanlike.tools.comparison.runs import find

    named = arguments.runs
    if not named:
        named = [Path("runs")]
        if not named[0].is_dir():
            raise UserError("give the runs to compare: titanlike compare RUN RUN; there is no directory runs/ here")
    if arguments.baseline:
        named = [*find([arguments.baseline])[:1], *named]
    return find(named)


def _write(arguments: argparse.Namespace, runs: "Sequence[ComparedRun]", *, refresh: float) -> list[Path]:
    """Writes the files that the command line names. A page reloads itself every `refresh` seconds, unless that is 0."""
    if arguments.html:
        from titanlike.tools.comparison.page import page
        from titanlike.utils.atomic_write import atomic_write_text

        with writing(arguments.html, "--html"):
            atomic_write_text(arguments.html, page(runs, refresh=refresh), durable=False)
    if arguments.png:
        from titanlike.tools.comparison.figure import draw

        draw(runs, arguments.png)
    return [path for path in (arguments.html, arguments.png) if path]


def _watch(arguments: argparse.Namespace) -> None:
    """Updates the tables and the files until all runs are complete, or until Ctrl-C."""
    from rich.live import Live

    from titanlike.tools.comparison.runs import load
    from titanlike.tools.comparison.table import render
    from titanlike.tools.rich_console import RichConsole

    console = RichConsole(highlight=False, markup=False, emoji=False)
    runs: list[ComparedRun] = []
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                runs = load(_paths(arguments))
                live.update(render(runs, console), refresh=console.is_terminal)
                if all(each.summary.state == "complete" for each in runs):
                    break
                _write(arguments, runs, refresh=arguments.watch)
                time.sleep(arguments.watch)
    finally:
        # A page that is not rewritten any more does not reload itself.
        with suppress(UserError):
            for path in _write(arguments, runs, refresh=0.0) if runs else ():
                print(f"wrote {path}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"expected a number of seconds from 0.1 to 86400, got {shown(text)!r}")
    return seconds
