"""What a run has come to, and that it is what a run comes to that nothing happened to."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.faults.faulty import Fault
from tests.faults.starting import Job, Starter
from tests.launching import losses, records
from titanlike.checkpoint import format, read_whole, store


@dataclass(frozen=True)
class Trained:
    """A run's folder and, bit for bit, what it learned."""

    folder: Path
    losses: dict[int, float]
    validation: list[tuple[int, float]]
    hashes: dict[int, str]  # of weights and optimizer state, by step


def trained(folder: Path, checkpoints: Path | None = None) -> Trained:
    """Read what a job in this folder has left."""
    run = folder / "runs" / "run"
    checkpoints = checkpoints or run / "checkpoints"
    return Trained(
        folder=folder,
        losses=losses(run),
        validation=[(one["step"], one["validation_loss"]) for one in records(run) if "validation_loss" in one],
        hashes={step: digest(checkpoints / store.name_of(step)) for step in whole_steps(checkpoints)},
    )


def whole_steps(checkpoints: Path) -> list[int]:
    """The steps that are there, after a look at every byte of them: what is there is whole."""
    place = store.Folder(checkpoints)
    for step in place.steps():
        files = store.read_manifest(place, step)
        assert {path.name for path in (checkpoints / store.name_of(step)).iterdir()} == {*files, store.MANIFEST}
        for name, expected in files.items():
            format.check(place.fetch(step, name), expected, content=True)
        assert store.read_state(place, step).step == step
    return place.steps()


def digest(checkpoint: Path) -> str:
    """A hash of all weights and all that the optimizer keeps."""
    found = hashlib.sha256()
    for kind, tensors in sorted(read_whole(checkpoint).items()):
        assert tensors, f"{checkpoint} has no {kind}"
        for name, value in sorted(tensors.items()):
            found.update(f"{kind} {name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def assert_as_undisturbed(folder: Path, undisturbed: Trained, checkpoints: Path | None = None) -> None:
    """The run ended as the one that nothing happened to, and left nothing lying about."""
    found = trained(folder, checkpoints)
    assert found.losses == undisturbed.losses
    assert found.validation == undisturbed.validation
    assert max(found.hashes) == max(undisturbed.hashes)
    for step, one in found.hashes.items():
        assert one == undisturbed.hashes.get(step, one), f"step {step} is not what it should be"
    lying = checkpoints or folder / "runs" / "run" / "checkpoints"
    assert not [path.name for path in lying.iterdir() if path.suffix in (".partial", ".new")]


def resume(starter: Starter, folder: Path, *faults: Fault, **overrides: str) -> Job:
    """Take the run up, and see it end."""
    job = starter.start(folder, *faults, **overrides)
    assert job.wait() == [0, 0], job.said
    return job
