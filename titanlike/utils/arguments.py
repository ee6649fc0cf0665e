"""Numbers on a command line and in environment variables."""

import re


def parse_int(text: str) -> int | None:
    """Returns an integer of at most nine decimal digits, or None: `int` also accepts other scripts, spaces and underscores."""
    return int(text) if re.fullmatch("-?[0-9]{1,9}", text) else None
