"""Changed copies of programs, code blocks of the documentation, and `titanlike verify`."""

import re
import subprocess
from pathlib import Path

from tests.launching import python


def edited(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"the program does not have exactly one {old!r}"
        text = text.replace(old, new)
    return text


def blocks(page: Path, language: str = "bash") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "titanlike.tools.cli.main", "verify", *words)
