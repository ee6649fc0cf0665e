"""Argument types for argparse."""

import argparse

from titanlike.config.base import shown
from titanlike.utils.arguments import parse_int


def positive_int(text: str) -> int:
    """Parses an integer of at least 1."""
    return _at_least(1, text)


def non_negative_int(text: str) -> int:
    """Parses an integer of at least 0."""
    return _at_least(0, text)


def _at_least(minimum: int, text: str) -> int:
    number = parse_int(text)
    if number is None or number < minimum:
        limit = " and below 10^9" if text.isdigit() and number is None else ""
        raise argparse.ArgumentTypeError(f"expected an integer of at least {minimum}{limit}, got {shown(text)!r}")
    return number
