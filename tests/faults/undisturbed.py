"""Results of a run, and their comparison with an undisturbed run."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.faults.faulty import Fault
from tests.faults.starting import Job, Starter
from tests.launching import losses, records
from titanlike.checkpoint import loader, reader, store
from titanlike.checkpoint.files import MANIFEST, name_of


@dataclass(frozen=True)
class Trained:
    """Directory and results of a run, compared bit for bit."""

    folder: Path
    losses: dict[int, float]
    validation: list[tuple[int, float]]
    hashes: dict[int, dict[str, str]]  # of each tensor of weights and optimizer state, by step


def trained(folder: Path, checkpoints: Path | None = None) -> Trained:
    """Reads the results of a job in this directory."""
    run = folder / "runs" / "run"
    checkpoints = checkpoints or run / "checkpoints"
    return Trained(
        folder=folder,
        losses=losses(run),
        validation=[(one["step"], one["validation_loss"]) for one in records(run) if "validation_loss" in one],
        hashes={step: digest(checkpoints / name_of(step)) for step in valid_steps(checkpoints)},
    )


def valid_steps(checkpoints: Path) -> list[int]:
    """Returns the steps of all checkpoints, after verifying every byte of them."""
    local = store.LocalStore(checkpoints)
    for step in local.steps():
        files = loader.read_manifest(local, step)
        assert {path.name for path in (checkpoints / name_of(step)).iterdir()} == {*files, MANIFEST}
        for name, expected in files.items():
            reader.verify_file(local.open(step, name), expected, content=True)
        assert loader.read_state(local, step).step == step
    return local.steps()


def digest(checkpoint: Path) -> dict[str, str]:
    """Returns a hash of each tensor of weights and optimizer state."""
    found = {}
    for module, tensors in loader.read_whole(checkpoint).items():
        assert tensors, f"{checkpoint} has no {module}"
        for name, value in tensors.items():
            content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{module} {name} {value.dtype} {tuple(value.shape)}"] = hashlib.sha256(content).hexdigest()
    return found


def assert_as_undisturbed(folder: Path, undisturbed: Trained, checkpoints: Path | None = None) -> None:
    """Asserts that a run has the results of the undisturbed run, and left no temporary files."""
    found = trained(folder, checkpoints)
    assert found.losses == undisturbed.losses
    assert found.validation == undisturbed.validation
    assert max(found.hashes) == max(undisturbed.hashes)
    for step in found.hashes.keys() & undisturbed.hashes:
        assert found.hashes[step] == undisturbed.hashes[step], f"the checkpoint of step {step}"
    directory = checkpoints or folder / "runs" / "run" / "checkpoints"
    assert not [path.name for path in directory.iterdir() if path.suffix in (".partial", ".new")]


def resume(starter: Starter, folder: Path, *faults: Fault, **overrides: str) -> Job:
    """Resumes a run and waits for it to complete."""
    job = starter.start(folder, *faults, **overrides)
    assert job.wait() == [0, 0], job.output
    return job


def warnings_of(output: str) -> list[str]:
    """Returns the warnings of a job, but not that a rank is slow: other processes use the cores of the machine, too."""
    return [line for line in output.splitlines() if "warning" in line and "is slow" not in line]
