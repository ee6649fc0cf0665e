"""Hostile files in a checkpoint directory are never executed."""

import hashlib
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, contents, copied, resume
from titanlike.checkpoint.format import CheckpointCorrupt
from titanlike.checkpoint.loader import read_manifest, read_state
from titanlike.checkpoint.store import LocalStore, manifest_hash


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forge(step: Path, files: dict[str, bytes], fields: dict[str, Any] | None = None) -> None:
    """Replaces files of a checkpoint, and updates the manifest to match."""
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["sha256"]
    for name, content in files.items():
        (step / name).write_bytes(content)
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest |= fields or {}
    (step / "manifest.json").write_text(json.dumps({**manifest, "sha256": manifest_hash(manifest)}))


def test_unrelated_pickles_are_ignored(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    hostile = pickle.dumps(Payload(tmp_path / "executed"))
    names = (".metadata", "__0_0.distcp", "data.pkl", "state.pt", "rank-00000.pt", "latest")
    for name in names:
        for folder in (checkpoints, checkpoints / "step-00000004", tmp_path / "runs/run"):
            (folder / name).write_bytes(hostile)
    for step in (checkpoints / "step-00000006", checkpoints / "step-00000008"):
        step.mkdir(exist_ok=True)
        (step / "manifest.json").write_bytes(hostile)
    job = resume(starter, tmp_path)
    assert "resumed at step 4\n" in job.output
    assert not (tmp_path / "executed").exists()
    for name in names:  # unchanged; deleted for the comparison, which allows no other files
        assert (checkpoints / "step-00000004" / name).read_bytes() == hostile
        (checkpoints / "step-00000004" / name).unlink()
    assert_as_undisturbed(tmp_path, undisturbed)


def test_a_pickle_with_a_valid_manifest_is_refused(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    hostile = pickle.dumps(Payload(tmp_path / "executed"))
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        forge(checkpoints / "step-00000006", {name: hostile})
    job = resume(starter, tmp_path)
    assert re.search("step-00000006/rank-0000[01].safetensors is corrupt: .*; falling back", job.output)
    assert "resumed at step 4\n" in job.output and "Traceback" not in job.output
    assert not (tmp_path / "executed").exists()
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"files": {"/etc/passwd": {"size": 0, "sha256": ""}}}, "unknown file names"),
        ({"files": {"rank-00000.safetensors\n": {"size": 0, "sha256": ""}}}, "unknown file names"),
        ({"files": {"rank-00000.safetensors": {"size": 0}}}, "a value in it is missing, unknown or of another type"),
        (
            {"files": {"rank-00000.safetensors": {"size": 0, "sha256": "", "more": 1}}},
            "a value in it is missing, unknown or of another type",
        ),
        ({"files": {}}, "state.json or rank-00000.safetensors is missing"),
        ({"files": []}, "a value in it is missing, unknown or of another type"),
        ({"files": None}, "a value in it is missing, unknown or of another type"),
        ({"step": 7}, "it belongs to step 7"),
    ],
)
def test_a_forged_manifest(undisturbed: Trained, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    forge(checkpoints / "step-00000006", {}, fields)
    with pytest.raises(CheckpointCorrupt, match=rf"step-00000006/manifest\.json is corrupt: .*{message}"):
        read_manifest(LocalStore(checkpoints), 6)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"3", b"\xff", b"[" * 100_000, pickle.dumps(Payload(Path("x")))])
def test_an_invalid_manifest(undisturbed: Trained, tmp_path: Path, text: bytes) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    (checkpoints / "step-00000006/manifest.json").write_bytes(text)
    with pytest.raises(CheckpointCorrupt, match=r"step-00000006/manifest\.json is corrupt: "):
        read_manifest(LocalStore(checkpoints), 6)


@pytest.mark.parametrize(
    "state", [b"[]", b'{"format": 1}', b'{"format": 1, "step": 6, "planted": 1}', b"\x80\x04\x95", b"[" * 100_000]
)
def test_a_forged_state(undisturbed: Trained, tmp_path: Path, state: bytes) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    forge(checkpoints / "step-00000006", {"state.json": state})
    read_manifest(LocalStore(checkpoints), 6)
    with pytest.raises(CheckpointCorrupt, match=r"step-00000006/state\.json is corrupt: "):
        read_state(LocalStore(checkpoints), 6)


@pytest.mark.slow
def test_a_checkpoint_of_a_later_format_is_refused(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    forge(checkpoints / "step-00000006", {}, {"format": 99})
    before = contents(tmp_path / "runs")
    job = starter.start(tmp_path)
    assert job.wait() == [2, 2]
    assert "step-00000006 has format 99; this version of titanlike reads format 1\n" in job.output
    assert contents(tmp_path / "runs") == before
