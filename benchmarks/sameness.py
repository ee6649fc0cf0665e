"""Whether a run is whole, and whether two runs are the same to the bit, told from what they have left on the disk."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from titanlike.checkpoint import read_whole
from titanlike.checkpoint.format import CheckpointCorrupt, check
from titanlike.checkpoint.store import Folder, name_of, read_manifest


class Unsound(Exception):
    """What must not be, and is."""


def look(folder: Path, before: list[int], keep: int) -> list[int]:
    """Look at every checkpoint of a run that keeps so many: their steps. Raises `Unsound` if one is not whole, or is gone before
    so many newer ones replaced it."""
    store = Folder(folder / "checkpoints")
    steps = store.steps()
    for step in steps:
        try:
            for name, total in read_manifest(store, step).items():
                check(store.fetch(step, name), total, content=True)
        except CheckpointCorrupt as damage:
            raise Unsound(str(damage)) from None
    for step in before:
        newer = [other for other in steps if other > step]
        if step not in steps and len(newer) < keep:
            raise Unsound(f"the checkpoint of step {step} is gone, and newer than it are only those of {newer}")
    latest = store.path / "latest"
    if latest.exists() and latest.read_text().strip() not in map(name_of, steps):
        raise Unsound(f"{latest} names {latest.read_text().strip()}, which is not there")
    return steps


def half_done(folder: Path) -> dict[str, int]:
    """Folders that are being written or deleted, or were when that was cut short, with what tells one from the next."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder / "checkpoints"):
            if entry.name.endswith(".partial"):
                found[entry.name] = entry.inode()
    return found


def recorded(folder: Path) -> dict[int, list[float]]:
    """What is recorded of each step. Raises `Unsound` if one is there twice, or is missing between two."""
    found: dict[int, list[float]] = {}
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):  # the last line of a killed run may be cut short
            record = json.loads(line)
            if "loss" in record:
                if record["step"] != len(found) + 1:
                    raise Unsound(f"{file}: step {record['step']} follows step {len(found)}")
                found[record["step"]] = [record[name] for name in ("loss", "grad_norm", "learning_rate", "tokens")]
    return found


def hashes(checkpoint: Path) -> dict[str, str]:
    """Of every tensor in a checkpoint, whoever wrote which part."""
    found = {}
    for kind, tensors in read_whole(checkpoint).items():
        for name, tensor in tensors.items():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{kind}.{name}"] = hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + content).hexdigest()
    return found


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """All that is not to the bit the same in two finished runs: records of steps, weights, optimizer state."""
    found = _different(recorded(folder), recorded(undisturbed), "step ")
    steps = [max(Folder(run / "checkpoints").steps(), default=0) for run in (folder, undisturbed)]
    if steps[0] != steps[1] or 0 in steps:
        return [*found, f"the last checkpoint is that of step {steps[0]}, undisturbed {steps[1]}"]
    return found + _different(*(hashes(run / "checkpoints" / name_of(steps[0])) for run in (folder, undisturbed)))


def _different(one: Mapping[Any, Any], other: Mapping[Any, Any], word: str = "") -> list[str]:
    return [f"{word}{key}" for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
