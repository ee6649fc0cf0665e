"""What of a model and its optimizer is saved, by names that no layout changes."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from titanlike.checkpoint.format import CheckpointCorrupt, Entry, FileDigest, Reader, ShardRange, write_tensors
from titanlike.config import UserError
from titanlike.utils.dtensor import is_dtensor, local_tensor


def tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """All that is saved, "model." and "optimizer." before the names of the whole model: a copy of a parameter, as the last
    stage of a pipeline may have, goes by the name of that parameter. Of other modules, their own names before theirs."""
    copies: dict[str, str] = getattr(model, "copies", {})
    for name, value in model.state_dict().items():  # asked first: FSDP takes back what it has gathered
        yield f"model.{copies.get(name, name)}", value
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise UserError(f"the optimizer keeps {key} = {value!r} for {name}, but only tensors can be saved")
            yield f"optimizer.{copies.get(name, name)}.{key}", value
    for kind, module in others.items():
        for name, value in module.state_dict().items():
            yield f"{kind}.{name}", value


def place_of(tensor: Tensor) -> ShardRange:
    """Where this rank's part of a tensor lies in the whole."""
    if not is_dtensor(tensor):
        return ShardRange(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local_tensor(tensor).shape), "a rank has one box of a tensor"
    return ShardRange(tuple(tensor.shape), tuple(offset), tuple(shape))


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, nn.Module], reader: Reader) -> None:
    """Give a model, its optimizer and other modules the values of a checkpoint, whatever layout saved it."""
    _make_state(optimizer)
    for name, tensor in tensors(model, optimizer, others):
        mine = local_tensor(tensor)
        if mine.numel() and not reader.fill(name, mine, place_of(tensor)):
            if not name.startswith("optimizer."):
                raise CheckpointCorrupt(f"the checkpoint has no {name}")
            _forget(model, optimizer, name)
    for module in (model, *others.values()):  # who keeps what was made of the weights hears that these have changed
        module.load_state_dict({}, strict=False)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make what it keeps, by a step that goes nowhere."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _forget(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Of a parameter that never had a gradient nothing was kept."""
    for parameter_name, parameter in model.named_parameters():
        if name.startswith(f"optimizer.{parameter_name}."):
            optimizer.state.pop(parameter, None)


def read_whole(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """All tensors of a checkpoint, "model", "optimizer" and others, by name and without any layout. Needs no process group."""
    reader, entries = _open(checkpoint)
    found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, entry in entries.items():
        kind, _, key = name.partition(".")
        found.setdefault(kind, {})[key] = _read(reader, name, entry)
    return found


def consolidate(checkpoint: Path, file: Path, dtype: torch.dtype | None = None) -> FileDigest:
    """Write the weights of a checkpoint, whole, into one file that any reader of safetensors opens: in the precision that
    they have, or in `dtype`. There is no more than one tensor in memory at a time."""
    reader, entries = _open(checkpoint)
    weights = {name.removeprefix("model."): entry for name, entry in entries.items() if name.startswith("model.")}
    kinds = {name: (dtype or entry.dtype, entry.place.whole) for name, entry in weights.items()}
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb", buffering=0) as stream:
        written = write_tensors(
            stream,
            kinds,
            lambda name: _read(reader, f"model.{name}", weights[name]).to(kinds[name][0]),
            {"format": "pt"},
        )
        os.fsync(stream.fileno())
    partial.replace(file)
    return written


def _open(checkpoint: Path) -> tuple[Reader, dict[str, Entry]]:
    """The files of a checkpoint, and one of the pieces of each tensor in them."""
    files = sorted(checkpoint.glob("rank-*.safetensors"))
    if not files:
        raise UserError(f"{checkpoint} is not a checkpoint: there is no rank-*.safetensors in it")
    reader = Reader([lambda file=file: file for file in files])  # type: ignore[misc]
    return reader, {name: entry for header in reader.headers() for name, entry in header.entries.items()}


def _read(reader: Reader, name: str, entry: Entry) -> Tensor:
    whole = entry.place.whole
    values = torch.empty(whole, dtype=entry.dtype)
    reader.fill(name, values, ShardRange(whole, (0,) * len(whole), whole))
    return values
