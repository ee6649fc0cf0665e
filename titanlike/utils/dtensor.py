"""Recognizing a DTensor without importing `torch.distributed.tensor`, which takes most of a second and which a single process
does not need. Where it has not been imported, no tensor can be one."""

import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """`isinstance(value, DTensor)`."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
