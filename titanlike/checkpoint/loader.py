"""Checkpoint contents: the tensors of a model and its optimizer, under names that do not depend on the layout."""

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.checkpoint.files import LocalFile
from titanlike.checkpoint.format import CheckpointCorrupt, Entry, Reader, ShardRange, read_header
from titanlike.checkpoint.optimizer_values import OptimizerValues
from titanlike.config import UserError
from titanlike.utils.compat import local_shape_and_offset
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.json_values import is_exact


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors of a checkpoint: "model.NAME", "optimizer.NAME.KEY" and, for other modules, "MODULE.NAME". A copy of a
    parameter, such as a tied embedding on the last pipeline stage, has the name of that parameter."""
    copies: dict[str, str] = getattr(model, "copies", {})
    for name, value in model.state_dict().items():  # before named_parameters: FSDP reshards in this call
        yield f"model.{copies.get(name, name)}", value
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{copies.get(name, name)}.{key}", value
    for module_name, module in others.items():
        for name, value in module.state_dict().items():
            yield f"{module_name}.{name}", value


def shard_range_of(tensor: Tensor) -> ShardRange:
    """Returns the position of this rank's shard in the global tensor."""
    if not isinstance(tensor, DTensor):
        return ShardRange(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = local_shape_and_offset(tensor)
    assert tuple(shape) == tuple(local_tensor(tensor).shape), "the shards of a rank must be contiguous in the tensor"
    return ShardRange(tuple(tensor.shape), tuple(offset), tuple(shape))


@torch.no_grad()
def load_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, nn.Module],
    reader: Reader,
    values: OptimizerValues,
    records: Mapping[str, Any],
    *,
    num_threads: int = 1,
) -> None:
    """Loads a checkpoint into a model, its optimizer and other modules, whatever layout saved it. `records` are the values of the
    optimizer that are not tensors. `num_threads` tensors are read at a time."""
    _initialize_state(optimizer)
    copies: dict[str, str] = getattr(model, "copies", {})
    parameters = {copies.get(name, name): parameter for name, parameter in model.named_parameters()}
    shards = [
        (name, local.detach(), shard_range_of(tensor))
        for name, tensor in named_tensors(model, optimizer, others)
        if (local := local_tensor(tensor)).numel()
    ]

    def fill(name: str, local: Tensor, shard_range: ShardRange) -> bool:
        with torch.cuda.device_of(local):  # new threads use GPU 0
            return reader.fill(name, local, shard_range)

    with ThreadPoolExecutor(num_threads) as threads:
        found = list(threads.map(lambda shard: fill(*shard), shards))
    values.load(records)
    for (name, *_), was_found in zip(shards, found, strict=True):
        if not was_found:
            if not name.startswith("optimizer."):
                raise CheckpointCorrupt(f"the checkpoint has no {name}")
            # A parameter that never had a gradient has no optimizer state.
            optimizer.state.pop(parameters[name.removeprefix("optimizer.").rpartition(".")[0]], None)
    for module in (
        model,
        *others.values(),
    ):  # runs load_state_dict hooks, which refresh what is derived from the weights
        module.load_state_dict({}, strict=False)


def _initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state by a step with zero gradients and a learning rate of 0. The gradients are those of before, and
    options of parameter groups that the optimizer changes in this step are reset."""
    options = [
        {key: copy.deepcopy(value) if is_exact(value) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    gradients = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in gradients:  # an optimizer's own `zero_grad` may keep them
        parameter.grad = gradient
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - before.keys() - {"params"}:
            del group[key]
        group.update(before)


def read_whole(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the full tensors of a checkpoint, by module ("model", "optimizer", ...) and name. Needs no process group."""
    reader, entries = _open(checkpoint)
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, entry in entries.items():
        module, _, key = name.partition(".")
        tensors.setdefault(module, {})[key] = _read_full(reader, name, entry)
    return tensors


def _open(checkpoint: Path) -> tuple[Reader, dict[str, Entry]]:
    """Returns a reader of a checkpoint, and one of the shards of every tensor."""
    files = sorted(checkpoint.glob("rank-*.safetensors"))
    if not files:
        raise UserError(f"{checkpoint} is not a checkpoint: it contains no rank-*.safetensors")
    reader = Reader(read_header(LocalFile(file)) for file in files)
    return reader, {name: entry for header in reader.headers for name, entry in header.entries.items()}


def _read_full(reader: Reader, name: str, entry: Entry) -> Tensor:
    shape = entry.global_shape
    values = torch.empty(shape, dtype=entry.dtype)
    reader.fill(name, values, ShardRange(shape, (0,) * len(shape), shape))
    return values
