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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
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
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        names = [entry.parent.name for entry in self.folder.glob("step-*/state.json")]
        return sorted(int(match.group(1)) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name)))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def _sync(folder: Path) -> None:
    """Have the renames in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
