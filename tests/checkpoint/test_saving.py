"""Asynchronous saves: consistency, failures, and distribution of shards over ranks."""

import errno
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints import metadata, small_model
from tests.durability import Disk
from tests.pool import Ranks
from tests.training import build, tiny
from titanlike.checkpoint import CheckpointManager
from titanlike.checkpoint.files import LocalFile
from titanlike.checkpoint.loader import read_whole
from titanlike.checkpoint.reader import read_header
from titanlike.checkpoint.staging import StagingBuffers
from titanlike.checkpoint.store import LocalStore
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint, Parallelism
from titanlike.optim.optimizer import build_optimizer
from titanlike.recipe import PretrainRecipe
from titanlike.utils.rng import seed_generators


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Delays commits until the event is set."""
    go = threading.Event()
    original = LocalStore.publish

    def delayed(self: LocalStore, step: int) -> None:
        assert go.wait(60)
        original(self, step)

    monkeypatch.setattr(LocalStore, "publish", delayed)
    yield go
    go.set()


def test_the_thread_that_writes_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread uses GPU 0. On a fake GPU 3."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    stage = StagingBuffers()
    stage.wait()
    assert calls == []
    stage._stream = SimpleNamespace(device=torch.device("cuda", 3))  # type: ignore[assignment]
    stage._arrival = SimpleNamespace(synchronize=lambda: calls.append("synchronize"))  # type: ignore[assignment]
    stage.wait()
    assert calls == [torch.device("cuda", 3), "synchronize"]


def test_an_asynchronous_save_is_a_snapshot(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with slow_disk(monkeypatch) as go, CheckpointManager(str(tmp_path), Checkpoint()) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1))
        assert checkpoints.poll() == []
        with torch.no_grad():
            model.weight.fill_(7)
        go.set()
        checkpoints.wait()
        (result,) = checkpoints.poll()
        assert (result.step, result.error, result.cleanup_error) == (1, "", "")
        assert 0 < result.stall < result.seconds
        assert checkpoints.poll() == []
    found = read_whole(tmp_path / "step-00000001")["model"]
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_a_checkpoint_survives_a_loss_of_power(alone: None, tmp_path: Path, disk: Disk) -> None:
    """Also one that replaces another one of its step."""
    model, optimizer = small_model()
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync")) as checkpoints:
        for _ in range(2):
            checkpoints.save(model, optimizer, metadata(1))
            disk.assert_published(tmp_path / "step-00000001")
            disk.renamed.clear()
    assert {path.name for path in (tmp_path / "step-00000001").iterdir()} == {
        "manifest.json", "rank-00000.safetensors", "state.json",
    }  # fmt: skip


def test_at_most_one_save_is_in_progress(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_model()
    with slow_disk(monkeypatch) as go, CheckpointManager(str(tmp_path), Checkpoint()) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1))
        threading.Timer(0.3, go.set).start()
        checkpoints.save(model, optimizer, metadata(2))  # waits
        assert [result.step for result in checkpoints.poll()] == [1]
        checkpoints.wait()
        assert checkpoints.poll()[0].stall > 0.2  # with the wait
    assert LocalStore(tmp_path).steps() == [1, 2]


def test_old_checkpoints_and_leftovers_are_deleted(alone: None, tmp_path: Path) -> None:
    (tmp_path / "step-00000001.partial").mkdir()
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync", keep=2, keep_every=4)) as checkpoints:
        for step in range(2, 10):
            checkpoints.save(*small_model(), metadata(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "step-00000004", "step-00000008", "step-00000009",
    ]  # fmt: skip
    assert (tmp_path / "latest").read_text() == "step-00000009\n"


def test_later_checkpoints_are_archived_by_a_run_that_saves(alone: None, tmp_path: Path) -> None:
    model, optimizer = small_model()
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync", keep=3)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(model, optimizer, metadata(step))
    CheckpointManager(str(tmp_path), Checkpoint(enabled=False)).archive_after(1)
    assert LocalStore(tmp_path).steps() == [1, 2, 3]
    CheckpointManager(str(tmp_path), Checkpoint()).archive_after(2)
    assert LocalStore(tmp_path).steps() == [1, 2]
    state = tmp_path / "step-00000002/state.json"
    state.write_text(state.read_text().replace('"tokens": 0', '"tokens": 7'))
    found = CheckpointManager(str(tmp_path), Checkpoint(verify="size")).find()  # the hash of the metadata all the same
    assert found is not None and found.step == 1


@pytest.mark.parametrize(("seconds", "warns"), [(29.9, False), (30.1, True)])
def test_a_save_that_takes_longer_than_the_shutdown_is_warned_of(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float, warns: bool
) -> None:
    with CheckpointManager(str(tmp_path), Checkpoint(), shutdown_timeout=30) as checkpoints:
        checkpoints._last_seconds = seconds
        checkpoints.save(*small_model(), metadata(1), wait=True)
    assert ("the last save took 30 s, but run.shutdown_timeout = 30" in capsys.readouterr().err) == warns


def test_exit_waits_for_the_save_in_progress(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_model()
    with (
        slow_disk(monkeypatch) as go,
        pytest.raises(UserError, match="other"),
        CheckpointManager(str(tmp_path), Checkpoint()) as checkpoints,
    ):
        checkpoints.save(model, optimizer, metadata(1))
        threading.Timer(0.3, go.set).start()
        raise UserError("another mistake")
    assert LocalStore(tmp_path).steps() == [1]


def test_consecutive_failures_are_counted_and_reset_by_a_success(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small_model()
    disk = {"full": False}
    original = LocalStore.create

    def create(self: LocalStore, step: int, file: str) -> Any:
        if disk["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, step, file)

    monkeypatch.setattr(LocalStore, "create", create)
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync", max_failures=3)) as checkpoints:
        for step, full in enumerate([False, True, True, False, True, True], start=1):
            disk["full"] = full
            checkpoints.save(model, optimizer, metadata(step))
        errors = [result.error for result in checkpoints.poll()]
        assert [bool(error) for error in errors] == [False, True, True, False, True, True]
        assert errors[1] == "rank 0: [Errno 28] No space left on device"
        assert LocalStore(tmp_path).steps() == [1, 4]
        assert not checkpoints.has_failed
        with pytest.raises(
            UserError,
            match=r"^3 consecutive saves failed: rank 0: .*No space left.*; the last valid checkpoint is of step 4$",
        ):
            checkpoints.save(model, optimizer, metadata(7))
        assert checkpoints.has_failed
    assert LocalStore(tmp_path).steps() == [1, 4]


def test_a_failure_of_the_last_save_is_an_error(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_model()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with CheckpointManager(str(tmp_path), Checkpoint()) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1))
        checkpoints.wait()
        with pytest.raises(
            UserError,
            match=r"the save failed: .* has 10 bytes free, but a checkpoint takes \d+; there is no checkpoint",
        ):
            checkpoints.wait(last=True)
    assert list(tmp_path.iterdir()) == []


def test_an_error_after_the_commit_is_not_a_failure(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalStore, step: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalStore, "remove", refuse)
    model, optimizer = small_model()
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync", keep=1)) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1))
        checkpoints.save(model, optimizer, metadata(2))
        results = checkpoints.poll()
    assert [(result.error, result.cleanup_error) for result in results] == [
        ("", ""),
        ("", "[Errno 13] Permission denied"),
    ]
    assert LocalStore(tmp_path).steps() == [1, 2]


def _save(recipe: PretrainRecipe, folder: Path) -> None:
    model, _ = build(recipe)
    with CheckpointManager(str(folder), Checkpoint(mode="sync")) as checkpoints:
        checkpoints.save(model, build_optimizer(model, recipe.optimizer), metadata(1))


def test_every_element_is_written_once_and_ranks_write_equal_shares(ranks: Ranks, tmp_path: Path) -> None:
    for name, layout in (
        ("fsdp", Parallelism(shard=4)),
        ("ddp", Parallelism(replicate=4, shard=1)),
        ("hsdp", Parallelism(replicate=2, shard=2)),
        ("pp", Parallelism(pipeline=2, shard=2)),
    ):
        (tmp_path / name).mkdir()
        recipe = tiny(tmp_path, "x", parallelism=layout)
        ranks(4).run(_save, recipe, tmp_path / name)
        files = sorted((tmp_path / name / "step-00000001").glob("*.safetensors"))
        sizes = []
        for file in files:
            content = file.read_bytes()
            (length,) = struct.unpack("<Q", content[:8])
            sizes.append(len(content) - length - 8)
        assert sum(sizes) == 4 * recipe.model.num_parameters(), name
        imbalance = 1.7 if name == "pp" else 1.1  # three blocks on two stages
        assert max(sizes) < imbalance * min(sizes), f"{name}: {sizes}"


def test_additional_modules_are_saved_and_loaded(alone: None, tmp_path: Path) -> None:
    model, optimizer = small_model()
    average, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync")) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1), average=average)
        with pytest.raises(UserError, match=r"call find\(\) before load"):
            checkpoints.load(model, optimizer, metadata(1), average=other)
        assert checkpoints.find() == metadata(1)
        checkpoints.load(model, optimizer, metadata(1), average=other)
        assert torch.equal(average.weight, other.weight)
        checkpoints.find()
        with pytest.raises(UserError, match=r"the checkpoint has no missing\.weight"):
            checkpoints.load(model, optimizer, metadata(1), missing=other)
    assert read_whole(tmp_path / "step-00000001").keys() == {"model", "optimizer", "average"}


class _OwnZeroGrad(torch.optim.AdamW):
    """Resets what it counts, as an optimizer without gradients does."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def test_loading_leaves_the_gradients_as_they_are(alone: None, tmp_path: Path) -> None:
    model, optimizer = small_model()
    other = torch.nn.Linear(4, 4)
    other_optimizer = _OwnZeroGrad(other.parameters(), lr=0.3)
    gradient = torch.ones(4, 4)
    other.weight.grad = gradient
    with CheckpointManager(str(tmp_path), Checkpoint(mode="sync")) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1))
        checkpoints.find()
        checkpoints.load(other, other_optimizer, metadata(1))
    assert other.weight.grad is gradient and bool((gradient == 1).all())
    assert other.bias.grad is None
    assert other_optimizer.param_groups[0]["lr"] == 0.3
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert all(torch.equal(value, other_optimizer.state[two][key]) for key, value in optimizer.state[one].items())


def _save_late_state(folder: Path) -> dict[str, list[str]]:
    """Returns the optimizer tensors in each file of the second save, before which a second layer gets its first gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(str(folder), Checkpoint(mode="sync")) as checkpoints:
        for step, layers in enumerate((model[0], model), start=1):
            layers(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(model, optimizer, metadata(step))
        first, second = checkpoints.poll()
        assert second.size > first.size
    full = read_whole(folder / "step-00000002")["optimizer"]
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(full[f"{name}.{key}"], value), name
    files = sorted((folder / "step-00000002").glob("*.safetensors"))
    return {
        file.name: [n for n in read_header(LocalFile(file)).entries if n.startswith("optimizer.1.")] for file in files
    }


def test_optimizer_state_created_after_the_first_save_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2).run(_save_late_state, tmp_path)[0]
    assert [len(names) for names in found.values()] == [
        6,
        6,
    ]  # three moments each of a weight and a bias, on both ranks


def _random_numbers(folder: Path) -> tuple[list[float], list[float]]:
    """Returns random numbers drawn after a save, and after loading it."""
    seed_generators(100 + dist.get_rank())
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(str(folder), Checkpoint(mode="sync")) as checkpoints:
        checkpoints.save(model, optimizer, metadata(1))
        expected = torch.rand(3).tolist()
        seed_generators(7)
        checkpoints.find()
        checkpoints.load(model, optimizer, metadata(1))
        return expected, torch.rand(3).tolist()


def test_each_rank_restores_its_random_generators(ranks: Ranks, tmp_path: Path) -> None:
    (first, first_again), (second, second_again) = ranks(2).run(_random_numbers, tmp_path)
    assert first_again == first != second == second_again
