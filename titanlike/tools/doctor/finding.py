"""What `titanlike doctor` reports of a machine, and the output of the programs that it asks."""

import subprocess
from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `missing` part is required unless `optional`."""

    status: Literal["ok", "warning", "missing"]
    subject: str
    text: str
    remedy: str = ""
    optional: bool = False


def output(*command: str) -> str:
    """Returns what a program prints, or "" if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
