"""Configuration of Sphinx for the site: pip install -e ".[docs]" && sphinx-build -W -c docs . site

The root of the sources is that of the repository, so that pages may link to any file: to other pages, or to sources as downloads.
"""

import sys
from itertools import groupby
from pathlib import Path

from sphinx.application import Sphinx

from titanlike import __version__

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs import llms

project = "titanlike"
release = __version__
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/LOG.md",
    "recipes/README.md",
]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 4  # with the names that a forge gives them
default_role = "code"  # single backticks in docstrings
autodoc_default_options = {"members": True, "member-order": "bysource"}

html_theme = "furo"
html_title = f"titanlike {release}"
html_extra_path = ["site"]  # index.html, which leads to the first page


def list_table(rows: list[str]) -> list[str]:
    """The lines of a Markdown table, as the directive that docstrings need."""
    cells = [row.strip("| ").split(" | ") for row in rows if not row.startswith("|--")]
    first = ("   * - ", *["     - "] * (len(cells[0]) - 1))
    return [
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
        *[m + c for row in cells for m, c in zip(first, row, strict=True)],
        "",
    ]


def convert_tables(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Converts the tables of a docstring."""
    groups = [(table, list(group)) for table, group in groupby(lines, lambda line: line.startswith("|"))]
    lines[:] = [line for table, group in groups for line in (list_table(group) if table else group)]


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Writes llms.txt, which links to the sources of the pages."""
    if error is None and app.builder.format == "html":
        Path(app.outdir, "llms.txt").write_text(llms.text())


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", convert_tables)
    app.connect("build-finished", write_llms)
