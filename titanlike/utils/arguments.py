"""Argument types for argparse."""

import argparse


def positive_int(text: str) -> int:
    """Parses an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)
