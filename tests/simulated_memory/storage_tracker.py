"""Records when fake tensors are allocated and freed."""

import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Allocation:
    """A storage, or what it holds between two changes of its size."""

    size: int  # bytes
    begin: int  # index of the event
    operator: str
    phase: str  # in which it was allocated
    end: int | None = None
    freed_in: str = ""  # the phase


class StorageTracker(TorchDispatchMode):
    """Records the storages that operators return, from the outside: by operator, and by the current `phase`."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.phases: list[tuple[int, str]] = []  # the first event of each
        self.allocations: list[Allocation] = []
        self.now = 0
        self._live: dict[int, Allocation] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether the compiler compiles within this mode. Otherwise it would run the code as it is."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same in other versions of torch."""
        return True

    def begin(self, phase: str) -> None:
        """Begins a phase of the step."""
        self.phase = phase
        self.phases.append((self.now, phase))

    def __enter__(self) -> "StorageTracker":
        # FSDP frees and allocates unsharded parameters by resizing their storages.
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._free(storage._cdata)
                self._allocate(storage, size, "resize_")
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # which a program reads from any fake tensor: the stages of a pipeline vote, for example
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, str(func))
        return result

    def _see(self, tensor: Tensor, operator: str) -> None:
        """Records the storage of a tensor, or of the tensors that it wraps, unless they are known."""
        if is_traceable_wrapper_subclass(tensor):
            for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(inner, Tensor):  # a DTensor also has its mesh
                    self._see(inner, operator)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            weakref.finalize(storage, self._free, storage._cdata)
            self._allocate(storage, storage.nbytes(), operator)

    def _allocate(self, storage: torch.UntypedStorage, size: int, operator: str) -> None:
        self.now += 1
        self._live[storage._cdata] = allocation = Allocation(size, self.now, operator, self.phase)
        self.allocations.append(allocation)

    def _free(self, key: int) -> None:
        allocation = self._live.pop(key)
        self.now += 1
        allocation.end, allocation.freed_in = self.now, self.phase


def is_gathered(allocation: Allocation) -> bool:
    """Whether FSDP has allocated it: weights that it gathers, and the buffers of its collectives."""
    return allocation.operator.startswith(("resize_", "c10d", "fsdp", "aten.empty.", "aten.new_empty."))
