"""Restart from remote storage: the bytes that each rank reads, and damage that is found before training starts."""

import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoints import assert_equal_state
from tests.pool import Ranks, user_error
from tests.training import build, tiny
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.checkpoint.loader import read_whole
from titanlike.checkpoint.staging import named_tensors
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint, Parallelism
from titanlike.distributed import process_group
from titanlike.optim.optimizer import build_optimizer
from titanlike.utils.dtensor import local_tensor


class CountingFileSystem(LocalFileSystem):
    """A file system whose transfers are counted, by the name of the file."""

    protocol = "counted"
    read: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def _count(self, path: str, size: int) -> None:
        with self.lock:
            self.read[path.rpartition("/")[2]] += size

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        content = super().cat_file(path, start, end, **options)
        self._count(path, len(content))
        return content

    def get_file(self, path: str, target: str, **options: Any) -> None:  # type: ignore[override]
        super().get_file(path, target, **options)
        self._count(path, Path(target).stat().st_size)


def save(folder: Path, parallelism: Parallelism) -> None:
    recipe = tiny(folder, "", parallelism=parallelism)
    model, _ = build(recipe)
    optimizer = build_optimizer(model, recipe.optimizer)
    model(tokens=torch.arange(32)[None], labels=torch.arange(32)[None]).backward()
    optimizer.step()
    with CheckpointManager(f"file://{folder}/saved", Checkpoint()) as checkpoints:
        checkpoints.save(model, optimizer, CheckpointMetadata(step=3), wait=True)


def load(folder: Path, parallelism: Parallelism, verify: Any = "content") -> dict[str, Any]:
    """Loads on this rank, and saves to another directory. Returns the number of bytes of rank files that were read, and of the
    shards of this rank."""
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    CountingFileSystem.read.clear()
    recipe = tiny(folder, "", parallelism=parallelism, run=dict(seed=99))
    model, _ = build(recipe)
    optimizer = build_optimizer(model, recipe.optimizer)
    with CheckpointManager(f"counted://{folder}/saved", Checkpoint(verify=verify)) as checkpoints:
        metadata = checkpoints.find()
        assert metadata is not None
        checkpoints.load(model, optimizer, metadata)
        left = [path for path in checkpoints.store._downloads.rglob("*")]  # type: ignore[union-attr]
    files = {name: size for name, size in CountingFileSystem.read.items() if name.startswith("rank-")}
    tensors = dict(named_tensors(model, optimizer, {}))
    target = folder / "loaded"
    target.mkdir(exist_ok=True)
    process_group.barrier()
    with CheckpointManager(str(target), Checkpoint()) as others:
        others.save(model, optimizer, metadata, wait=True)
    needed = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
    return {"files": files, "read": sum(files.values()), "needed": needed, "left": len(left)}


def find_on_a_full_disk(folder: Path, temporary: Path) -> tuple[str, int]:
    """Returns the error of a download into a directory without space, and the number of files that were written there."""
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    CountingFileSystem.read.clear()
    usage = shutil.disk_usage(folder)._replace(free=5000)  # takes the manifest
    with (
        mock.patch.object(tempfile, "tempdir", str(temporary)),
        mock.patch.object(shutil, "disk_usage", lambda _: usage),
    ):
        checkpoints = CheckpointManager(f"counted://{folder}/saved", Checkpoint())
        with checkpoints, pytest.raises(UserError) as error_info:
            checkpoints.find()
    return str(error_info.value), sum(
        CountingFileSystem.read[name] for name in CountingFileSystem.read if "rank-" in name
    )


def test_free_space_is_checked_before_a_download(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, FSDP)
    (tmp_path / "temporary").mkdir()
    for error, downloaded in ranks(2).run(find_on_a_full_disk, tmp_path, tmp_path / "temporary"):
        assert downloaded == 0
        assert error.startswith(
            f"{tmp_path / 'temporary'} has 5,000 bytes free, but counted://{tmp_path}/saved/step-00000003/rank-"
        )
        assert "; set TMPDIR to a directory with more space, or checkpoint.verify = 'size'" in error


SCALARS = 4 * 30  # steps of AdamW, one for each parameter
FSDP, TP = Parallelism(shard=-1), Parallelism(tensor=2, shard=-1)


@pytest.mark.parametrize(
    ("saver", "loader", "layout"),
    [
        (4, 4, FSDP),
        (4, 2, FSDP),
        pytest.param(2, 4, FSDP, marks=pytest.mark.slow),
        pytest.param(2, 4, TP, marks=pytest.mark.slow),
    ],
    ids=["same", "fewer", "more", "tensor"],
)
def test_a_rank_reads_its_shards_and_its_share_of_the_verification(
    ranks: Ranks, tmp_path: Path, saver: int, loader: int, layout: Parallelism
) -> None:
    ranks(saver).run(save, tmp_path, FSDP)
    largest = max(path.stat().st_size for path in (tmp_path / "saved/step-00000003").glob("rank-*"))
    found = ranks(loader).run(load, tmp_path, layout)
    for rank in found:
        share = -(-saver // loader) * largest
        if layout is TP:  # of weights sharded over columns, whole rows are read
            assert rank["read"] < share + 1.5 * rank["needed"]
        elif saver % loader == 0:  # what it verifies is what it needs, except for scalars, which one rank saves
            assert rank["read"] <= share + SCALARS
        else:
            assert rank["read"] <= share + rank["needed"]
        assert rank["left"] == 0
    before, after = (read_whole(tmp_path / name / "step-00000003") for name in ("saved", "loaded"))
    assert_equal_state(after, before)


def refusal(folder: Path) -> str:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    with CheckpointManager(f"counted://{folder}/saved", Checkpoint()) as checkpoints:
        return user_error(checkpoints.find)


def test_every_rank_is_told_of_a_flipped_bit_that_one_rank_finds(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(save, tmp_path, FSDP)
    path = tmp_path / "saved/step-00000003/rank-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for error in ranks(2).run(refusal, tmp_path):
        assert error.startswith(f"counted://{tmp_path}/saved/step-00000003/rank-00002.safetensors is corrupt: SHA-256")
