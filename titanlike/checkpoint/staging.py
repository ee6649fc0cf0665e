"""The tensors of a checkpoint, under names that do not depend on the layout, their copy to host memory, and the assignment of
shards to ranks."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.checkpoint.format import ShardRange, ShardSpec
from titanlike.distributed import process_group
from titanlike.utils.compat import local_shape_and_offset
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.modules import copies_of


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors of a checkpoint: "model.NAME", "optimizer.NAME.KEY" and, for other modules, "MODULE.NAME". A copy of a
    parameter, such as a tied embedding on the last pipeline stage, has the name of that parameter."""
    copies = copies_of(model)
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


class StagingBuffers:
    """Host buffers for the shards that this rank writes, reused from save to save."""

    def __init__(self) -> None:
        self._arrival: torch.cuda.Event | None = None  # of the last copy from a GPU
        self.size = 0  # bytes that all ranks write
        self._ranges: dict[str, ShardRange] | None = None  # of all shards on this rank
        self._buffers: dict[str, Tensor] = {}  # of the shards that this rank writes
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensors: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> list[ShardSpec]:
        """Copies the shards that this rank writes to host memory, from a GPU asynchronously."""
        parts: dict[str, Tensor] = {}
        ranges: dict[str, ShardRange] = {}
        for name, tensor in tensors:
            part = local_tensor(tensor).detach()
            if part.numel():
                parts[name], ranges[name] = part, shard_range_of(tensor)
        if self._ranges is None:
            names, self.size = _assign(ranges, parts)
            self._buffers = {name: _host_buffer(parts[name]) for name in names}
        elif ranges != self._ranges:
            self._update(parts, ranges)
        self._ranges = ranges
        if any(part.is_cuda for part in parts.values()):
            self._copy_async(parts, optimizer)
        else:
            for name, buffer in self._buffers.items():
                buffer.copy_(parts[name])
        return [ShardSpec(name, ranges[name], buffer) for name, buffer in self._buffers.items()]

    def wait(self) -> None:
        """Waits until the last copy has arrived in host memory. Called by the thread that writes it."""
        if self._stream is not None and self._arrival is not None:
            torch.cuda.set_device(self._stream.device)  # new threads use GPU 0, and would allocate memory there
            self._arrival.synchronize()

    def _update(self, parts: Mapping[str, Tensor], ranges: Mapping[str, ShardRange]) -> None:
        """Has shards that are new since the assignment written by every rank that holds them: needs no communication."""
        assert self._ranges is not None
        new = [name for name, shard_range in ranges.items() if self._ranges.get(name) != shard_range]
        self._buffers |= {name: _host_buffer(parts[name]) for name in new}
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in parts}
        self.size += sum(parts[name].nbytes for name in new)

    def _copy_async(self, parts: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies on a side stream. The next forward and backward pass overlap it; the optimizer step waits for it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            optimizer.register_step_pre_hook(self._wait_for_copies)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, buffer in self._buffers.items():
                buffer.copy_(parts[name], non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def _wait_for_copies(self, *_: object) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)


def _host_buffer(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)


def _assign(ranges: Mapping[str, ShardRange], parts: Mapping[str, Tensor]) -> tuple[list[str], int]:
    """Assigns each shard to the rank with the fewest bytes to write, of those that hold it. Returns the names of the shards that
    this rank writes, and the number of bytes that all ranks write."""
    keys = {name: _key(f"{name} {shard_range.offset}") for name, shard_range in ranges.items()}
    holders: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for rank, held in enumerate(process_group.all_gather_object({keys[name]: parts[name].nbytes for name in ranges})):
        for key, size in held.items():
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load = [0] * process_group.world_size()
    writers: dict[int, int] = {}
    for key in sorted(holders, key=lambda key: (-sizes[key], key)):
        rank = min(holders[key], key=lambda rank: load[rank])
        writers[key] = rank
        load[rank] += sizes[key]
    return [name for name, key in keys.items() if writers[key] == dist.get_rank()], sum(load)


def _key(text: str) -> int:
    """Returns 64 bits that identify a shard, shorter than its name in the messages between ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
