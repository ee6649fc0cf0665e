"""Verification of the files of a run, and bit-exact comparison of two runs."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from titanlike.checkpoint.files import name_of
from titanlike.checkpoint.format import CheckpointCorrupt
from titanlike.checkpoint.loader import read_manifest, read_whole
from titanlike.checkpoint.reader import verify_file
from titanlike.checkpoint.store import LocalStore


class RunCorrupt(Exception):
    """The files of a run are not valid."""


def verify_run(folder: Path, before: list[int], keep: int) -> list[int]:
    """Verifies every checkpoint of a run that keeps `keep` of them, and returns their steps. Raises `RunCorrupt` if one is corrupt,
    or if one of `before` is missing though fewer than `keep` newer ones exist."""
    store = LocalStore(folder / "checkpoints")
    steps = store.steps()
    for step in steps:
        try:
            for name, digest in read_manifest(store, step).items():
                verify_file(store.open(step, name), digest, content=True)
        except CheckpointCorrupt as error:
            raise RunCorrupt(str(error)) from None
    for step in before:
        newer = [other for other in steps if other > step]
        if step not in steps and len(newer) < keep:
            raise RunCorrupt(
                f"the checkpoint of step {step} is missing, and the only newer ones are those of steps {newer}"
            )
    latest = store.path / "latest"
    if latest.exists() and latest.read_text().strip() not in map(name_of, steps):
        raise RunCorrupt(f"{latest} names {latest.read_text().strip()}, which does not exist")
    return steps


def incomplete_directories(folder: Path) -> dict[str, int]:
    """Returns the inodes of checkpoint directories whose writing or deletion is in progress or was interrupted, by name."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder / "checkpoints"):
            if entry.name.startswith("step-") and entry.name.endswith(".partial"):
                found[entry.name] = entry.inode()
    return found


def recorded_steps(folder: Path) -> dict[int, list[float]]:
    """Returns the recorded values of each step. Raises `RunCorrupt` if a step is recorded twice or is missing."""
    found: dict[int, list[float]] = {}
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):  # the last line of a killed run may be incomplete
            record = json.loads(line)
            if "loss" in record:
                if record["step"] != len(found) + 1:
                    raise RunCorrupt(f"{file}: step {record['step']} follows step {len(found)}")
                found[record["step"]] = [record[name] for name in ("loss", "grad_norm", "learning_rate", "tokens")]
    return found


def hashes(checkpoint: Path) -> dict[str, str]:
    """Returns the hashes of all full tensors of a checkpoint, which do not depend on the layout."""
    found = {}
    for module, tensors in read_whole(checkpoint).items():
        for name, tensor in tensors.items():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{module}.{name}"] = hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + content).hexdigest()
    return found


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """Returns the records, weights and optimizer states that are not bit-identical in two completed runs."""
    found = _different(recorded_steps(folder), recorded_steps(undisturbed), "step ")
    steps = [max(LocalStore(run / "checkpoints").steps(), default=0) for run in (folder, undisturbed)]
    if steps[0] != steps[1] or 0 in steps:
        return [*found, f"the last checkpoint is of step {steps[0]}, undisturbed {steps[1]}"]
    return found + _different(*(hashes(run / "checkpoints" / name_of(steps[0])) for run in (folder, undisturbed)))


def _different(one: Mapping[Any, Any], other: Mapping[Any, Any], prefix: str = "") -> list[str]:
    return [f"{prefix}{key}" for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
