"""Documents of text, JSON lines and Parquet: all of them once, in pieces if they are long; each bad one told by its place."""

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
from titanlike.data.text import documents
from titanlike.data.text.documents import BadRecord, Document, Fields, pieces_of, read_documents, read_pieces
from titanlike.data.text.files import File, list_files
from titanlike.data.text.tokenizer import build_tokenizer
from titanlike.data.text.train_tokenizer import train

Span = tuple[int, int]


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
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces so short that a test has many."""
    monkeypatch.setattr(documents, "PIECE", 100)
    monkeypatch.setattr(documents, "BLOCK", 64)
    return 100


def test_each_span_has_the_lines_that_begin_in_it(tmp_path: Path) -> None:
    chance = random.Random(0)
    records = [{"text": f"{number} " + "é" * chance.choice([0, 1, 30, 300])} for number in range(60)]
    found = file(tmp_path / "a.jsonl", lines(*records) + b"\n\n" + lines({"text": "last"}).rstrip())
    wanted = [record["text"] for record in records] + ["last"]
    assert texts(found) == wanted
    for count in (1, 2, 7, 61, found.size):  # the last: a span a byte, most of which no line begins in
        places = [found.size * number // count for number in range(count + 1)]
        spans = list(itertools.pairwise(places))
        assert [text for span in spans for text in texts(found, span=span)] == wanted
    assert texts(found, first=60) == ["last"] if len(wanted) == 61 else []
    sizes = [document.size for document in read_documents(found, Fields())]
    assert sum(sizes) == found.size - 2  # the empty lines


def test_prompts_come_along(tmp_path: Path) -> None:
    found = file(tmp_path / "a.jsonl", lines({"q": "Q", "a": "A", "n": 1}))
    assert list(read_documents(found, Fields("a", "q"))) == [Document("A", "Q", 0, found.size)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'{"text": "\xff"}', "byte 10 of it is not UTF-8"),
        (b'["text"]', "a list and not an object with a field 'text'"),
        (b'{"content": "a", "id": 3}', "has no field 'text', but content, id; set --text-field"),
        (b"{}", "has no field 'text', but none; set --text-field"),
        (b'{"text": {"a": 1}}', """its field 'text' is no text: {"a": 1}"""),
        (b'{"text": null}', "its field 'text' is no text: null"),
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, line: bytes, message: str) -> None:
    good = lines(*({"text": str(number)} for number in range(10)))
    found = file(tmp_path / "a.jsonl", good + line + b"\n" + good)
    fields = Fields(key="--text-field")
    assert refusal(found, fields).startswith(f"a.jsonl, line 11: {message}")
    second = (len(good) - 3, found.size)  # a span that begins at line 11
    assert refusal(found, fields, span=second).startswith(f"a.jsonl, line 11: {message}")
    left_out: list[BadRecord] = []
    assert texts(found, fields, bad=left_out.append) == [str(number) for number in range(10)] * 2
    assert len(left_out) == 1


def test_half_a_pair_of_surrogates_is_a_replacement_sign(tmp_path: Path) -> None:
    found = file(tmp_path / "a.jsonl", b'{"text": "a\\ud83d b \\ud83d\\ude42 \\ude42"}\n')
    assert texts(found) == ["a\ufffd b \U0001f642 \ufffd"]


def parquet(path: Path, rows: Any, group: int = 4) -> File:
    pq.write_table(pa.table(rows), path, row_group_size=group)
    return file(path)


def test_row_groups_are_spans(tmp_path: Path) -> None:
    wanted = [f"row {number}" for number in range(30)]
    found = parquet(tmp_path / "a.parquet", {"text": wanted, "prompt": wanted, "id": range(30)})
    assert texts(found) == wanted
    assert [text for span in ((0, 3), (3, 4), (4, 8)) for text in texts(found, span=span)] == wanted
    assert texts(found, first=7) == wanted[7:]
    assert next(iter(read_documents(found, Fields("text", "prompt")))).prompt == "row 0"


def test_a_bad_row_is_told_by_its_number(tmp_path: Path) -> None:
    column = pa.array([b"a", b"b", b"c\xff", None, b"e", b"f"]).view(pa.string())
    found = parquet(tmp_path / "a.parquet", {"text": column}, group=2)
    assert refusal(found) == "a.parquet, row 3: byte 1 of it is not UTF-8"
    assert refusal(found, span=(1, 3)) == "a.parquet, row 3: byte 1 of it is not UTF-8"
    left_out: list[BadRecord] = []
    assert texts(found, bad=left_out.append) == ["a", "b", "e", "f"]
    assert str(left_out[1]).endswith("a.parquet, row 4: its field 'text' is no text: null")
    with pytest.raises(UserError, match=r"a\.parquet: has no column 'content', but text; set --text-field"):
        texts(found, Fields("content", key="--text-field"))
    content = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(UserError, match=r"b\.parquet: not a whole Parquet file: "):
        texts(file(tmp_path / "b.parquet", content[:-10]))


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    assert texts(file(tmp_path / "a.txt", "\ufeffé\r\n🙂".encode())) == ["é\r\n🙂"]
    assert texts(file(tmp_path / "b.txt", b"")) == []
    assert list(read_pieces(file(tmp_path / "b.txt"), Fields())) == [Document("")]
    assert texts(file(tmp_path / "a.txt"), first=1) == []


@pytest.mark.parametrize("place", [0, 3, 62, 63, 64, 5000])
def test_a_bad_byte_is_told_by_its_place_in_the_file(tmp_path: Path, short: int, place: int) -> None:
    content = ("x" * (place % 2) + "é" * 5000).encode()[:place]
    content = content[: place - 1] + b"x" if len(content) and content[-1] == 0xC3 else content
    found = file(tmp_path / "a.txt", content + b"\xff" + b"tail" * 50)
    assert refusal(found) == f"a.txt: byte {place} is not UTF-8; convert the file, or leave it out"
    left_out: list[BadRecord] = []
    assert list(read_pieces(found, Fields(), bad=left_out.append)) == []  # nothing of it, not even its beginning
    assert len(left_out) == 1
    packed = file(tmp_path / "a.txt.gz", gzip.compress(content + b"\xff"))
    assert list(read_pieces(packed, Fields(), bad=left_out.append)) == []


def test_a_character_may_go_from_one_block_to_the_next(tmp_path: Path, short: int) -> None:
    assert texts(file(tmp_path / "a.txt", b"x" * 63 + "🙂é".encode())) == ["x" * 63 + "🙂é"]
    assert "byte 63 is not UTF-8" in refusal(file(tmp_path / "a.txt", b"x" * 63 + b"\xc3\xff" + b"x" * 100))


def test_a_character_that_is_cut_off_at_the_end_is_bad(tmp_path: Path) -> None:
    assert "byte 3 is not" in refusal(file(tmp_path / "a.txt", b"abc" + "🙂".encode()[:3]))


def test_what_is_cut_off_is_told(tmp_path: Path) -> None:
    content = gzip.compress(lines({"text": "a" * 1000}, {"text": "b"}))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz, after line 0: is cut off; copy it again"):
        texts(file(tmp_path / "a.jsonl.gz", content[:-9]))
    content = b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 50
    with pytest.raises(UserError, match=r"a\.txt\.gz: cannot be read: "):
        texts(file(tmp_path / "a.txt.gz", content))


def test_a_long_text_comes_in_pieces_and_is_the_same(tmp_path: Path, short: int) -> None:
    text = "".join(random.Random(1).choices("ab é\n🙂", k=3000))
    for found in (file(tmp_path / "a.txt", text.encode()), file(tmp_path / "a.jsonl", lines({"text": text}))):
        pieces = list(read_pieces(found, Fields()))
        assert len(pieces) >= 30
        assert "".join(piece.text for piece in pieces) == text
        assert max(len(piece.text) for piece in pieces) <= short
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert sum(piece.size for piece in pieces) == found.size
        [whole] = read_documents(found, Fields())
        assert (whole.text, whole.size) == (text, found.size)


def test_pieces_do_not_depend_on_the_parts_that_a_text_comes_in(short: int) -> None:
    text = "".join(random.Random(2).choices("ab é\n", k=3000))
    wanted = list(pieces_of([text]))
    for step in (1, 7, 64, 1000):
        assert list(pieces_of(text[place : place + step] for place in range(0, len(text), step))) == wanted


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 50 + "\n" + "b" * 100, "a" * 50 + "\n"),
        (
            "a" * 40 + "\nc\n \nd \ne\n\nf" + " b" * 100,
            "a" * 40 + "\nc\n \nd \ne\n\nf"[:1],
        ),  # the only safe end of a line
        ("a" * 50 + "\r\n" + "b c" * 50, None),
        ("a;\n/" * 20 + "x y" * 60, None),  # some draw together signs, the end of a line and a stroke
        ("字" * 150, "字" * 100),
    ],
)
def test_where_a_text_is_cut(short: int, text: str, first: str | None) -> None:
    found = next(pieces_of([text]))[0]
    if first is None:  # before a space that stands alone
        assert re.fullmatch(r"\S \S", text[len(found) - 1 : len(found) + 2])
    else:
        assert found == first


def test_pieces_make_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trained tokenizers, of both libraries, and with bytes; on text with all kinds of white space."""
    monkeypatch.setattr(documents, "PIECE", 400)  # so long that each has a good place to end
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
        pieces = [tokenizer.encode(text).tolist() for text, _ in pieces_of([source])]
        assert len(pieces) > len(source) // 400
        assert list(itertools.chain(*pieces)) == tokenizer.encode(source).tolist()
