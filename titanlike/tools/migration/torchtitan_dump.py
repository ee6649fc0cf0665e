"""Prints a config of torchtitan 0.3 as JSON, with the names of classes. Runs in torchtitan's environment, needs nothing else, and
no GPU:

    python torchtitan_dump.py --module llama3 --config llama3_8b --training.steps 1000 > job.json
"""

import contextlib
import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

WITHOUT_MEANING = ("param_init", "sharding_config")  # functions; how the same tensors lie on ranks


def plain(value: Any, *, whole: bool = False) -> Any:
    """Returns a config as values of JSON: of a dataclass, its class and, if not `whole`, the fields that differ from their
    defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
        for one in fields(value):
            item = getattr(value, one.name)
            default = one.default if one.default_factory is MISSING else one.default_factory()
            whole_item = whole or one.name == "model"
            if one.name not in WITHOUT_MEANING and (whole_item or is_dataclass(item) or item != default):
                found[one.name] = plain(item, whole=whole_item)
        return found
    if isinstance(value, (list, tuple)):
        return [plain(item, whole=whole) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, whole=whole) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)


def main() -> None:
    """Builds the config that the command line names, and prints it."""
    sys.path[0] = ""  # not this file's folder, which has modules of the names of others
    with contextlib.redirect_stdout(sys.stderr):
        from torchtitan.config import ConfigManager, configs
        from torchtitan.tools import utils

        # Configs of float8 and of symmetric memory ask for a GPU.
        utils.has_cuda_capability = lambda major, minor: True
        configs.torch = SimpleNamespace(
            cuda=SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (10, 0)),
            version=SimpleNamespace(hip=None),
        )
        config = ConfigManager().parse_args(sys.argv[1:])
    print(json.dumps(plain(config)))


if __name__ == "__main__":
    main()
