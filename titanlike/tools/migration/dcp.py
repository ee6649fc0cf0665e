"""Directories of `torch.distributed.checkpoint` (DCP), read and written tensor by tensor. Nothing in them is trusted: of pickled
objects, only the classes that describe tensors are loaded."""

import pickle
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from titanlike.config import UserError
from titanlike.config.base import shown

METADATA = ".metadata"
# What the metadata consists of, besides dictionaries, lists and numbers.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Megatron-LM keeps the plans of the ranks.
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
}


class DCPFolder:
    """The tensors and values in a DCP directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / METADATA).is_file():
            inside = sorted(file.parent.name for file in path.glob(f"*/{METADATA}")) if path.is_dir() else []
            hint = f"; choose one of the checkpoints in it: {', '.join(inside)}" if inside else ""
            raise UserError(f"{path} is not a checkpoint of torch.distributed.checkpoint: it has no {METADATA}{hint}")
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.values: list[str] = []
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = entry
            else:
                self.values.append(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self.tensors[key].size)

    def read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Returns a part of a tensor."""
        dtype = self.tensors[key].properties.dtype
        target = torch.empty(shape, dtype=dtype)
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        items = create_read_items_for_chunk_list(key, self.tensors[key], [chunk])
        if sum(item.lengths.numel() for item in items) < target.numel():
            raise UserError(f"{self.path}: a part of {shown(key)} is missing")
        self._read(items, target)
        return target

    def value(self, key: str) -> Any:
        """Returns a value that is not a tensor: a number, a string, or a list or dictionary of them."""
        index = MetadataIndex(key)
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,)))
        return self._read([item], None)

    def _read(self, items: list[ReadItem], target: Tensor | None) -> Any:
        planner = _Target(target)
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{self.path}: {shown(items[0].storage_index.fqn)} cannot be read: {message}") from None
        return planner.value

    @cached_property
    def _metadata(self) -> Metadata:
        try:
            with (self.path / METADATA).open("rb") as stream:
                metadata = _Unpickler(stream).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError, TypeError) as error:
            raise UserError(f"{self.path / METADATA} cannot be read: {error}") from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"{self.path / METADATA} is not the metadata of a checkpoint")
        return metadata

    @cached_property
    def _reader(self) -> dcp.FileSystemReader:
        reader = dcp.FileSystemReader(self.path)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        return reader


class _Unpickler(pickle.Unpickler):
    """Loads the classes that describe tensors, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {shown(f'{module}.{name}')}, which is not loaded")


class _Target(dcp.DefaultLoadPlanner):
    """Receives what a reader reads: the parts of a tensor, or a value."""

    def __init__(self, tensor: Tensor | None) -> None:
        super().__init__()
        self.tensor = tensor
        self.value: Any = None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert self.tensor is not None
        part = tuple(
            slice(start, start + size) for start, size in zip(read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self.tensor[part]

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.value = torch.load(value, weights_only=True)


def write_dcp(path: Path, state: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
    """Writes a DCP directory. Tensors in `state` are on the meta device: `read` returns the values by key, right before they are
    written. Dictionaries may be nested; their keys are joined by dots."""

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.type == WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            return read(write_item.index.fqn)

    writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as no_dist asks for
        dcp.save(dict(state), storage_writer=writer, planner=Planner(), no_dist=True)
