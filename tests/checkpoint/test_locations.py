"""Checkpoint locations that are full, read-only or unreachable when a run resumes, and names that are taken by something else."""

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.training import tiny, train_on_rank
from titanlike.checkpoint.files import LocalFile
from titanlike.checkpoint.remote import RemoteStore
from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe
from titanlike.utils import atomic_write

pytestmark = pytest.mark.usefixtures("alone")
LOCAL_FILES: Any = fsspec.get_filesystem_class("file")


def recipe(folder: Path, **checkpoint: Any) -> PretrainRecipe:
    return tiny(
        folder, "run", training=dict(steps=4), schedule=dict(warmup_steps=1), validation=dict(interval=0),
        checkpoint=dict(interval=2, **checkpoint),
    )  # fmt: skip


def directory(path: Path) -> None:
    if path.exists():
        path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize(
    ("name", "occupy"),
    [
        ("step-00000004.partial", Path.touch),
        ("step-00000002.partial", link),
        pytest.param("step-00000002.removed.partial", Path.touch, marks=pytest.mark.slow),
        pytest.param("step-00000004.archived", Path.touch, marks=pytest.mark.slow),
        ("step-00000004.archived", link),
    ],
)
def test_a_name_that_something_else_has(tmp_path: Path, name: str, occupy: Callable[[Path], None]) -> None:
    """A run that resumes from step 2 archives step 4, and saves it again."""
    train_on_rank(recipe(tmp_path))
    occupy(tmp_path / "run/checkpoints" / name)
    train_on_rank(recipe(tmp_path, resume_from=2))
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {"latest", "step-00000002", "step-00000004", "step-00000004.archived"}


@pytest.mark.parametrize("name", ["latest", "latest.partial"])
def test_latest_cannot_be_written(tmp_path: Path, name: str) -> None:
    train_on_rank(recipe(tmp_path))
    directory(tmp_path / "run/checkpoints" / name)
    with pytest.raises(UserError, match=r"run/checkpoints cannot be used: .*Is a directory: .*latest"):
        train_on_rank(recipe(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_location_that_is_full_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    train_on_rank(recipe(tmp_path, dir=str(tmp_path / "shared")))
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" in mode and path.is_relative_to(tmp_path / "shared"):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr(atomic_write.Path, "open", refuse)
    with pytest.raises(UserError, match=rf"checkpoint.dir: .*shared/run cannot be used: .*{os.strerror(number)}"):
        train_on_rank(recipe(tmp_path, dir=str(tmp_path / "shared")))


@pytest.mark.parametrize("method", ["glob", "cat_file", "get_file", "pipe_file"])
def test_a_store_that_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """No checkpoint is taken for corrupt, and none is archived."""
    options = dict(dir=f"file://{tmp_path}/shared")
    train_on_rank(recipe(tmp_path, **options))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(LOCAL_FILES, method, refuse)
    with pytest.raises(UserError, match=r"shared/run.* cannot be (used|downloaded): .*Connection refused"):
        train_on_rank(recipe(tmp_path, **options))
    assert not list((tmp_path / "shared/run").rglob("*.archived"))


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above: an error of a disk or an NFS server says nothing about the checkpoint."""
    train_on_rank(recipe(tmp_path))

    def refuse(file: LocalFile, *_: int) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), file.name)

    monkeypatch.setattr(LocalFile, "read", refuse)
    with pytest.raises(UserError, match=r"step-00000004/.* cannot be read: Stale file handle"):
        train_on_rank(recipe(tmp_path))
    assert not list((tmp_path / "run").rglob("*.archived"))


def test_an_archived_checkpoint_in_a_store_stays(tmp_path: Path) -> None:
    shared = tmp_path / "shared/run"
    options = dict(dir=f"file://{tmp_path}/shared")
    train_on_rank(recipe(tmp_path, **options))
    archived = shared / "step-00000004.archived"
    for _ in range(2):  # it replaces an earlier archive
        expected = {path.name: path.read_bytes() for path in (shared / "step-00000004").iterdir()}
        train_on_rank(recipe(tmp_path, resume_from=2, **options))
        assert {path.name: path.read_bytes() for path in archived.iterdir()} == expected
    assert sorted(path.name for path in shared.glob("step-*")) == ["step-00000002", "step-00000004", archived.name]


class CachedListings(LOCAL_FILES):  # type: ignore[misc]
    """Remembers listings, as file systems of stores do, also for whether a file exists."""

    cachable = False

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **options)
        return self.dircache[path] if detail else [entry["name"] for entry in self.dircache[path]]

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        if path not in self.ls(path.rpartition("/")[0]):
            raise FileNotFoundError(path)
        return super().cat_file(path, *arguments, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_a_store_sees_what_others_write(tmp_path: Path) -> None:
    """File systems remember listings."""
    writer, reader = (RemoteStore(f"file://{tmp_path}/shared") for _ in range(2))
    for store in (writer, reader):
        store.files = CachedListings()
    for step in (1, 2):
        writer.begin(step, 1)
        with writer.create(step, "manifest.json") as file:
            file.write(b"{}")
        assert reader.steps() == list(range(1, step))
        writer.publish(step)
    reader.begin(3, 1)  # deletes what interrupted saves left, to which step 2 no longer belongs
    reader.begin(4, 1)
    assert reader.steps() == [1, 2]
    assert reader.read_file("owner.json") is None
    writer.write_file("owner.json", "one")
    assert reader.read_file("owner.json") == b"one"
    with reader.create(4, "manifest.json") as file:
        file.write(b"{}")
    assert reader.steps() == [1, 2]
    with reader.create(4, "state.json") as file:
        file.write(b"{}")
    reader.publish(4)
    changes: list[str] = []
    for name in ("rm_file", "cp_file"):
        original = getattr(reader.files, name)
        reader.files.__dict__[name] = lambda path, *to, call=original: (
            changes.append(to[0] if to else path),
            call(path, *to),
        )
    reader.archive(4)  # a checkpoint loses its manifest first, and gets it last
    assert [path.rpartition("/")[2] for path in changes] == ["state.json", "manifest.json"]
    assert reader.steps() == [1, 2]
    assert {path.name for path in (tmp_path / "shared/step-00000004.archived").iterdir()} == {
        "manifest.json",
        "state.json",
    }
    changes.clear()
    reader.remove(2)
    assert changes[0].endswith("step-00000002/manifest.json") and reader.steps() == [1]
    reader.files.mv(f"{reader.root}/step-00000001/manifest.json", f"{reader.root}/step-00000001/manifest.json.archived")
    reader.begin(5, 1)  # keeps one whose archiving was interrupted
    assert (tmp_path / "shared/step-00000001/manifest.json.archived").exists()
    downloads = reader._downloads
    assert downloads.exists()
    del reader, store
    gc.collect()
    assert not downloads.exists()


def test_unreachable_store_after_ctrl_c(tmp_path: Path) -> None:
    from titanlike.run.run_dir import RunDirectory

    (tmp_path / "run").touch()
    assert RunDirectory(recipe(tmp_path, dir=str(tmp_path / "run"))).shutdown_message() == (
        f"stopped; {tmp_path}/run/run cannot be read: [Errno 20] Not a directory: '{tmp_path}/run/run'"
    )
