"""Local and remote files: listing, opening, decompression, retries and errors."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from tests.web import Web, web
from titanlike.config import UserError
from titanlike.data.documents import remote
from titanlike.data.documents.data_files import File
from titanlike.data.documents.directory import DataDirectory
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.opening import open_file
from titanlike.data.documents.readers import Fields, read_documents
from titanlike.tools.data.prepare import list_inputs


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(remote, "RETRY_DELAY", 0.01)
    with web() as served:
        yield served


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    yield "memory://corpus"
    fs.rm("/corpus", recursive=True)


def names(path: str, root: str) -> list[str]:
    # fsspec names a file in memory with two slashes or three, depending on how it was found.
    return [file.name.replace(":///", "://").removeprefix(root).lstrip("/") for file in list_files(path)]


def read(file: File) -> bytes:
    with open_file(file) as stream:
        return stream.read()


def test_folder_lists_its_text_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl", "a/.hidden/x.txt", ".git", "picture.png", "c.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x89PNG\0\1" if name in ("picture.png", "c.gz") else b"text")
    assert names(str(tmp_path), str(tmp_path)) == ["a/z.jsonl", "b.txt", "c.gz"]
    assert names(str(tmp_path / "**/*.txt"), str(tmp_path)) == ["b.txt"]
    assert names(str(tmp_path / "picture.png"), str(tmp_path)) == ["picture.png"]  # named explicitly
    [file] = list_files(str(tmp_path / "b.txt"))
    assert (file.size, file.version) == (4, str((tmp_path / "b.txt").stat().st_mtime_ns))


def test_each_file_is_listed_once_and_links_are_followed(tmp_path: Path) -> None:
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    for path in (corpus / "x.txt", corpus / "a/b/y.txt", other / "z.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (corpus / "linked").symlink_to(other)
    for pattern in (corpus, corpus / "*", corpus / "**", corpus / "**/*"):
        assert sorted(names(str(pattern), str(corpus))) == ["a/b/y.txt", "linked/z.txt", "x.txt"]
    with pytest.raises(UserError, match=r"INPUT: .*/corpus/x\.txt is given twice; give each file once"):
        list_inputs([str(corpus), str(corpus / "*.txt")])
    (corpus / "a/above").symlink_to(corpus)
    (corpus / "z").symlink_to(corpus / "a/b")  # its files are read once
    assert names(str(corpus), str(corpus)) == ["linked/z.txt", "x.txt", "z/y.txt"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus/closed").mkdir(parents=True)
    (tmp_path / "corpus/x.txt").write_text("text")
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"corpus/closed: cannot be read: Permission denied"):
        list_files(str(tmp_path / "corpus"))


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--in = '.*nowhere': no files found"):
        list_files(str(tmp_path / "nowhere"), "--in")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file or directory"):
        list_files(str(tmp_path))
    with pytest.raises(UserError, match=r"unheardof://x: Protocol not known: unheardof"):
        list_files("unheardof://x")


def test_compressed_files_are_decompressed_by_lines_and_closed(tmp_path: Path) -> None:
    lines = [f"line {number}\n".encode() for number in range(20_000)]
    content = b"".join(lines)
    half = len(content) // 2
    (tmp_path / "a.gz").write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    frames = [zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:])]
    (tmp_path / "a.zst").write_bytes(b"".join(frames))
    for name in ("a.gz", "a.zst"):
        [file] = list_files(str(tmp_path / name))
        assert file.compressed
        stream = open_file(file)
        assert list(stream) == lines
        assert stream.compressed.tell() == file.size  # type: ignore[attr-defined]
        stream.close()
        assert stream.compressed.closed  # type: ignore[attr-defined]


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{number} " * 20}) + "\n" for number in range(2000)).encode()
    for name, content in (("a.jsonl.gz", gzip.compress(lines)), ("a.jsonl.zst", zstandard.compress(lines))):
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=f"{name}, after line [0-9]+: the file is truncated; copy it again"):
            list(read_documents(list_files(str(tmp_path / name))[0], Fields()))


def test_fsspec_urls(memory: str) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe(
        {"/corpus/b.jsonl": b"b", "/corpus/sub/a.txt": b"aa", "/corpus/part-08.txt": b"8", "/corpus/part-09.txt": b"9"}
        | {"/corpus/.git/config": b"hidden", "/corpus/sub/.hidden": b"hidden"}
    )
    assert names(memory, "memory://") == [
        f"corpus/{name}" for name in ("b.jsonl", "part-08.txt", "part-09.txt", "sub/a.txt")
    ]
    assert names(f"{memory}/**/*.txt", "memory://corpus") == ["part-08.txt", "part-09.txt", "sub/a.txt"]
    assert names(memory + "/part-{08..09}.txt", "memory://corpus") == ["part-08.txt", "part-09.txt"]
    [file] = list_files(f"{memory}/sub/a.txt")
    assert (file.size, read(file)) == (2, b"aa")
    assert file.version
    with pytest.raises(UserError, match=r"memory://corpus/none\.txt: no such file"):
        list_files(f"{memory}/none.txt")
    directory = DataDirectory(memory)
    assert directory.ranges([("b.jsonl", 0, 1), ("sub/a.txt", 1, 2)]) == [b"b", b"a"]
    with pytest.raises(UserError, match=r"corpus/b\.jsonl ends at byte 1, before byte 5; copy it again"):
        directory.ranges([("b.jsonl", 0, 5)])


def test_http_files_are_read_in_ranges(server: Web) -> None:
    server.files["big.txt"] = os.urandom(12 * 2**20)
    [file] = list_files(f"{server.address}/big.txt")
    assert file.size == 12 * 2**20
    assert not any(method != "HEAD" for _, method in server.asked)  # listed without a download
    with open_file(file) as stream:
        stream.seek(11 * 2**20)
        assert stream.read() == server.files["big.txt"][11 * 2**20 :]
    first = min(int(value[6:].partition("-")[0]) for _, value in server.asked if value.startswith("bytes="))
    assert first == 11 * 2**20
    assert read(file) == server.files["big.txt"]


def test_the_query_of_an_address_is_no_part_of_the_name(server: Web) -> None:
    server.files["a.jsonl"] = b'{"text": "one"}\n'
    server.files["b.jsonl.gz"] = gzip.compress(b'{"text": "two"}\n')
    for name, text in (("a.jsonl", "one"), ("b.jsonl.gz", "two")):
        [file] = list_files(f"{server.address}/{name}?download=true")
        assert [document.text for document in read_documents(file, Fields())] == [text]


def test_remote_reads_are_retried_a_few_times(server: Web) -> None:
    server.files["a.txt"] = b"content" * 1000
    [file] = list_files(f"{server.address}/a.txt")
    server.failures = remote.TRIES - 1
    assert read(file) == server.files["a.txt"]
    server.failures = 100
    with pytest.raises(UserError, match=r"a\.txt: cannot be read, tried 3 times: ClientResponseError: 500"):
        read(file)
    server.failures = 0
    asked = len(server.asked)
    with pytest.raises(UserError, match=r"none\.txt: no such file"):
        list_files(f"{server.address}/none.txt")
    assert len([path for path, _ in server.asked[asked:] if path == "none.txt"]) <= 2  # not retried


def test_a_range_of_too_many_files_is_refused() -> None:
    with pytest.raises(UserError, match=r"a range of 1,000,000,000 files; give at most 100,000"):
        list_files("https://127.0.0.1/{000000000..999999999}.txt")


def test_remote_file_that_became_shorter_is_reported(server: Web) -> None:
    server.files["a.txt"] = bytes(9 * 2**20)
    [file] = list_files(f"{server.address}/a.txt")
    with open_file(file) as stream:
        stream.read(1)
        server.files["a.txt"] = bytes(10)
        with pytest.raises(UserError, match=r"a\.txt: ends at byte \d+ of 9437184; it has changed"):
            stream.read()
