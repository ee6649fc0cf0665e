"""Interrupted writes to a run directory, and to any file that is replaced atomically."""

from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist

from tests.pool import Ranks, user_error
from tests.training import tiny
from titanlike.config import UserError
from titanlike.run.run import Run
from titanlike.run.run_dir import RunDirectory, _best_validation
from titanlike.utils import atomic_write


@pytest.mark.parametrize("victim", ["recipe", "environment", "metrics"])
def test_interrupted_open_leaves_complete_files(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """A truncated recipe would still be valid, with default values for the missing keys."""
    recipe = tiny(tmp_path, "run")
    run = RunDirectory(recipe)
    run.open(torch.device("cpu"), resumed_step=0)
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    write_all = atomic_write.write_all

    def write_half(file: BinaryIO, content: bytes) -> None:
        if not Path(file.name).name.startswith(victim):
            return write_all(file, content)
        write_all(file, content[: len(content) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(atomic_write, "write_all", write_half)
    with pytest.raises(
        UserError, match=r"cannot write to .*run: the disk is full; fix this, or choose another run\.dir"
    ):
        run.open(torch.device("cpu"), resumed_step=2)
    kept = [path for path in before if path.stem == victim]
    assert kept and all(path.read_bytes() == before[path] for path in kept)
    assert {path for path in run.path.iterdir() if path.is_file()} == before.keys()


def test_a_run_whose_records_were_deleted_is_complete(tmp_path: Path) -> None:
    assert _best_validation(tmp_path / "metrics.jsonl") == f"{tmp_path}/metrics.jsonl was deleted during training"


def _error_of_another_recipe(folder: Path) -> str:
    recipe = tiny(folder, "run", training=dict(steps=3 + dist.get_rank()))
    return user_error(Run(recipe).__enter__)


def test_ranks_whose_recipes_differ_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    message = "the recipes of rank 1 and rank 0 differ in training.steps; give all ranks the same"
    assert ranks(2).run(_error_of_another_recipe, tmp_path) == [message] * 2
    assert not (tmp_path / "run").exists()
