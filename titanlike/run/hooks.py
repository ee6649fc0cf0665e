"""What installed packages add to a run: functions that they register, called at certain points. Does not import torch.

A package registers a function as an entry point, here in its pyproject.toml:

    [project.entry-points."titanlike.completed"]
    notify = "my_package.notify:completed"

| Group | Called | Arguments |
|---|---|---|
| `titanlike.checked` | by `--check`, for a recipe that is valid | `recipe`, `num_processes`, `hardware` |
| `titanlike.completed` | on rank 0 at the end of a run | `recipe`, `metrics` (the file of records), `device`, `measured` |
| `titanlike.out_of_memory` | on a rank whose device is out of memory | `recipe` |

All arguments are keywords. The function returns the text that is printed, or None.
"""

from importlib.metadata import entry_points
from typing import Any

from titanlike.config import UserError


def call_hooks(name: str, **arguments: Any) -> list[str]:
    """Calls the functions of a group and returns their texts. One that fails is reported in its place: it is a guest."""
    texts = []
    for entry in entry_points(group=f"titanlike.{name}"):
        try:
            texts.append(entry.load()(**arguments))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  neither ends a run nor hides the error that ends it
            texts.append(f"{entry.name}: {type(error).__name__}: {error}")
    return [text for text in texts if text]
