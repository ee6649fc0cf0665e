"""Addresses with credentials, such as https://user:password@host: they would be written to run directories and logs."""

import re
from collections.abc import Mapping
from typing import Any

from titanlike.config.base import UserError

# A user and a password before the host, where a password may contain "/" but a port is not one; or a user of a web server, who
# may be a token.
CREDENTIALS = re.compile(r"://(?:[^/@:\s]*:(?!\d+/)[^@\s]*|(?<=https://)[^/@\s]+|(?<=http://)[^/@\s]+)@")


def refuse_credentials(name: str, value: Any) -> None:
    """Raises `UserError` if a text, or a text in a list or table, is an address with credentials. The message masks them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_credentials(f"{name}.{key}".removeprefix("."), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_credentials(name, inner)
    elif isinstance(value, str) and CREDENTIALS.search(value):
        raise UserError(
            f"{name} = {CREDENTIALS.sub('://***@', value)!r} contains credentials, which would be written to the run directory, "
            "checkpoints and logs; remove them, and use ~/.netrc for web servers, or what the storage's client reads, such as "
            "~/.aws/credentials"
        )
