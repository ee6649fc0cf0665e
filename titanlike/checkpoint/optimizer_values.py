"""What an optimizer keeps besides tensors that are sharded like its parameters: Python values in the state of a parameter, options
of parameter groups that it changes itself, and plain tensors, which must be equal on all ranks.

Tensors are saved in the files of the ranks. Python values are saved in `state.json` by parameter, so that they follow the parameter
to another pipeline stage or parameter group.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.checkpoint.format import CODES, CheckpointCorrupt
from titanlike.config import UserError
from titanlike.distributed import process_group
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.json_values import from_json, is_exact, to_json

SUPPORTED = "a number, bool, string or None, or lists, tuples and dicts of those"
NOT_SAVED = {"params", "lr", "initial_lr"}  # the learning rate is that of the recipe and the step


class ValuesDiffer(UserError):
    """Ranks that hold a parameter have different values in its optimizer state."""


class OptimizerValues:
    """The Python values and plain tensors of one optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_new: bool) -> None:
        """Records the options of the parameter groups. Those of an optimizer that is not new are taken to have been its
        defaults."""
        copies: dict[str, str] = getattr(model, "copies", {})
        model.state_dict()  # FSDP reshards in this call
        self.optimizer = optimizer
        self.names: dict[Any, str] = {parameter: copies.get(name, name) for name, parameter in model.named_parameters()}
        defaults = _comparable(optimizer.defaults)
        self._initial = [_comparable(group) if is_new else defaults for group in optimizer.param_groups]
        self._defaults = defaults
        self._is_checked = False
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        if not self._is_checked:
            self._is_checked = True
            self.check()

    def check(self) -> None:
        """Raises `UserError` if a checkpoint cannot hold the optimizer's state."""
        for parameter, state in self.optimizer.state.items():
            name = self.names.get(parameter)
            if name is None and state:
                raise UserError(
                    f"optimizer.state has values of {_describe(parameter)}, which is not a parameter of the model; keep values "
                    "that belong to no parameter in optimizer.param_groups"
                )
            for key, value in state.items():
                if not isinstance(key, str):
                    raise UserError(f"optimizer state {key!r} of {name} cannot be saved; use a string as its key")
                _check_value(parameter, f"optimizer state {key} of {name}", value)
        for group, changed in zip(self.optimizer.param_groups, self._changed_options(), strict=True):
            for key, value in changed.items():
                if not is_exact(value):
                    members = (
                        f"the parameter group of {self.names.get(next(iter(group['params']), None), 'no parameter')}"
                    )
                    raise UserError(
                        f"the optimizer changed option {key} of {members} to a {type(value).__name__}, which cannot be saved; "
                        f"use {SUPPORTED}"
                    )

    def _changed_options(self) -> list[dict[str, Any]]:
        """Returns the options of each parameter group whose values are not the initial ones."""
        groups = self.optimizer.param_groups
        initial = self._initial + [self._defaults] * (len(groups) - len(self._initial))
        return [
            {key: group[key] for key, value in _comparable(group).items() if before.get(key) != value}
            for group, before in zip(groups, initial, strict=True)
        ]

    def as_text(self) -> str:
        """Returns the values of this rank's parameters as JSON: those to save, and those of plain tensors, to compare.
        Raises `UserError` if a checkpoint cannot hold the optimizer's state."""
        self.check()
        records: dict[str, dict[str, dict[str, Any]]] = {}
        scalars: list[tuple[str, str, Tensor]] = []
        for parameter, name in self.names.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                record = records.setdefault(name, {})
                if not isinstance(value, Tensor):
                    record.setdefault("state", {})[key] = to_json(value)
                elif not isinstance(value, DTensor) and value.dim() == 0:
                    scalars.append((name, key, value))
                elif not isinstance(value, DTensor) and isinstance(parameter, DTensor):
                    record.setdefault("compared", {})[key] = _digest(value)
        for group, changed in zip(self.optimizer.param_groups, self._changed_options(), strict=True):
            options = {key: to_json(value) for key, value in changed.items()}
            for parameter in group["params"] if options else ():
                if parameter in self.names:
                    records.setdefault(self.names[parameter], {})["options"] = options
        for (name, key, _), number in zip(scalars, _numbers([value for *_, value in scalars]), strict=True):
            records[name].setdefault("compared", {})[key] = number
        return json.dumps(records, sort_keys=True)

    def load(self, records: Mapping[str, Any]) -> None:
        """Restores the Python values from the records of a checkpoint. The optimizer has taken a step without effect, which
        created its state."""
        try:
            records = {
                name: {
                    kind: {key: from_json(value) for key, value in values.items()} for kind, values in record.items()
                }
                for name, record in records.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"the optimizer's values in the checkpoint are corrupt: {error}") from None
        for parameter, name in self.names.items():
            saved = records.get(name, {}).get("state", {})
            unsaved = {
                key for key, value in self.optimizer.state.get(parameter, {}).items() if not isinstance(value, Tensor)
            }
            if unsaved and not saved:  # the parameter never had a gradient
                del self.optimizer.state[parameter]
            elif saved:
                state = self.optimizer.state[parameter]
                for key in unsaved - saved.keys():
                    del state[key]
                state.update(copy.deepcopy(saved))  # copies of a parameter have the same name
        for group in self.optimizer.param_groups:
            names = [self.names[parameter] for parameter in group["params"] if parameter in self.names]
            group.update(copy.deepcopy(_options(records, names)))


def merge(text: str, exchange: Callable[[str], Sequence[str]]) -> dict[str, Any]:
    """Returns the values to save of the parameters of all ranks, from those of this rank. Raises `ValuesDiffer` if they differ on
    ranks with the same parameter. `exchange` returns the texts of all ranks."""
    digests = exchange(hashlib.sha256(text.encode()).hexdigest())
    # Most ranks have equal values: of these, one sends them.
    texts = exchange(text if digests.index(digests[process_group.rank()]) == process_group.rank() else "{}")
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, values in enumerate(map(json.loads, texts)):
        for name, record in values.items():
            first, other = found.setdefault(name, (rank, record))
            for kind in record.keys() | other.keys():
                _compare(name, kind, (first, other.get(kind, {})), (rank, record.get(kind, {})))
    saved = {name: {k: v for k, v in record.items() if k != "compared"} for name, (_, record) in sorted(found.items())}
    return {name: record for name, record in saved.items() if record}


def _compare(name: str, kind: str, one: tuple[int, dict[str, Any]], other: tuple[int, dict[str, Any]]) -> None:
    (first, expected), (rank, found) = one, other
    for key in sorted(expected.keys() | found.keys()):
        texts = [json.dumps(values[key]) if key in values else "no value" for values in (expected, found)]
        if texts[0] != texts[1]:
            what = f"option {key} of the parameter group" if kind == "options" else f"optimizer state {key}"
            raise ValuesDiffer(
                f"{what} of {name} differs across ranks: {texts[0]} on rank {first}, {texts[1]} on rank {rank}; compute it from "
                "values that are equal on all ranks, for example after an all-reduce, or make it a DTensor"
            )


def _options(records: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the saved options of a parameter group. A group without parameters, as on some pipeline stages, has those that all
    parameters of the checkpoint agree on."""
    options = [records.get(name, {}).get("options", {}) for name in names or records]
    first: dict[str, Any] = options[0] if options else {}
    if not names:
        return {
            key: value for key, value in first.items() if all(repr(other.get(key)) == repr(value) for other in options)
        }
    for name, other in zip(names, options, strict=True):
        for key in sorted(first.keys() | other.keys()):
            if repr(first.get(key)) != repr(other.get(key)):
                raise UserError(
                    f"the checkpoint has option {key} = {first.get(key)!r} for {names[0]} and {other.get(key)!r} for {name}, which "
                    "are in one parameter group now; use the parameter groups of the checkpoint"
                )
    return first


def _check_value(parameter: Tensor, what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        if not is_exact(value):
            raise UserError(f"{what} is a {type(value).__name__}, which cannot be saved; use a tensor, or {SUPPORTED}")
        return
    if value.dtype not in CODES:
        raise UserError(f"{what} has dtype {value.dtype}, which cannot be saved; use another dtype")
    is_plain = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() != 1
    if is_plain and value.shape == local_tensor(parameter).shape != parameter.shape:
        raise UserError(
            f"{what} is a plain tensor with the shape {tuple(value.shape)} of this rank's shard, which cannot be resharded; "
            "create it by torch.zeros_like(parameter), which returns a DTensor"
        )


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in a form in which a later change is visible. Of other objects than values and tensors, only the identity is
    compared."""
    return {key: _comparable_value(value) for key, value in options.items() if key not in NOT_SAVED}


def _comparable_value(value: Any) -> Any:
    if is_exact(value):
        return json.dumps(to_json(value))
    return _digest(value) if isinstance(value, Tensor) else id(value)


def _digest(tensor: Tensor) -> str:
    values = local_tensor(tensor).detach().cpu().contiguous()
    content = values.view(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def _numbers(scalars: Sequence[Tensor]) -> list[Any]:
    """Returns the values of 0-d tensors, with one transfer for each device and dtype."""
    numbers: list[Any] = [None] * len(scalars)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(scalars):
        kinds.setdefault((value.device, value.dtype), []).append(index)
    for indices in kinds.values():
        for index, number in zip(indices, torch.stack([scalars[i].detach() for i in indices]).tolist(), strict=True):
            numbers[index] = number
    return numbers


def _describe(key: object) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
