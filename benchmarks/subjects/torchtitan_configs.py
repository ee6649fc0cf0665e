"""torchtitan 0.3.0: writes all configs of its models as JSON. A process of `benchmarks.migration`, which runs it in torchtitan's
environment.

    python -m benchmarks.subjects.torchtitan_configs FOLDER

A config that cannot be built is an object with its "error".
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from torchtitan.models import _supported_models
from torchtitan.tools import utils

from titanlike.tools.migration.torchtitan_dump import plain


def dump(build: Any) -> Any:
    """Returns a config, or why there is none."""
    try:
        return plain(build())
    except ImportError as error:
        return {"error": str(error)}


def main() -> None:
    """Writes a file for each function of a registry, by its module and name."""
    utils.has_cuda_capability = lambda major, minor: True
    found: dict[str, Any] = {}
    for name in sorted(_supported_models):
        try:
            registry = importlib.import_module(f"torchtitan.models.{name}.config_registry")
        except ImportError as error:
            found[f"{name}.config_registry"] = {"error": str(error)}
            continue
        for key, function in inspect.getmembers(registry, inspect.isfunction):
            is_config = function.__module__ == registry.__name__ and not inspect.signature(function).parameters
            if is_config and not key.startswith("_"):
                found[f"{name}.{key}"] = dump(function)
    for name, config in found.items():
        Path(sys.argv[1], f"{name}.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
