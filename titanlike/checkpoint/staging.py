"""Copying what is to be saved to the host's memory, and agreeing on who writes what."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.checkpoint.format import ShardRange, ShardSpec
from titanlike.checkpoint.loader import place_of
from titanlike.distributed import process_group
from titanlike.utils.dtensor import local_tensor


class Stage:
    """What this rank writes, in the host's memory, which is kept from one save to the next."""

    def __init__(self) -> None:
        self.arrival: torch.cuda.Event | None = None  # of the last copy, where they come from a GPU
        self._known: dict[str, ShardRange] | None = None  # all that this rank has
        self._mine: dict[str, Tensor] = {}  # what it writes of that
        self._size = 0  # bytes that all ranks write
        self._stream: torch.cuda.Stream | None = None

    def take(
        self, named: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer
    ) -> tuple[list[ShardSpec], int]:
        """Copy what this rank writes. Returns that, and the number of bytes that all ranks write."""
        found = dict(named)
        parts = {name: local_tensor(tensor).detach() for name, tensor in found.items()}
        parts = {name: part for name, part in parts.items() if part.numel()}
        places = {name: place_of(found[name]) for name in parts}
        if self._known is None:
            self._known = places
            mine, self._size = _share(places, {name: part.nbytes for name, part in parts.items()})
            self._mine = {name: _host_memory(parts[name]) for name in mine}
        elif places != self._known:
            self._follow(parts, places)
        if any(part.is_cuda for part in parts.values()):
            self._copy_beside(parts, optimizer)
        else:
            for name, memory in self._mine.items():
                memory.copy_(parts[name])
        return [ShardSpec(name, places[name], memory) for name, memory in self._mine.items()], self._size

    def _follow(self, parts: Mapping[str, Tensor], places: dict[str, ShardRange]) -> None:
        """What is new since the ranks agreed is written by all that have it: they need not agree, and wait, at each save."""
        assert self._known is not None
        new = [name for name, place in places.items() if self._known.get(name) != place]
        self._mine |= {name: _host_memory(parts[name]) for name in new}
        self._mine = {name: memory for name, memory in self._mine.items() if name in parts}
        self._size += sum(parts[name].nbytes for name in new)
        self._known = places

    def _copy_beside(self, parts: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        """On a stream of its own: the next forward and backward pass run meanwhile, and the step that changes weights waits."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            optimizer.register_step_pre_hook(self._let_finish)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, memory in self._mine.items():
                memory.copy_(parts[name], non_blocking=True)
            self.arrival = torch.cuda.Event()
            self.arrival.record()

    def _let_finish(self, *_: object) -> None:
        if self.arrival is not None:
            torch.cuda.current_stream().wait_event(self.arrival)


def _host_memory(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)


def _share(places: Mapping[str, ShardRange], sizes: Mapping[str, int]) -> tuple[list[str], int]:
    """Who writes what: of the ranks that hold the same piece, the one that has least to write. Returns what this rank writes,
    and the bytes of all."""
    keys = {name: _key(name, place.offset) for name, place in places.items()}
    holders: dict[int, list[int]] = {}
    bytes_of: dict[int, int] = {}
    for rank, said in enumerate(process_group.all_gather_object({keys[name]: sizes[name] for name in places})):
        for key, size in said.items():
            holders.setdefault(key, []).append(rank)
            bytes_of[key] = size
    written = [0] * process_group.world_size()
    writer: dict[int, int] = {}
    for key in sorted(holders, key=lambda key: (-bytes_of[key], key)):
        rank = min(holders[key], key=lambda rank: written[rank])
        writer[key] = rank
        written[rank] += bytes_of[key]
    mine = dist.get_rank()
    return [name for name, key in keys.items() if writer[key] == mine], sum(written)


def _key(name: str, offset: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} {offset}".encode()).digest()[:8], "little")
