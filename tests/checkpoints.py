"""Checkpoints of tests: saved under one layout and loaded under another, compared to the bit."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.training import build, resume, tiny
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.checkpoint.loader import read_whole
from titanlike.config import UserError
from titanlike.optim.optimizer import build_optimizer
from titanlike.recipe import PretrainRecipe
from titanlike.run.run_dir import RunDirectory, recipe_as_json
from titanlike.tools.verify.recipe import Result


def assert_equal_state(found: Any, expected: Any) -> None:
    """Asserts that two checkpoints have the same tensors, to the bit."""
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        assert not [name for name, value in tensors.items() if not torch.equal(value, found[kind][name])], kind


def assert_identical(found: Result, expected: Result) -> None:
    """Asserts that two runs have the same results, to the bit."""
    assert found.losses == expected.losses
    assert found.gradient_norms == expected.gradient_norms
    assert found.validation == expected.validation
    assert_equal_state(found.state, expected.state)


def saved_steps(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


def drop_last(folder: Path) -> None:
    """Deletes the last checkpoint, as if the run had been killed before it."""
    shutil.rmtree(saved_steps(folder)[-1])


def _load_and_save(recipe: PretrainRecipe, folder: Path) -> None:
    other = dataclasses.replace(recipe.run, seed=99)  # initial values that differ from the saved ones
    model, _ = build(dataclasses.replace(recipe, run=other))
    optimizer = build_optimizer(model, recipe.optimizer)
    checkpoints = CheckpointManager(RunDirectory(recipe).checkpoints, recipe.checkpoint)
    saved = checkpoints.find()
    assert saved is not None
    checkpoints.load(model, optimizer, saved)
    with CheckpointManager(str(folder), recipe.checkpoint) as others:
        others.save(model, optimizer, saved, wait=True)


def reshard(pool: Pool, saver: PretrainRecipe, loader: PretrainRecipe, folder: Path) -> Any:
    """Returns the tensors of the checkpoint that `loader`, under its layout, saves after it has loaded that of `saver`."""
    folder.mkdir(parents=True)
    pool.run(_load_and_save, dataclasses.replace(loader, run=saver.run), folder)
    (step,) = folder.glob("step-*")
    return read_whole(step)


MACHINE = {"device": "cpu", "torch": "2.13.0"}


def saved_by(recipe: PretrainRecipe) -> CheckpointMetadata:
    """Returns the metadata of a checkpoint of step 3."""
    layout = {"replicate": 1, "shard": 2}
    return CheckpointMetadata(step=3, recipe=recipe_as_json(recipe), data="abc", layout=layout, machine=MACHINE)


def small_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def metadata(step: int) -> CheckpointMetadata:
    return CheckpointMetadata(step, {}, "", {}, {})


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the content of each file below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(folder: Path, saved: Any, **sections: Any) -> str:
    with pytest.raises(UserError) as error:
        resume(saved, tiny(folder, "run", **sections), "abc", saved.layout, MACHINE)
    return str(error.value)


def allowed(folder: Path, saved: Any, **sections: Any) -> list[str]:
    return resume(saved, tiny(folder, "run", **sections), "abc", saved.layout, MACHINE)
