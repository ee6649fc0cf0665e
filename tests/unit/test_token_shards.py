"""Token shards: reads across boundaries, loss masks, local and remote folders, and the errors of damaged ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.web import Web, web
from titanlike.config import UserError
from titanlike.data.text import files
from titanlike.data.token_shards import TRAIN, Manifest, Shards, ShardWriter, read_manifest

LENGTHS = [[5, 3, 4], [1], [7, 2]]  # of the documents of each shard
PROMPTS = [[2, 0, 4], [0], [0, 1]]
TOKENS = np.arange(22)
LABELS = np.array([c == "1" for c in "0011111100001111111101"])


def write(folder: Path, dtype: Any = np.uint16, prompts: bool = True) -> Manifest:
    folder.mkdir()
    shards, start = [], 0
    for number, lengths in enumerate(LENGTHS):
        writer = ShardWriter(folder, f"train-{number:05d}", dtype)
        for length, num_prompt in zip(lengths, PROMPTS[number], strict=True):
            writer.add(TOKENS[start : start + length], num_prompt if prompts else 0)
            start += length
        shards.append(writer.close())
    manifest = Manifest(np.dtype(dtype).name, {"fingerprint": "f"}, {TRAIN: shards}, {})
    manifest.write(folder)
    return manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(files, "RETRY_DELAY", 0.01)
    with web() as served:
        served.files |= {f"s/{path.name}": path.read_bytes() for path in folder.iterdir()}
        yield served


def check_all(shards: Shards) -> None:
    """Compares every range of several lengths with the tokens that were written."""
    assert (shards.num_tokens, shards.num_documents) == (22, 6)
    for length in (1, 2, 5, 9, 22):
        starts = np.arange(22 - length + 1)
        rows = starts[:, None] + np.arange(length)
        np.testing.assert_array_equal(shards.read(starts, length), TOKENS[rows])
        loss_mask = shards.loss_mask(starts, length)
        assert loss_mask is not None
        np.testing.assert_array_equal(loss_mask, LABELS[rows])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_reads_cross_shard_boundaries(tmp_path: Path, dtype: Any) -> None:
    write(tmp_path / "s", dtype)
    shards = Shards(str(tmp_path / "s"))
    check_all(shards)
    assert shards.dtype == dtype
    shards.verify()
    assert [shard.prompt_tokens for shard in shards.shards] == [6, 0, 1]


def test_shards_without_prompts_have_no_loss_mask(tmp_path: Path) -> None:
    write(tmp_path / "s", prompts=False)
    assert Shards(str(tmp_path / "s")).loss_mask(np.array([0, 3]), 5) is None


def test_the_files_are_plain_little_endian_arrays(folder: Path) -> None:
    assert (folder / "train-00002.tokens").read_bytes() == np.arange(13, 22, dtype="<u2").tobytes()
    assert np.fromfile(folder / "train-00000.documents", "<i8").tolist() == [5, 2, 8, 5, 12, 12]


def test_a_document_may_be_added_in_parts(tmp_path: Path, folder: Path) -> None:
    writer = ShardWriter(tmp_path, "train-00000", np.uint16)
    for first, stop, num_prompt, last in (
        (0, 3, 2, False),
        (3, 3, 0, False),
        (3, 5, 0, True),
        (5, 8, 0, True),
        (8, 12, 4, True),
    ):
        writer.add(TOKENS[first:stop], num_prompt, last=last)
    assert writer.close() == read_manifest(str(folder)).splits[TRAIN][0]


def test_files_have_temporary_names_until_they_are_complete(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train-00000", np.uint16)
    writer.add(np.arange(ShardWriter.BUFFER + 1))
    assert {path.suffix for path in tmp_path.iterdir()} == {".partial"}
    writer.drop()
    assert not list(tmp_path.iterdir())


def test_remote_shards_are_read_by_byte_range(server: Web) -> None:
    shards = Shards(f"{server.address}/s")
    check_all(shards)
    server.asked.clear()
    assert shards.read(np.array([10]), 6).tolist() == [list(range(10, 16))]
    ranges = {(path, wanted) for path, wanted in server.asked if wanted != "HEAD"}
    assert ranges == {
        ("s/train-00000.tokens", "bytes=20-23"), ("s/train-00001.tokens", "bytes=0-1"), ("s/train-00002.tokens", "bytes=0-5")
    }  # fmt: skip
    shards.verify()
    server.failures = 2
    assert shards.read(np.array([0]), 3).tolist() == [[0, 1, 2]]
    server.files["s/train-00002.tokens"] = b"\0\0"
    with pytest.raises(UserError, match=r"s/train-00002\.tokens ends at byte 2, before byte 6; copy it again"):
        shards.read(np.array([10]), 6)
    del server.files["s/train-00002.tokens"]
    with pytest.raises(UserError, match=r"/s: a file no longer exists: .*train-00002\.tokens"):
        shards.read(np.array([10]), 6)


def test_files_that_differ_from_the_manifest_are_errors(folder: Path) -> None:
    path = folder / "train-00000.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(
        UserError, match=r"s/train-00000\.tokens is truncated: it has 22 bytes, but the manifest says 24; copy"
    ):
        Shards(str(folder))
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=r"s/train-00000\.tokens is too long: it has 25 bytes"):
        Shards(str(folder))
    path.write_bytes(content[:-1] + b"\7")
    with pytest.raises(
        UserError, match=r"s/train-00000\.tokens does not match its hash in the manifest; copy it again"
    ):
        Shards(str(folder)).verify()
    path.write_bytes(content)
    (folder / "train-00001.documents").unlink()
    with pytest.raises(UserError, match=r"s/train-00001\.documents is missing; copy it again"):
        Shards(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "has format 1, but this version reads format 2; prepare the data again"),
        ({"splits": {"train": [{"name": "a"}]}}, "is not a manifest of token shards"),
        ({"splits": []}, "is not a manifest of token shards"),
        ({"dtype": "text"}, "is not a manifest of token shards"),
        ({"tokenizer": {}}, r"is not a manifest of token shards \('fingerprint'\)"),
        ({"more": 1}, "is not a manifest of token shards .*more"),
    ],
)
def test_an_invalid_manifest_is_an_error(folder: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=f"s/manifest.json {message}"):
        Shards(str(folder))


def test_a_folder_without_a_manifest_is_an_error(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"s/manifest\.json is not JSON: .*; prepare the data again"):
        Shards(str(folder))
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"s is not a folder of token shards: it has no manifest\.json; create it with"):
        Shards(str(folder))


def test_the_fingerprint_covers_tokens_and_prompts(tmp_path: Path, folder: Path) -> None:
    same, other = write(tmp_path / "same"), write(tmp_path / "other", prompts=False)
    assert same.fingerprint == read_manifest(str(folder)).fingerprint != other.fingerprint
