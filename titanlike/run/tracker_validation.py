"""Checks of a recipe's `[metrics]`. Does not import torch or a tracker."""

from importlib.util import find_spec

from titanlike.config.sections import Metrics

EXTRAS = ("wandb", "mlflow")


def tracker_problems(section: Metrics) -> list[str]:
    """Returns what cannot work on any machine."""
    twice = {name for name in section.trackers if section.trackers.count(name) > 1}
    return [f"metrics.trackers names {name!r} twice; name it once" for name in sorted(twice)]


def missing_trackers(section: Metrics) -> list[str]:
    """Returns the trackers whose packages are not installed on this machine."""
    return [
        f'metrics.trackers names {name!r}, which is not installed; run: pip install "titanlike[{name}]"'
        for name in EXTRAS
        if name in section.trackers and not _is_installed(name)
    ]


def _is_installed(name: str) -> bool:
    found = find_spec(name)
    return found is not None and found.origin is not None  # a directory `wandb` of another run is no package
