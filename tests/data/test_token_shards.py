"""Token shards: reads across boundaries, loss masks, local and remote folders, and the errors of damaged ones."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.web import Web, web
from titanlike.config import UserError
from titanlike.data.documents import remote
from titanlike.data.documents.directory import DataDirectory
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import TRAIN, Manifest, Shards, read_manifest

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
    monkeypatch.setattr(remote, "RETRY_DELAY", 0.01)
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
    with pytest.raises(UserError, match=r"s/train-00000\.tokens is truncated: it has 22 bytes, but the manifest says"):
        Shards(str(folder))
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=r"s/train-00000\.tokens is too long: it has 25 bytes"):
        Shards(str(folder))
    path.write_bytes(content[:-1] + b"\7")
    with pytest.raises(UserError, match=r"s/train-00000\.tokens does not match its hash in the manifest"):
        Shards(str(folder)).verify()
    path.write_bytes(content)
    (folder / "train-00001.documents").unlink()
    with pytest.raises(UserError, match=r"s/train-00001\.documents is missing; copy it again"):
        Shards(str(folder))


def shard(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "tokens": 9, "documents": 1, "tokens_sha256": "", "documents_sha256": ""} | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "has format 1, but this version reads format 2; prepare the data again"),
        ({"tokenizer": {}}, r"is not a manifest of token shards \(tokenizer.fingerprint: must be a string\)"),
        ({"splits": {"train": [shard(tokens=10**30)]}}, r"is not a manifest of token shards \(splits.train.0.tokens: "),
        ({"splits": {"train": [shard(name="../../etc/x")]}}, r"is not a manifest of token shards \(splits.train.0.name: "),
    ],
)  # fmt: skip
def test_an_invalid_manifest_is_an_error(folder: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=f"s/manifest.json {message}"):
        Shards(str(folder))


def test_a_folder_without_a_manifest_is_an_error(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"s is not a folder of token shards: it has no manifest\.json; create it"):
        Shards(str(folder))


@pytest.mark.parametrize("kind", ["tokens", "documents"])
def test_the_fingerprint_covers_the_content_of_files_of_the_same_size(folder: Path, kind: str) -> None:
    before = Shards(str(folder)).fingerprint
    assert Shards(str(folder)).fingerprint == before
    path = folder / f"train-00002.{kind}"
    content = np.frombuffer(path.read_bytes(), np.uint16 if kind == "tokens" else np.int64).copy()
    content[1] = 1 if kind == "tokens" else content[0]  # another first label
    path.write_bytes(content.tobytes())
    assert Shards(str(folder)).fingerprint != before


def test_a_large_file_that_was_replaced_in_part_has_another_fingerprint(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train-00000", np.uint16)
    for value in range(64):
        writer.add(np.full(2**14, value + 1, np.uint16))
    Manifest("uint16", {"fingerprint": "x"}, {TRAIN: [writer.close()]}, {}).write(tmp_path)
    before = Shards(str(tmp_path)).fingerprint
    path = tmp_path / "train-00000.tokens"
    content = path.read_bytes()
    for start in range(0, len(content), len(content) // 16):  # zeros, as an interrupted copy leaves them
        path.write_bytes(content[:start] + bytes(len(content) // 16) + content[start + len(content) // 16 :])
        assert Shards(str(tmp_path)).fingerprint != before


@pytest.mark.parametrize(
    "rows",
    [
        [[2**62, 0]] * 3, [[-1, -1]] * 3, [[4, 0], [2, 2], [12, 4]], [[4, 5], [8, 8], [12, 12]], [[4, 0], [8, 3], [12, 8]],
        [[4, 0], [8, 4], [11, 8]],
    ],
)  # fmt: skip
def test_documents_that_contradict_the_tokens_are_refused(tmp_path: Path, rows: list[list[int]]) -> None:
    writer = ShardWriter(tmp_path, "train-00000", np.uint16)
    for _ in range(3):
        writer.add(np.arange(4, dtype=np.uint16), 1)
    Manifest("uint16", {"fingerprint": "x"}, {TRAIN: [writer.close()]}, {}).write(tmp_path)
    assert Shards(str(tmp_path)).fingerprint
    (tmp_path / "train-00000.documents").write_bytes(np.array(rows, "<i8").tobytes())
    message = r"train-00000.documents does not fit the tokens of the shard; copy it again"
    with pytest.raises(UserError, match=message):  # before the run
        _ = Shards(str(tmp_path)).fingerprint
    with pytest.raises(UserError, match=message):
        Shards(str(tmp_path)).loss_mask(np.array([0]), 4)


SMALL: Any = SimpleNamespace(vocab_size=30, codec=SimpleNamespace(vocab_size=30))


def test_tokens_outside_of_the_vocabulary_are_refused(folder: Path) -> None:
    (folder / "train-00002.tokens").write_bytes(b"\x0e\0\xff\xff" + bytes(14))
    shards = Shards(str(folder), tokenizer=SMALL)
    assert shards.read(np.array([0]), 6).tolist() == [[0, 1, 2, 3, 4, 5]]
    message = r"s/train-00002\.tokens is damaged: token 1 is 65535, but the tokenizer has 30; copy it again"
    with pytest.raises(UserError, match=message):
        shards.read(np.array([0, 10]), 6)
    with pytest.raises(UserError, match=message):
        _ = Shards(str(folder), tokenizer=SMALL).fingerprint


def test_a_shard_that_is_cut_while_it_is_read_is_an_error(folder: Path) -> None:
    """A memory-mapped file would end the process with SIGBUS."""
    shards = Shards(str(folder))
    check_all(shards)
    os.truncate(folder / "train-00000.tokens", 0)
    with pytest.raises(UserError, match=r"s/train-00000\.tokens ends at byte 0, before byte 10; copy it again"):
        shards.read(np.array([0]), 5)


def test_many_local_files_do_not_stay_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataDirectory, "MAX_OPEN", 1)
    shards = Shards(str(folder))
    before = len(list(Path("/proc/self/fd").iterdir()))
    check_all(shards)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    del shards
