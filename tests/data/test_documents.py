"""Reading documents from text, JSON lines and Parquet: spans, chunks of long documents, bad records."""

import gzip
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents import readers as documents
from titanlike.data.documents import records
from titanlike.data.documents.data_files import File
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import BadRecord, Document, Fields, read_chunks, read_documents, split_chunks
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.tools.data.train_tokenizer import train


def file(path: Path, content: bytes | None = None) -> File:
    if content is not None:
        path.write_bytes(content)
    return list_files(str(path))[0]


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def texts(found: File, fields: Fields | None = None, **options: Any) -> list[str]:
    return [document.text for document in read_documents(found, fields or Fields(), **options)]


def refusal(found: File, fields: Fields | None = None, **options: Any) -> str:
    with pytest.raises(BadRecord) as caught:
        texts(found, fields, **options)
    return str(caught.value).replace(f"{Path(found.name).parent}/", "")


@pytest.fixture
def chunk_size(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes chunks and blocks small."""
    monkeypatch.setattr(documents, "CHUNK_SIZE", 100)
    monkeypatch.setattr(records, "BLOCK", 64)
    return 100


def test_span_has_the_lines_that_begin_in_it(tmp_path: Path) -> None:
    rng = random.Random(0)
    records = [{"text": f"{number} " + "é" * rng.choice([0, 1, 30, 300])} for number in range(60)]
    found = file(tmp_path / "a.jsonl", lines(*records) + b"\n\n" + lines({"text": "last"}).rstrip())
    expected = [record["text"] for record in records] + ["last"]
    assert texts(found) == expected
    for count in (1, 2, 7, 61, found.size):  # the last: spans of one byte, in most of which no line begins
        offsets = [found.size * number // count for number in range(count + 1)]
        spans = list(itertools.pairwise(offsets))
        assert [text for span in spans for text in texts(found, span=span)] == expected
    assert texts(found, first=60) == ["last"] if len(expected) == 61 else []
    sizes = [document.size for document in read_documents(found, Fields())]
    assert sum(sizes) == found.size - 2  # the empty lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
        (b'{"content": "a", "id": 3}', "no field 'text'; its fields are content, id; set --text-field"),
        (b'{"text": null}', "the field 'text' is not text: null"),
    ],
)
def test_bad_line_is_reported_by_number(tmp_path: Path, line: bytes, message: str) -> None:
    good = lines(*({"text": str(number)} for number in range(10)))
    found = file(tmp_path / "a.jsonl", good + line + b"\n" + good)
    fields = Fields(key="--text-field")
    assert refusal(found, fields).startswith(f"a.jsonl, line 11: {message}")
    second = (len(good) - 3, found.size)  # a span that begins at line 11
    assert refusal(found, fields, span=second).startswith(f"a.jsonl, line 11: {message}")
    skipped: list[BadRecord] = []
    assert texts(found, fields, bad=skipped.append) == [str(number) for number in range(10)] * 2
    assert len(skipped) == 1


def test_lone_surrogate_becomes_a_replacement_character(tmp_path: Path) -> None:
    found = file(tmp_path / "a.jsonl", b'{"text": "a\\ud83d b \\ud83d\\ude42 \\ude42"}\n')
    assert texts(found) == ["a\ufffd b \U0001f642 \ufffd"]


def parquet(path: Path, rows: Any, group: int = 4) -> File:
    pq.write_table(pa.table(rows), path, row_group_size=group)
    return file(path)


def test_row_groups_are_spans(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(30)]
    found = parquet(tmp_path / "a.parquet", {"text": rows, "prompt": rows, "id": range(30)})
    assert texts(found) == rows
    assert [text for span in ((0, 3), (3, 4), (4, 8)) for text in texts(found, span=span)] == rows
    assert texts(found, first=7) == rows[7:]
    assert next(iter(read_documents(found, Fields("text", "prompt")))).prompt == "row 0"


def test_bad_row_is_reported_by_number(tmp_path: Path) -> None:
    column = pa.array([b"a", b"b", b"c\xff", None, b"e", b"f"]).view(pa.string())
    found = parquet(tmp_path / "a.parquet", {"text": column}, group=2)
    assert refusal(found) == "a.parquet, row 3: byte 1 is not UTF-8"
    assert refusal(found, span=(1, 3)) == "a.parquet, row 3: byte 1 is not UTF-8"
    skipped: list[BadRecord] = []
    assert texts(found, bad=skipped.append) == ["a", "b", "e", "f"]
    assert str(skipped[1]).endswith("a.parquet, row 4: the field 'text' is not text: null")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'content'; its columns are text; set --text-field"):
        texts(found, Fields("content", key="--text-field"))
    content = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(UserError, match=r"b\.parquet: not a complete Parquet file: "):
        texts(file(tmp_path / "b.parquet", content[:-10]))


def test_text_file_is_one_document(tmp_path: Path) -> None:
    assert texts(file(tmp_path / "a.txt", "\ufeffé\r\n🙂".encode())) == ["é\r\n🙂"]
    assert texts(file(tmp_path / "b.txt", b"")) == []
    assert list(read_chunks(file(tmp_path / "b.txt"), Fields())) == [Document("")]
    assert texts(file(tmp_path / "a.txt"), first=1) == []


@pytest.mark.parametrize("offset", [0, 63, 5000])
def test_bad_byte_is_reported_by_offset(tmp_path: Path, chunk_size: int, offset: int) -> None:
    content = ("x" * (offset % 2) + "é" * 5000).encode()[:offset]
    content = content[: offset - 1] + b"x" if len(content) and content[-1] == 0xC3 else content
    found = file(tmp_path / "a.txt", content + b"\xff" + b"tail" * 50)
    assert refusal(found) == f"a.txt: byte {offset} is not UTF-8; convert the file, or leave it out"
    skipped: list[BadRecord] = []
    assert list(read_chunks(found, Fields(), bad=skipped.append)) == []  # not even the valid start of the file
    assert len(skipped) == 1
    compressed = file(tmp_path / "a.txt.gz", gzip.compress(content + b"\xff"))
    assert list(read_chunks(compressed, Fields(), bad=skipped.append)) == []


def test_character_across_a_block_boundary(tmp_path: Path, chunk_size: int) -> None:
    assert texts(file(tmp_path / "a.txt", b"x" * 63 + "🙂é".encode())) == ["x" * 63 + "🙂é"]
    assert "byte 63 is not UTF-8" in refusal(file(tmp_path / "a.txt", b"x" * 63 + b"\xc3\xff" + b"x" * 100))


def test_incomplete_character_at_the_end_is_bad(tmp_path: Path) -> None:
    assert "byte 3 is not" in refusal(file(tmp_path / "a.txt", b"abc" + "🙂".encode()[:3]))


def test_chunks_of_a_long_text_concatenate_to_it(tmp_path: Path, chunk_size: int) -> None:
    text = "".join(random.Random(1).choices("ab é\n🙂", k=3000))
    for found in (file(tmp_path / "a.txt", text.encode()), file(tmp_path / "a.jsonl", lines({"text": text}))):
        chunks = list(read_chunks(found, Fields()))
        assert len(chunks) >= 30
        assert "".join(chunk.text for chunk in chunks) == text
        assert max(len(chunk.text) for chunk in chunks) <= chunk_size
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert sum(chunk.size for chunk in chunks) == found.size
        [document] = read_documents(found, Fields())
        assert (document.text, document.size) == (text, found.size)


def test_chunks_do_not_depend_on_the_division_into_parts(chunk_size: int) -> None:
    text = "".join(random.Random(2).choices("ab é\n", k=3000))
    expected = list(split_chunks([text]))
    for step in (1, 7, 64, 1000):
        assert list(split_chunks(text[start : start + step] for start in range(0, len(text), step))) == expected


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 50 + "\n" + "b" * 100, "a" * 50 + "\n"),
        ("a" * 40 + "\nc\n \nd \ne\n\nf" + " b" * 100, "a" * 40 + "\nc\n \nd \ne\n\nf"[:1]),  # the only safe line break
        ("a" * 50 + "\r\n" + "b c" * 50, None),
        ("a;\n/" * 20 + "x y" * 60, None),  # some tokenizers merge punctuation, a line break and a slash
        ("字" * 150, "字" * 100),
    ],
)
def test_chunk_boundaries(chunk_size: int, text: str, first: str | None) -> None:
    found = next(split_chunks([text]))[0]
    if first is None:  # before a single space
        assert re.fullmatch(r"\S \S", text[len(found) - 1 : len(found) + 2])
    else:
        assert found == first


def test_chunks_encode_to_the_tokens_of_the_complete_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares trained tokenizers of both libraries, and bytes, on text with all kinds of white space."""
    monkeypatch.setattr(documents, "CHUNK_SIZE", 400)  # long enough for a safe boundary in each
    source = Path(json.__file__).with_name("decoder.py").read_text() + Path(re.__file__).read_text()
    source += "".join(
        random.Random(3).choices(["word", " ", "\n", "\n\n", "1234", "it's", ";\n", "\t", "é", "...\n"], k=4000)
    )
    (tmp_path / "corpus.txt").write_text(source)
    names = ["bytes"]
    for name in ("tokenizer.json", "tokenizer.model"):
        train([str(tmp_path / "corpus.txt")], tmp_path / name, 800)
        names.append(str(tmp_path / name))
    for name in names:
        tokenizer = build_tokenizer(Section(encoding=name))
        chunks = [tokenizer.encode(text).tolist() for text, _ in split_chunks([source])]
        assert len(chunks) > len(source) // 400
        assert list(itertools.chain(*chunks)) == tokenizer.encode(source).tolist()
