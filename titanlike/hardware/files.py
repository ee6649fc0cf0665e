"""Reads the descriptions of machines in this folder, or a user's own. Does not import torch."""

from pathlib import Path
from typing import Any

import tomli

from titanlike.config import UserError
from titanlike.config.base import show_value, shown

FOLDER = Path(__file__).parent


def read_file(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Returns the values of a shipped file, or of the TOML file at a path, and of the shipped file that it extends."""
    shipped = folder / f"{name}.toml"
    try:
        values = tomli.loads((shipped if shipped.is_file() else Path(name)).read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise UserError(f"{shown(name)}: {shown(str(error))}") from None
    if (base := values.pop("extends", None)) and not (folder / f"{base}.toml").is_file():
        raise UserError(f"{shown(name)}: extends = {show_value(base)} is not a shipped file; use h100, for example")
    return (read_file(base, folder) if base else {}) | values


def peak_flops(name: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a file, to which MFU refers; without a name, None."""
    rate: Any = read_file(name).get("bf16_tflops") if name else 0
    if name and not (isinstance(rate, int | float) and rate > 0):
        raise UserError(f"{shown(name)}: bf16_tflops = {show_value(rate)} is not valid; give TFLOP/s, such as 989.4")
    return rate * 1e12 or None


def file_of_device(device: str) -> str:
    """Returns the name of the file of a GPU by the name that CUDA reports, or "" if there is none."""
    files = {file.stem: tomli.loads(file.read_text()).get("devices", ()) for file in sorted(FOLDER.glob("*.toml"))}
    return next((name for name, devices in files.items() if device in devices), "")
