"""The checkpoints of one run: a folder a step, either complete or not there.

A save writes into a folder of another name and renames it when every rank is done, so that a process killed in between
leaves the earlier checkpoints as they were. Tensors are saved by torch.distributed.checkpoint under their plain names,
so another layout can read them; everything else is `state.json`.
"""

import dataclasses
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from titanlike import distributed
from titanlike.config import UserError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself."""

    step: int
    recipe: dict[str, Any]
    data: str  # fingerprint
    layout: dict[str, int]
    machine: dict[str, str]  # kind of device, version of torch


class Checkpoints:
    """Saves and loads under one folder, keeping the newest few."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def latest(self) -> Saved | None:
        """The newest complete checkpoint, as rank 0 sees it."""
        found = None
        if distributed.is_main():
            steps = self._steps()
            found = Saved(**json.loads((self._path(steps[-1]) / "state.json").read_text())) if steps else None
        return distributed.agree(found)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved) -> Path:
        """Save all ranks' weights and optimizer state. Complete when this returns, absent if it does not."""
        path = self._path(saved.step)
        partial = path.with_name(path.name + ".partial")
        if distributed.is_main():
            if not self.folder.is_dir():
                raise UserError(f"{self.folder} is gone: the run's folder was moved or deleted while it trained")
            for leftover in self.folder.glob("*.partial"):
                shutil.rmtree(leftover)
            partial.mkdir()
        distributed.barrier()
        # One thread a rank: with several, torch 2.13 still reports success when a thread meets a full disk.
        dcp.save(_state(model, optimizer), storage_writer=dcp.FileSystemWriter(partial, thread_count=1))
        if distributed.is_main():
            (partial / "state.json").write_text(json.dumps(dataclasses.asdict(saved), indent=1))
            if path.exists():
                shutil.rmtree(path)
            partial.rename(path)
            _sync(self.folder)
            for step in self._steps()[: -self.keep]:
                shutil.rmtree(self._path(step))
        distributed.barrier()
        return path

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Read this rank's share of a checkpoint into the model and the optimizer, whatever layout saved it."""
        state = _state(model, optimizer)
        dcp.load(state, storage_reader=dcp.FileSystemReader(self._path(step)))
        set_model_state_dict(model, _with_copies(model, state["model"]))
        set_optimizer_state_dict(model, optimizer, _with_copies(model, state["optimizer"]), options=FLAT)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        names = [entry.parent.name for entry in self.folder.glob("step-*/state.json")]
        return sorted(int(match.group(1)) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name)))


def read_whole(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """All tensors of a checkpoint, "model" and "optimizer", by name and without any layout. Needs no process group."""
    reader = dcp.FileSystemReader(checkpoint)
    found: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        kind, _, key = name.partition(".")
        if isinstance(entry, TensorStorageMetadata):
            found[kind][key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that is saved, under the names of the whole model: a copy of a parameter goes by the name of that parameter."""
    state: dict[str, dict[str, Any]] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    for copied, original in getattr(model, "copies", {}).items():
        for values in state.values():
            for key in _of(copied, values):
                values[key.replace(copied, original, 1)] = values.pop(key)
    return state


def _with_copies(model: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """The way back: each copy is given what was saved of its original, which may or may not be here too."""
    here = {name for name, _ in model.named_parameters()}
    for copied, original in getattr(model, "copies", {}).items():
        for key in _of(original, values):
            value = values[key] if original in here else values.pop(key)
            values[key.replace(original, copied, 1)] = value.clone() if isinstance(value, torch.Tensor) else value
    return values


def _of(parameter: str, values: dict[str, Any]) -> list[str]:
    return [key for key in values if re.fullmatch(rf"((state|param_groups)\.)?{re.escape(parameter)}(\..*)?", key)]


def _sync(folder: Path) -> None:
    """Have the renames in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
