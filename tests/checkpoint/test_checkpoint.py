"""A resume: what it refuses and reports, the records of a resumed run, and interrupted writes to a run directory."""

import dataclasses
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints import MACHINE, drop_last, saved_by
from tests.launching import records
from tests.pool import Ranks, user_error
from tests.training import GPT_, resume, tiny, train
from titanlike.config import UserError
from titanlike.config.shipped import train_command
from titanlike.run.run import Run
from titanlike.run.run_dir import RunDirectory, _best_validation, machine_metadata
from titanlike.utils import atomic_write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(optimizer=dict(lr=0.5)), r"optimizer\.lr was 0\.01, now 0\.5"),
        (dict(program="mine/other.py"), r"program was \"pretrain\", now \"other\""),
        (dict(model=GPT_), r"model\.name was \"llama\", now \"gpt\""),
    ],
)
def test_a_recipe_that_trains_differently_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    saved = saved_by(tiny(tmp_path, "run"))
    with pytest.raises(
        UserError, match=f"holds a run at step 3 that was trained with another recipe: .*{message}.*--run.name"
    ):
        resume(saved, tiny(tmp_path, "run", **change), "abc", saved.layout, MACHINE)


def test_other_data_is_refused_and_inexact_changes_are_reported(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, "run")
    saved = saved_by(recipe)
    assert resume(saved, recipe, "abc", saved.layout, MACHINE) == []
    with pytest.raises(UserError, match=r"trained on other data \(fingerprint abc, now xyz\)"):
        resume(saved, recipe, "xyz", saved.layout, MACHINE)
    longer = tiny(
        tmp_path,
        "run",
        training=dict(steps=9),
        compile=dict(mode="block"),
        checkpoint=dict(allow_changed=("training.steps",)),
    )
    reported = resume(saved, longer, "abc", {"replicate": 1, "shard": 1}, {"device": "cuda", "torch": "2.11.0"})
    assert reported == [
        "training.steps was 5, now 9",
        'compile.mode was "none", now "block"',
        "layout.shard was 2, now 1",
        'device was "cpu", now "cuda"',
        'torch was "2.13.0", now "2.11.0"',
        "run.deterministic = false, and kernels of a GPU are not deterministic",
    ]
    shorter = tiny(tmp_path, "run", training=dict(steps=2))
    with pytest.raises(
        UserError, match=r"at step 3, past training\.steps = 2; set it to 3 or more, or give --run\.name"
    ):
        resume(saved, shorter, "abc", saved.layout, MACHINE)


def test_on_a_gpu_a_resume_is_exact_with_deterministic_kernels_and_equal_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake GPU."""
    versions = {"name": "NVIDIA H200", "cudnn": 91900, "nccl": (2, 28, 9)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: versions["name"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: versions["cudnn"])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: versions["nccl"])
    machine = machine_metadata(torch.device("cuda", 0))
    recipe = tiny(tmp_path, "run", run=dict(deterministic=True))
    saved = dataclasses.replace(saved_by(recipe), machine=machine)
    assert resume(saved, recipe, "abc", saved.layout, machine_metadata(torch.device("cuda", 0))) == []
    versions |= {"name": "NVIDIA H100", "cudnn": 91800, "nccl": (2, 27, 3)}
    assert resume(saved, recipe, "abc", saved.layout, machine_metadata(torch.device("cuda", 0))) == [
        'gpu was "NVIDIA H200", now "NVIDIA H100"',
        'cudnn was "91900", now "91800"',
        'nccl was "(2, 28, 9)", now "(2, 27, 3)"',
    ]
    (reason,) = resume(saved, tiny(tmp_path, "run"), "abc", saved.layout, machine)[-1:]
    assert reason == "run.deterministic = false, and kernels of a GPU are not deterministic"


def test_a_resumed_run_has_the_records_of_an_uninterrupted_run(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        metrics=dict(interval=4), checkpoint=dict(interval=5), training=dict(steps=10), validation=dict(interval=0)
    )
    recipe = tiny(tmp_path, "run", **options)

    def recorded() -> list[int]:
        return [record["step"] for record in records(tmp_path / "run") if "loss" in record]

    train(ranks(1), recipe)
    assert recorded() == [1, 4, 8, 10]
    drop_last(tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("ab") as file:
        file.write(b'5\n{"step": 9, "lo\xff')  # as after a kill or on a full disk
    train(ranks(1), recipe)
    assert recorded() == [1, 4, 8, 10]


def test_the_shutdown_message_shows_how_to_resume(ranks: Ranks, tmp_path: Path) -> None:
    recipe = tiny(tmp_path / "with space", "run")
    run = RunDirectory(recipe)
    assert run.shutdown_message() == "stopped before the first checkpoint"
    train(ranks(1), recipe)
    assert run.shutdown_message() == f"stopped; to resume from step 5: {train_command()} '{run.path}/recipe.toml'"


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
