"""A checkpoint location that several runs name: one of them owns it, and the others are refused or stop, with an error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import contents, metadata, small_model
from tests.training import tiny, train_on_rank
from titanlike.checkpoint import CheckpointManager
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint
from titanlike.recipe import PretrainRecipe

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(params=["{}", "file://{}"], ids=["local", "remote"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A location for the checkpoints of all runs."""
    return str(request.param).format(tmp_path / "shared")


def recipe(folder: Path, shared: str, **checkpoint: Any) -> PretrainRecipe:
    local = dict(export="float32") if "://" not in shared else {}
    return tiny(
        folder, "run", training=dict(steps=4), schedule=dict(warmup_steps=1), validation=dict(interval=0),
        checkpoint=dict(dir=shared, interval=2, **local, **checkpoint),
    )  # fmt: skip


def test_a_run_of_the_same_name_in_another_directory_is_refused(tmp_path: Path, shared: str) -> None:
    train_on_rank(recipe(tmp_path / "a", shared))
    before = contents(tmp_path / "shared")
    expected = (
        rf"{shared}/run holds the checkpoints of the run {tmp_path}/a/run \(process \d+ on host .*, started .*\); give "
        r"--run.name or --checkpoint.dir to start another run, or --checkpoint.allow_changed='\[\"run.dir\"\]' to continue"
    )
    with pytest.raises(UserError, match=expected):
        train_on_rank(recipe(tmp_path / "b", shared))
    assert contents(tmp_path / "shared") == before
    assert not (tmp_path / "b/run").exists()  # in particular, no weights of the other run


def test_a_run_resumes_after_the_loss_and_after_a_move_of_its_directory(
    tmp_path: Path, shared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_on_rank(recipe(tmp_path / "a", shared))
    shutil.rmtree(tmp_path / "a")  # a new machine, with the same paths
    train_on_rank(recipe(tmp_path / "a", shared))
    assert "resumed at step 4" in capsys.readouterr().out
    (tmp_path / "a").rename(tmp_path / "b")
    train_on_rank(recipe(tmp_path / "b", shared))
    assert "resumed at step 4" in capsys.readouterr().out
    assert json.loads((tmp_path / "shared/run/owner.json").read_text())["run"] == str(tmp_path / "b/run")


def test_a_run_takes_over_if_the_user_allows_it(
    tmp_path: Path, shared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_on_rank(recipe(tmp_path / "a", shared))
    train_on_rank(recipe(tmp_path / "b", shared, allow_changed=("run.dir",)))
    assert "resumed at step 4" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"holds the checkpoints of the run {tmp_path}/b/run "):
        train_on_rank(recipe(tmp_path / "a", shared))


def test_a_run_that_still_trains_stops_when_another_one_takes_over(tmp_path: Path, shared: str) -> None:
    model, optimizer = small_model()
    section = Checkpoint(mode="sync", keep=9)
    first = CheckpointManager(shared, section, owner=tmp_path / "a")
    first.archive_after(0)
    first.save(model, optimizer, metadata(1))
    # The same directory on another machine: it cannot be distinguished from a restart there.
    shutil.rmtree(tmp_path / "a")
    second = CheckpointManager(shared, section, owner=tmp_path / "a")
    found = second.find()
    assert found and found.step == 1
    second.archive_after(1)
    second.save(model, optimizer, metadata(2))
    before = contents(tmp_path / "shared")
    with torch.no_grad():
        model.weight.fill_(7)
    taken_over = (
        rf"{shared} was taken over by the run {tmp_path}/a \(process \d+ on host .*; end one of the two, .* the last valid "
        "checkpoint is of step 1"
    )
    with pytest.raises(UserError, match=taken_over):  # at the first failure: the next save would fail, too
        first.save(model, optimizer, metadata(2))  # would replace the other's
    assert first.has_failed
    assert contents(tmp_path / "shared") == before
    if "://" not in shared:
        with pytest.raises(UserError, match="was taken over by the run"):
            first.newest()
    second.save(model, optimizer, metadata(3))
    second.wait()
    assert second.store.steps() == [1, 2, 3]


def test_of_two_runs_that_start_together_the_second_saves_and_the_first_stops(tmp_path: Path, shared: str) -> None:
    model, optimizer = small_model()
    first, second = (CheckpointManager(shared, Checkpoint(mode="sync"), owner=tmp_path / name) for name in "ab")
    assert first.find() is None and second.find() is None
    first.archive_after(0)
    with pytest.raises(UserError, match=f"holds the checkpoints of the run {tmp_path}/a "):
        second.archive_after(0)
    first.save(model, optimizer, metadata(1))
    first.wait(last=True)


def test_a_run_that_is_replaced_while_it_saves_publishes_nothing(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (CheckpointManager(shared, Checkpoint(mode="sync"), owner=tmp_path / "a") for _ in range(2))
    first.archive_after(0)
    begin = first.store.begin
    monkeypatch.setattr(first.store, "begin", lambda *of: (begin(*of), second.archive_after(0)))
    with pytest.raises(UserError, match="was taken over by the run"):
        first.save(*small_model(), metadata(1))
    assert second.store.steps() == []


def test_a_directory_that_disappears_during_training(tmp_path: Path, shared: str) -> None:
    """Such as an unmounted disk."""
    section = Checkpoint(mode="sync", max_failures=1)
    checkpoints = CheckpointManager(shared, section, owner=tmp_path / "a")
    checkpoints.archive_after(0)
    checkpoints.save(*small_model(), metadata(2))
    (tmp_path / "shared").rename(tmp_path / "lost")
    lost = f"{shared}/owner.json does not exist: the directory was moved or deleted during training; the last valid "
    with pytest.raises(UserError, match=lost):
        checkpoints.save(*small_model(), metadata(4))
    assert not (tmp_path / "shared").exists()
    (tmp_path / "lost").rename(tmp_path / "shared")
    assert CheckpointManager(shared, section, owner=tmp_path / "a").find() == metadata(2)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"run": 3}', "[" * 100_000, "\xff"])
def test_an_owner_that_cannot_be_read_is_refused(tmp_path: Path, shared: str, text: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/owner.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"shared/owner.json is not valid.*; delete it if no other run writes to "):
        CheckpointManager(shared, Checkpoint(), owner=tmp_path / "a").find()
