"""Changed copies of programs, pages of the documentation and their code blocks, and `titanlike verify`."""

import re
import subprocess
from pathlib import Path

from tests.launching import ROOT, python

PAGES = [*(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def edited(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"the program does not have exactly one {old!r}"
        text = text.replace(old, new)
    return text


# Blocks of the pages that are meant for a machine without a clone: tests/packaging runs them, with the wheel in an empty folder.
INSTALLED = (
    "pip wheel --no-deps --wheel-dir dist .\n",  # in the clone
    "pip install titanlike-*.whl && titanlike train\n",
)


def blocks(page: Path, language: str = "bash") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "titanlike.tools.cli.main", "verify", *words)
