"""Token shards as a run reads them: across their borders, with what is learnt, here and far away; and what is wrong with them."""

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

LENGTHS = [[5, 3, 4], [1], [7, 2]]  # of documents, shard by shard
GIVEN = [[2, 0, 4], [0], [0, 1]]
TOKENS = np.arange(22)
LEARNT = np.array([c == "1" for c in "0011111100001111111101"])


def write(folder: Path, dtype: Any = np.uint16, given: bool = True) -> Manifest:
    folder.mkdir()
    shards, place = [], 0
    for number, lengths in enumerate(LENGTHS):
        writer = ShardWriter(folder, f"train-{number:05d}", dtype)
        for length, first in zip(lengths, GIVEN[number], strict=True):
            writer.add(TOKENS[place : place + length], first if given else 0)
            place += length
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
    """Each window of each length, against the tokens as they were."""
    assert (shards.num_tokens, shards.num_documents) == (22, 6)
    for length in (1, 2, 5, 9, 22):
        starts = np.arange(22 - length + 1)
        rows = starts[:, None] + np.arange(length)
        np.testing.assert_array_equal(shards.read(starts, length), TOKENS[rows])
        loss_mask = shards.loss_mask(starts, length)
        assert loss_mask is not None
        np.testing.assert_array_equal(loss_mask, LEARNT[rows])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_windows_go_across_shards(tmp_path: Path, dtype: Any) -> None:
    write(tmp_path / "s", dtype)
    shards = Shards(str(tmp_path / "s"))
    check_all(shards)
    assert shards.dtype == dtype
    shards.verify()
    assert [shard.given for shard in shards.shards] == [6, 0, 1]


def test_where_all_is_learnt_there_is_no_mask(tmp_path: Path) -> None:
    write(tmp_path / "s", given=False)
    assert Shards(str(tmp_path / "s")).loss_mask(np.array([0, 3]), 5) is None


def test_the_files_are_plain_numbers(folder: Path) -> None:
    assert (folder / "train-00002.tokens").read_bytes() == np.arange(13, 22, dtype="<u2").tobytes()
    assert np.fromfile(folder / "train-00000.documents", "<i8").tolist() == [5, 2, 8, 5, 12, 12]


def test_a_document_in_pieces_is_the_same(tmp_path: Path, folder: Path) -> None:
    writer = ShardWriter(tmp_path, "train-00000", np.uint16)
    for first, stop, given, last in (
        (0, 3, 2, False),
        (3, 3, 0, False),
        (3, 5, 0, True),
        (5, 8, 0, True),
        (8, 12, 4, True),
    ):
        writer.add(TOKENS[first:stop], given, last=last)
    assert writer.close() == read_manifest(str(folder)).splits[TRAIN][0]


def test_nothing_has_its_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train-00000", np.uint16)
    writer.add(np.arange(ShardWriter.BUFFER + 1))
    assert {path.suffix for path in tmp_path.iterdir()} == {".partial"}
    writer.drop()
    assert not list(tmp_path.iterdir())


def test_shards_far_away_are_read_by_ranges(server: Web) -> None:
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


def test_files_that_are_not_what_the_manifest_says(folder: Path) -> None:
    path = folder / "train-00000.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(
        UserError, match=r"s/train-00000\.tokens is cut off: it has 22 bytes, and the manifest says 24; copy"
    ):
        Shards(str(folder))
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=r"s/train-00000\.tokens is too long: it has 25 bytes"):
        Shards(str(folder))
    path.write_bytes(content[:-1] + b"\7")
    with pytest.raises(UserError, match=r"s/train-00000\.tokens is not what was written; copy it again"):
        Shards(str(folder)).verify()
    path.write_bytes(content)
    (folder / "train-00001.documents").unlink()
    with pytest.raises(UserError, match=r"s/train-00001\.documents is missing; copy it again"):
        Shards(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, but this titanlike reads format 1"),
        ({"splits": {"train": [{"name": "a"}]}}, "is not a manifest of token shards"),
        ({"splits": []}, "is not a manifest of token shards"),
        ({"dtype": "text"}, "is not a manifest of token shards"),
        ({"tokenizer": {}}, r"is not a manifest of token shards \('fingerprint'\)"),
        ({"more": 1}, "is not a manifest of token shards .*more"),
    ],
)
def test_a_wrong_manifest_is_told(folder: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=f"s/manifest.json {message}"):
        Shards(str(folder))


def test_what_is_no_folder_of_shards(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"s/manifest\.json is not JSON: .*; prepare the data again"):
        Shards(str(folder))
    (folder / "manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"s has no manifest\.json, so it is no folder of token shards; `titanlike data prepare`"
    ):
        Shards(str(folder))


def test_equal_tokens_have_one_fingerprint(tmp_path: Path, folder: Path) -> None:
    same, other = write(tmp_path / "same"), write(tmp_path / "other", given=False)
    assert same.fingerprint == read_manifest(str(folder)).fingerprint != other.fingerprint
