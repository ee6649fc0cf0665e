"""Corrupt and hostile checkpoints: they are named, passed over and archived, and nothing in them is executed."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import contents, metadata, small_model
from titanlike.checkpoint import CheckpointManager
from titanlike.checkpoint.format import CheckpointCorrupt
from titanlike.checkpoint.loader import read_manifest, read_state
from titanlike.checkpoint.store import LocalStore, manifest_hash
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint

SHARD, MANIFEST, STATE = "rank-00000.safetensors", "manifest.json", "state.json"


@pytest.fixture
def saved(tmp_path: Path, alone: None) -> Path:
    """A directory with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    model, optimizer = small_model()
    with CheckpointManager(str(folder), Checkpoint(mode="sync", keep=9)) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(model, optimizer, metadata(step))
    return folder


def found_step(folder: Path, step: int = 0, verify: Any = "content") -> int:
    """Returns the step that a run resumes from, as it begins."""
    with CheckpointManager(str(folder), Checkpoint(mode="sync", keep=9, verify=verify)) as checkpoints:
        found = checkpoints.find(step)
        assert found is not None
        checkpoints.archive_after(found.step)
    return found.step


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * 0.9)] ^= 1
    path.write_bytes(content)


def zero(path: Path) -> None:
    """As a file system may leave a file after a power failure."""
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Replaces a file by that of another step, which is valid in itself."""
    shutil.copy(path.parent.with_name("step-00000004") / path.name, path)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        (SHARD, flip, " is corrupt: SHA-256 mismatch"),
        (SHARD, zero, " is corrupt: SHA-256 mismatch"),
        (SHARD, Path.unlink, " cannot be read: No such file or directory"),
        (MANIFEST, flip, " is corrupt: "),
        (MANIFEST, swap, " is corrupt: it belongs to step 4"),
        (STATE, swap, " is corrupt: SHA-256 mismatch"),
        (STATE, Path.unlink, " cannot be read: No such file or directory"),
    ],
)
def test_a_corrupt_checkpoint_is_named_and_archived(
    saved: Path, capsys: pytest.CaptureFixture[str], file: str, damage: Callable[[Path], Any], problem: str
) -> None:
    damage(saved / "step-00000006" / file)
    damaged = contents(saved / "step-00000006").values()
    assert found_step(saved) == 4
    fallback, archived = capsys.readouterr().err.splitlines()
    assert f"/step-00000006/{file}{problem}" in fallback
    assert fallback.endswith("; falling back to the previous checkpoint")
    assert archived == "warning: archived the checkpoint of step 6 as step-00000006.archived"
    # Not deleted: some of it may be recoverable.
    assert list(contents(saved / "step-00000006.archived").values()) == list(damaged)
    assert found_step(saved) == 4 and capsys.readouterr().err == ""


def test_several_corrupt_checkpoints_and_unrelated_files(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "step-00000004" / MANIFEST).unlink()
    zero(saved / "step-00000006" / SHARD)
    (saved / "latest").write_text("step-99999999\n")
    (saved / "step-00000008").write_text("a file")
    (saved / "step-00000010").mkdir()
    (saved / "step-00000012.partial").mkdir()
    assert found_step(saved) == 2
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.endswith("previous checkpoint")]
    assert [line.split("checkpoints/")[1][:13] for line in warnings] == [
        "step-00000010", "step-00000008", "step-00000006", "step-00000004",
    ]  # fmt: skip


def test_a_run_without_a_valid_checkpoint_is_refused_and_unchanged(saved: Path) -> None:
    for step in (2, 4, 6):
        flip(saved / f"step-{step:08d}" / SHARD)
    before = contents(saved)
    message = (
        rf"step-00000002/{SHARD} is corrupt: SHA-256 mismatch, and there is no earlier checkpoint; restore the file"
    )
    with pytest.raises(UserError, match=message):
        found_step(saved)
    assert contents(saved) == before


def test_resume_from_a_chosen_step(saved: Path) -> None:
    flip(saved / "step-00000004" / SHARD)
    before = contents(saved)
    with pytest.raises(UserError, match=r"resume_from = 3: no such checkpoint; .*checkpoints contains steps 2, 4, 6$"):
        found_step(saved, 3)
    with pytest.raises(
        UserError, match=rf"resume_from = 4: .*{SHARD} is corrupt: SHA-256 mismatch; choose another step"
    ):
        found_step(saved, 4)
    assert contents(saved) == before
    assert found_step(saved, 2) == 2
    assert {path.name for path in saved.iterdir()} == {
        "latest", "step-00000002", "step-00000004.archived", "step-00000006.archived",
    }  # fmt: skip


def test_verification_of_sizes_only(saved: Path) -> None:
    flip(saved / "step-00000006" / SHARD)
    assert found_step(saved, verify="size") == 6
    (saved / "step-00000006" / SHARD).write_bytes((saved / "step-00000006" / SHARD).read_bytes()[:-1])
    assert found_step(saved, verify="size") == 4


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forge(step: Path, files: dict[str, bytes], fields: dict[str, Any] | None = None) -> None:
    """Replaces files of a checkpoint, and updates the manifest to match."""
    manifest = json.loads((step / MANIFEST).read_text())
    del manifest["sha256"]
    for name, content in files.items():
        (step / name).write_bytes(content)
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest |= fields or {}
    (step / MANIFEST).write_text(json.dumps({**manifest, "sha256": manifest_hash(manifest)}))


def test_pickles_are_not_executed(saved: Path, tmp_path: Path) -> None:
    """Beside the files of a checkpoint, in the place of one, and of one that the manifest describes."""
    hostile = pickle.dumps(Payload(tmp_path / "executed"))
    for name in (".metadata", "__0_0.distcp", "data.pkl", "rank-00000.pt", "latest"):
        for folder in (saved, saved / "step-00000002"):
            (folder / name).write_bytes(hostile)
    (saved / "step-00000004" / MANIFEST).write_bytes(hostile)
    forge(saved / "step-00000006", {SHARD: hostile})
    assert found_step(saved) == 2
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"files": {"/etc/passwd": {"size": 0, "sha256": ""}}}, "unknown file names"),
        ({"files": {"rank-00000.safetensors\n": {"size": 0, "sha256": ""}}}, "unknown file names"),
        ({"files": {SHARD: {"size": 0}}}, "a value in it is missing, unknown or of another type"),
        ({"files": {}}, f"{STATE} or {SHARD} is missing"),
        ({"files": None}, "a value in it is missing, unknown or of another type"),
        ({"step": 7}, "it belongs to step 7"),
    ],
)
def test_a_forged_manifest(saved: Path, fields: dict[str, Any], message: str) -> None:
    forge(saved / "step-00000006", {}, fields)
    with pytest.raises(CheckpointCorrupt, match=rf"step-00000006/manifest\.json is corrupt: .*{message}"):
        read_manifest(LocalStore(saved), 6)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_an_invalid_manifest_or_state(saved: Path, text: bytes) -> None:
    forge(saved / "step-00000006", {STATE: text})
    read_manifest(LocalStore(saved), 6)
    with pytest.raises(CheckpointCorrupt, match=r"step-00000006/state\.json is corrupt: "):
        read_state(LocalStore(saved), 6)
    (saved / "step-00000006" / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointCorrupt, match=r"step-00000006/manifest\.json is corrupt: "):
        read_manifest(LocalStore(saved), 6)


def test_a_checkpoint_of_a_later_format_is_refused(saved: Path) -> None:
    forge(saved / "step-00000006", {}, {"format": 99})
    with pytest.raises(UserError, match=r"step-00000006 has format 99; this version of titanlike reads format 1$"):
        found_step(saved)
