"""Activation offload: what a block keeps for its backward pass is copied to host memory, and back ahead of that pass."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.parallelisms.blocks import Blocks, list_blocks
from titanlike.utils.dtensor import local_tensor

MIN_BYTES = 1 << 18  # of a tensor: a smaller one is not worth two copies
PLAIN = (Tensor, nn.Parameter)  # not weights in float8, nor other subclasses that consist of several tensors


def apply_activation_offload(blocks: Blocks) -> None:
    """Offloads the activations of all blocks but the last, whose backward pass follows its forward pass. Replaces `forward`, so
    that parameter names do not change. Apply it after activation checkpointing and the compiler, and before FSDP.

    The copies have streams of their own. The activations of a block are copied to the host while the next block computes, and back
    while the next block computes its gradients: two blocks have activations on the GPU at a time.
    """
    order = _Order()
    layers = list_blocks(blocks)
    for index, block in enumerate(layers):
        block.forward = partial(_forward, block.forward, block, index, order, offloads=index < len(layers) - 1)


class _Order:
    """The streams of the copies, and the forward pass of the last block that ran."""

    def __init__(self) -> None:
        self.last: _Pass | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Returns the streams of copies from and to a GPU: a link carries both directions at the same time."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


def _forward(
    forward: Any, block: nn.Module, index: int, order: _Order, *args: Any, offloads: bool, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    current = _Pass(block, index, order, offloads)
    with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
        out = forward(*args, **kwargs)
    current.end()
    return out


class _Host:
    """An activation in host memory."""

    def __init__(self, tensor: Tensor, key: object) -> None:
        self.device = tensor.device
        self.key, self.num_uses = key, 1
        self.source: Tensor | None = tensor  # until the copy is complete
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.fetched: Tensor | None = None  # the copy on the device, until the backward pass takes it


class _Pass:
    """The activations of a forward pass of a block."""

    def __init__(self, block: nn.Module, index: int, order: _Order, offloads: bool) -> None:
        weights = [local_tensor(parameter) for parameter in block.parameters()]
        # Of the weights' copies in another dtype, which the block may make itself. An activation with such a shape has the dtype of
        # the weights, unless the weights are those in float8.
        self._copies = {
            (shape, weight.dtype if type(weight) in PLAIN else None)
            for weight in weights
            for shape in (weight.shape, weight.shape[::-1])
        }
        self._storages = {_storage(weight) for weight in weights if type(weight) in PLAIN}
        self.index, self._order, self._offloads = index, order, offloads
        # Of the block before, unless a pipeline ran another stage or micro-batch in between.
        self._previous = order.last if order.last is not None and order.last.index == index - 1 else None
        self._references: list[weakref.ref[_Host]] = []  # the graph owns them
        self._copied: torch.cuda.Event | None = None
        self._fetched: torch.cuda.Event | None = None
        self._is_fetched = False

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | _Host:
        """Returns what autograd keeps of a tensor."""
        if not (self._offloads and self._is_activation(tensor)):
            return tensor
        key = _key(tensor)
        for host in self._hosts():
            if host.key == key:  # several operators keep the same tensor
                host.num_uses += 1
                return host
        host = _Host(tensor.detach(), key)
        if tensor.is_cuda:
            to_host, _ = self._order.streams(tensor.device)
            to_host.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(to_host):
                host.copy.copy_(tensor, non_blocking=True)
        else:
            host.copy.copy_(tensor)
        self._references.append(weakref.ref(host))
        return host

    def end(self) -> None:
        """Ends the forward pass: copies to the host of the block before are complete when what follows on the GPU runs."""
        for host in self._hosts():
            if host.device.type == "cuda":
                self._copied = self._order.streams(host.device)[0].record_event()
                break
        if self._order.last is not None:
            self._order.last.release()
        self._order.last = self if self._offloads else None

    def release(self) -> None:
        """Frees the device memory of the activations."""
        for host in self._hosts():
            if self._copied is not None:
                torch.cuda.current_stream(host.device).wait_event(self._copied)
            host.source = None

    @torch.no_grad()
    def fetch(self) -> None:
        """Starts to copy the activations to the device, unless that has been done."""
        if self._is_fetched:
            return
        self._is_fetched = True
        for host in self._hosts():
            host.fetched = torch.empty_like(host.copy, device=host.device)
            if host.device.type == "cuda":
                _, to_device = self._order.streams(host.device)
                to_device.wait_stream(torch.cuda.current_stream(host.device))  # which may have used the memory
                if self._copied is not None:
                    to_device.wait_event(self._copied)
                with torch.cuda.stream(to_device):
                    host.fetched.copy_(host.copy, non_blocking=True)
                self._fetched = to_device.record_event()
            else:
                host.fetched.copy_(host.copy)

    def unpack(self, packed: Tensor | _Host) -> Tensor:
        """Returns a tensor to the backward pass, and starts to copy the tensors of the block before."""
        self.fetch()
        if self._previous is not None:
            self._previous.fetch()
        if not isinstance(packed, _Host):
            return packed
        fetched = packed.fetched
        if fetched is None:  # a second backward pass, such as for the weights alone
            return packed.copy.to(packed.device)
        if self._fetched is not None:
            torch.cuda.current_stream(packed.device).wait_event(self._fetched)
        packed.num_uses -= 1
        if packed.num_uses == 0:  # the backward pass frees it
            packed.fetched = None
        return fetched

    def _hosts(self) -> Iterator[_Host]:
        """Yields the activations that the graph still has."""
        return filter(None, (reference() for reference in self._references))

    def _is_activation(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in PLAIN
            and tensor.nbytes >= MIN_BYTES
            and tensor.is_floating_point()
            and tensor.permute(*sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()
            and not any(tensor.shape == shape and tensor.dtype != dtype for shape, dtype in self._copies)
            and _storage(tensor) not in self._storages
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Identifies the values of a tensor that is alive."""
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
