"""What the pages that commands write have in common: one HTML file with its data, style and scripts, which loads nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any


def html_page(folder: Path, parts: Mapping[str, str], data: Mapping[str, Any], *libraries: str) -> str:
    """Returns a page: what `page.html` in a folder shows, with `page.js` beside it, which draws.

    Args:
        folder: The folder.
        parts: What replaces `$name` in `page.html`, as HTML, and the `title`.
        data: What the script reads as `data`.
        libraries: Scripts that precede it.
    """
    shell = {
        "title": parts["title"],
        "content": _filled(folder / "page.html", parts),
        # A name such as "</script>" must not end the element.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": (folder / "page.js").read_text(encoding="utf-8"),
        "libraries": "\n".join(f"<script>{library}</script>" for library in libraries),
    }
    return _filled(Path(__file__).with_suffix(".html"), shell)


def _filled(template: Path, parts: Mapping[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(parts)
