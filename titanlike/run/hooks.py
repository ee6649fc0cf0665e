"""What installed packages add to a run: functions that they register, called at certain points. Does not import torch.

A package registers a function as an entry point, here in its pyproject.toml:

    [project.entry-points."titanlike.completed"]
    notify = "my_package.notify:completed"

| Group | Called | Arguments |
|---|---|---|
| `titanlike.checked` | by `--check`, for a recipe that is valid | `recipe`, `num_processes` |
| `titanlike.completed` | on rank 0 at the end of a run | `recipe`, `metrics` (the file of records), `device`, `measured` |
| `titanlike.out_of_memory` | on a rank whose device is out of memory | `recipe` |

All arguments are keywords. The function returns the text that is printed, or None. A function of `titanlike.checked` raises
`UserError` for a key that it does not accept.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import tomli

from titanlike.config import UserError
from titanlike.config.shipped import REPOSITORY


def registered(group: str) -> list[EntryPoint]:
    """Returns the functions of a group. In a clone that is not installed, such as the source directory of a job, reads them from
    its pyproject.toml."""
    found, project = [*entry_points(group=group)], REPOSITORY / "pyproject.toml"
    if not found and project.is_file():
        declared = tomli.loads(project.read_text())["project"]["entry-points"].get(group, {})
        return [EntryPoint(name, value, group) for name, value in declared.items()]
    return found


def call_hooks(point: str, /, *, may_refuse: bool = False, **arguments: Any) -> list[str]:
    """Calls the functions that are registered for a point of a run and returns their texts.

    A function that fails is reported in the place of its text: it neither ends a run nor hides the error that ends it. With
    `may_refuse`, its `UserError` is raised.
    """
    texts = []
    for entry in registered(f"titanlike.{point}"):
        try:
            texts.append(entry.load()(**arguments))
        except Exception as error:
            if may_refuse and isinstance(error, UserError):
                raise
            texts.append(f"{entry.name}: {type(error).__name__}: {error}")
    return [text for text in texts if text]
