"""Python values that an optimizer keeps in the state of a parameter, and in options of parameter groups that it changes itself.

They are saved in `state.json` by the name of the parameter, so that they follow it to another pipeline stage or parameter group.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.checkpoint.format import CODES
from titanlike.checkpoint.reader import corrupt_unless_read
from titanlike.config import UserError
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.json_values import from_json, to_json
from titanlike.utils.modules import copies_of

NOT_SAVED = {"params", "lr", "initial_lr"}  # the learning rate follows from the recipe and the step


class OptimizerValues:
    """The Python values of one optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_new: bool) -> None:
        """Records the options of the parameter groups; an optimizer that is not new is compared with its defaults instead."""
        copies = copies_of(model)
        model.state_dict()  # FSDP reshards in this call
        self.optimizer = optimizer
        self.names: dict[Any, str] = {parameter: copies.get(name, name) for name, parameter in model.named_parameters()}
        self._defaults = _fingerprints(optimizer.defaults)
        self._initial = [_fingerprints(group) for group in optimizer.param_groups] if is_new else []
        self._is_checked = False
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        if not self._is_checked:
            self._is_checked = True
            self.as_text()

    def as_text(self) -> str:
        """Returns the values of this rank's parameters as JSON: of their "state", and changed "options" of their groups. Raises
        `UserError` if a checkpoint cannot hold the optimizer's state."""
        records: dict[str, dict[str, dict[str, Any]]] = {}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if parameter not in self.names:
                    raise UserError(f"optimizer.state has {key} of no parameter; keep it in optimizer.param_groups")
                name = self.names[parameter]
                what = f"optimizer state {key} of {name}"
                if isinstance(value, Tensor):
                    _check_tensor(what, parameter, value)
                else:
                    records.setdefault(name, {}).setdefault("state", {})[key] = _to_json(what, value)
        groups = itertools.zip_longest(self.optimizer.param_groups, self._initial, fillvalue=self._defaults)
        for group, initial in groups:
            changed = [key for key, now in _fingerprints(group).items() if initial.get(key) != now]
            options = {key: _to_json(f"the option {key}, which the optimizer changed,", group[key]) for key in changed}
            for name in [self.names[each] for each in group["params"] if each in self.names] if options else ():
                records.setdefault(name, {})["options"] = options
        return json.dumps(records, sort_keys=True)

    def load(self, records: Mapping[str, Any]) -> None:
        """Restores the values from the records of a checkpoint. The optimizer has taken a step without effect, which created its
        state."""
        with corrupt_unless_read("the optimizer's record in the checkpoint"):
            for parameter, name in self.names.items():
                state = self.optimizer.state[parameter]
                for key in [key for key, value in state.items() if not isinstance(value, Tensor)]:
                    del state[key]
                state |= {key: from_json(value) for key, value in records.get(name, {}).get("state", {}).items()}
                if not state:  # the parameter never had a gradient
                    del self.optimizer.state[parameter]
            for group in self.optimizer.param_groups:
                names = [self.names[parameter] for parameter in group["params"] if parameter in self.names]
                options = [records.get(name, {}).get("options", {}) for name in names]
                if len(set(map(repr, options))) > 1:
                    raise UserError(
                        f"the checkpoint has several values of options of the group of {names[0]}, which the optimizer changed; "
                        "use the parameter groups of the checkpoint"
                    )
                group |= {key: from_json(value) for key, value in (options or [{}])[0].items()}


def merge(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the parameters of all ranks. Raises `UserError` if they differ on ranks with the same parameter."""
    merged: dict[str, Any] = {}
    for rank, records in enumerate(map(json.loads, texts)):
        for name, record in records.items():
            other = merged.setdefault(name, record)
            if repr(other) != repr(record):
                raise UserError(
                    f"the optimizer's values of {name} differ across ranks: {record} on rank {rank}, {other} on one before it; "
                    "compute them from values that are equal on all ranks, for example after an all-reduce"
                )
    return dict(sorted(merged.items()))


def _check_tensor(what: str, parameter: Tensor, value: Tensor) -> None:
    if value.dtype not in CODES:
        raise UserError(f"{what} has dtype {value.dtype}, which cannot be saved; use another dtype")
    is_plain = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() != 1
    if is_plain and value.shape == local_tensor(parameter).shape != parameter.shape:
        raise UserError(
            f"{what} is a plain tensor with the shape {tuple(value.shape)} of this rank's shard, which cannot be resharded; "
            "create it by torch.zeros_like(parameter), which returns a DTensor"
        )


def _to_json(what: str, value: Any) -> Any:
    values = value if type(value) in (list, tuple) else [value]
    if not all(each is None or type(each) in (bool, int, float, str) for each in values):
        raise UserError(
            f"{what} is a {type(value).__name__}, which cannot be saved; use a tensor in the state of a parameter, or a number, "
            "bool, string or None, or a list or tuple of them"
        )
    return to_json(value)


def _fingerprints(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns texts that change with the options of a parameter group."""
    return {
        key: f"{id(value)} {value._version}" if isinstance(value, Tensor) else repr(value)
        for key, value in options.items()
        if key not in NOT_SAVED
    }
