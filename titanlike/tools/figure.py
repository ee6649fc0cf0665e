"""What pictures have in common. Does not import torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlike.config import UserError


def require_package(option: str, package: str) -> None:
    """Raises `UserError` if a package that an option of the command line needs is missing."""
    if find_spec(package) is None:
        raise UserError(f'{option} requires {package}; run: pip install "titanlike[plot]"')


def pyplot() -> Any:
    """Returns matplotlib.pyplot, for pictures without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path, option: str) -> None:
    """Writes a picture in the project's style to the file that an option of the command line names, and closes it."""
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, bbox_inches="tight")
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}; choose another file") from None
    finally:
        pyplot().close(figure)
