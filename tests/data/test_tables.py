"""Records of CSV files, JSON arrays, Arrow files and folders of `datasets.save_to_disk`, in everything that reads records."""

import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.preparing import read_split
from tests.data.sequences import BYTES, open_stream
from tests.web import Web, web
from titanlike.config import UserError
from titanlike.config.dpo import PreferenceData
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Data
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches import chats
from titanlike.data.batches.sources import open_sources
from titanlike.data.documents import records
from titanlike.data.documents.data_files import File
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import BadRecord, Fields, read_documents, read_records
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.preference_tokens import open_preferences
from titanlike.data.tokens.text_pairs import open_text_pairs
from titanlike.tools.data.prepare import prepare
from titanlike.tools.data.quality.filters import open_filter
from titanlike.tools.data.quality.options import Quality

ROWS = [
    {"id": "007", "text": "plain"},
    {"id": "008", "text": 'says "so", twice,\nand é'},
    {"id": "", "text": "1234"},
    {"id": "9", "text": "true"},
]


def file(path: Path, content: bytes) -> File:
    path.write_bytes(content)
    return list_files(str(path))[0]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_stream(rows: list[dict[str, Any]], batch: int = 3) -> bytes:
    """Returns an Arrow stream of several batches, as `datasets` writes it."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return sink.getvalue().to_pybytes()


def as_arrow_file(rows: list[dict[str, Any]]) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.csv": as_csv,
    "a.csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    "A.CSV": lambda rows: b"\xef\xbb\xbf" + as_csv(rows).replace(b"\r\n", b"\n") + b"\n",
    "a.tsv": lambda rows: as_csv(rows, "\t"),
    "a.json": lambda rows: json.dumps(rows).encode(),
    "b.json": lambda rows: b"\xef\xbb\xbf\n " + json.dumps(rows, indent=4, ensure_ascii=False).encode() + b"\n",
    "a.json.gz": lambda rows: gzip.compress(json.dumps(rows, indent=1).encode()),
    "a.arrow": as_stream,
    "b.arrow": as_arrow_file,
    "a.feather": as_arrow_file,
    "a.arrow.gz": lambda rows: gzip.compress(as_stream(rows)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_record_is_a_document_with_its_fields_as_text(tmp_path: Path, name: str) -> None:
    found = file(tmp_path / name, FORMATS[name](ROWS))
    assert [document.text for document in read_documents(found, Fields())] == [row["text"] for row in ROWS]
    numbered = read_documents(found, Fields("text", "id"), first=1)
    assert [(each.text, each.prompt, each.record) for each in numbered] == [
        (row["text"], row["id"], number) for number, row in enumerate(ROWS) if number >= 1
    ]
    assert list(read_records(found, lambda record: record)) == ROWS
    sizes = [document.size for document in read_documents(found, Fields())]
    assert (0 if name.endswith(".gz") else 50) <= sum(sizes) <= 2 * found.size


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.arrow"])
def test_records_cross_the_boundaries_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows = [{"text": f'é\\ "{"🙂" * n}\n', "n": [n / 3, True, None, {"a": [n]}]} for n in range(9)]
    if name != "a.json":
        rows = [{"text": row["text"]} for row in rows]
    found = file(tmp_path / name, FORMATS[name](rows))
    for block in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr(records, "BLOCK", block)
        assert list(read_records(found, lambda record: record)) == rows


def problem(found: File, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(read_documents(found, Fields(), **options))
    return str(caught.value).replace(f"{Path(found.name).parent}/", "")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,n\na,1\nb\n", "a.csv, row 2 (line 3): it has 1 values, but the header has 2 columns"),
        ("a.csv", b'text,n\n"a\n\n",1\nb\xff,2\n', "a.csv, row 2 (line 5): it is not UTF-8"),
        ("a.json", b'["a"]', "a.json, record 1: a str, not an object with a field 'text'"),
        ("a.arrow", as_stream([{"text": "a"}, {"text": None}]), "a.arrow, row 2: the field 'text' is not text: null"),
    ],
)
def test_bad_record_is_named_and_skipped(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    found = file(tmp_path / name, content)
    assert problem(found) == message
    skipped: list[BadRecord] = []
    assert len(list(read_documents(found, Fields(), bad=skipped.append))) <= 1
    assert len(skipped) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"body,n\na,1\n", "a.csv: no column 'text'; its columns are body, n; set data.text_field"),
        ("a.json", b'[{"text": "a"}', "a.json: not JSON: Expecting ',' delimiter: line 1 column 15"),
        ("a.csv", b'text\na\n"b\nc\n', "a.csv, line 3: a quotation mark is not closed; correct the file"),
        ("a.arrow", as_stream([{"text": "a" * 999}])[:-500], "a.arrow, row 1: cannot be read: "),
        ("a.arrow", b"no table", "a.arrow: not a complete Arrow file: "),
    ],
)
def test_unreadable_file_is_an_error_even_if_bad_records_are_skipped(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    found = file(tmp_path / name, content)
    for options in ({}, {"bad": lambda _: None}):
        assert problem(found, **options).startswith(message)


def test_empty_files_have_no_documents(tmp_path: Path) -> None:
    for name, content in (("a.csv", b""), ("b.csv", b"text\n"), ("a.json", b"[]"), ("b.json", b" [\n] ")):
        assert list(read_documents(file(tmp_path / name, content), Fields())) == []


@pytest.mark.parametrize("name", ["a.pdf", "a.pkl.gz"])
def test_a_file_that_is_not_text_is_named(tmp_path: Path, name: str) -> None:
    found = file(tmp_path / name, b"valid UTF-8")
    assert problem(found).startswith(f"{name} is not text: its name stands for ")
    skipped: list[BadRecord] = []
    assert list(read_documents(found, Fields(), bad=skipped.append)) == []
    assert len(skipped) == 1


@pytest.mark.parametrize("name", ["a.csv", "a.arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(records, "BLOCK", 2**15)
    rng = random.Random(0)
    rows = [{"text": "".join(rng.choices("abc é\n", k=2000))} for _ in range(400)]  # about 1 MB
    found = file(tmp_path / name, as_stream(rows, 20) if name == "a.arrow" else FORMATS[name](rows))
    del rows
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    most = 0
    for count, _ in enumerate(read_documents(found, Fields()), 1):
        most = max(most, pa.total_allocated_bytes() - before) if count % 50 == 0 else most
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 400
    assert peak + most < found.size / 3


def save_dataset(folder: Path, rows: list[dict[str, Any]], files: int = 2) -> None:
    """Writes what `datasets.Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    share = -(-len(rows) // files)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(as_stream(rows[number * share : (number + 1) * share]))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0123", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}, indent=2))


def read_all(path: str) -> list[str]:
    return [document.text for found in list_files(path) for document in read_documents(found, Fields())]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Web]:
    with web() as server:
        yield server


def test_a_folder_of_save_to_disk_has_its_rows_only(tmp_path: Path) -> None:
    save_dataset(tmp_path / "d", ROWS)
    (tmp_path / "d" / "cache-0123.arrow").write_bytes(as_stream(ROWS))  # of `map`, in the same folder
    expected = [row["text"] for row in ROWS]
    assert read_all(str(tmp_path / "d")) == expected
    assert read_all(f"file://{tmp_path}/d") == expected
    for pattern in ("d/*", "d/*.arrow", "*", "**"):
        assert read_all(f"{tmp_path}/{pattern}") == expected
        assert pattern == "*" or read_all(f"file://{tmp_path}/{pattern}") == expected
    assert read_all(f"{tmp_path}/d/cache-0123.arrow") == expected  # if it is named
    # In a folder with other documents, such as one named state.json.
    (tmp_path / "state.json").write_text('{"text": "a state"}\n')
    assert read_all(str(tmp_path)) == [*expected, "a state"]


def test_the_splits_of_a_dataset_dict_are_not_mixed(tmp_path: Path) -> None:
    for split in ("test", "train"):
        save_dataset(tmp_path / "d" / split, [{"text": f"{split} {n}"} for n in range(3)], files=1)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for path in (str(tmp_path / "d"), f"file://{tmp_path}/d", str(tmp_path), f"{tmp_path}/d/*"):
        with pytest.raises(UserError, match=r"^[^ ]*d has the splits test, train of a dataset; give one of them:"):
            list_files(path)
    assert read_all(str(tmp_path / "d" / "train")) == ["train 0", "train 1", "train 2"]
    (tmp_path / "e").mkdir()
    save_dataset(tmp_path / "e" / "train", ROWS)
    (tmp_path / "e" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read_all(str(tmp_path / "e")) == [row["text"] for row in ROWS]


def test_a_remote_table_is_read(tmp_path: Path, served: Web) -> None:
    for name in ("a.csv", "b.json", "a.arrow", "a.csv.gz"):
        served.files[name] = FORMATS[name](ROWS)
        assert read_all(f"{served.address}/{name}") == [row["text"] for row in ROWS]


MANY = [{"id": str(n), "text": f"text {n} " * (1 + n % 5)} for n in range(600)]


@pytest.mark.parametrize("name", ["a.csv", "a.json.gz", "a.arrow"])
def test_prepared_documents_are_those_of_json_lines(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With work units that are smaller than the file, which only JSON lines and Parquet are split into."""
    monkeypatch.setattr("titanlike.data.tokens.work_units.MIN_SIZE", 1000)
    (tmp_path / "filter.py").write_text(
        "def keep(record):\n    return record['text'] if int(record['id']) % 7 else False\n"
    )
    quality = Quality(own=open_filter(f"{tmp_path}/filter.py:keep"), duplicates="remove")
    written = []
    for source, content in ((name, FORMATS[name](MANY + MANY[:9])), ("lines.jsonl", lines(MANY + MANY[:9]))):
        found = file(tmp_path / source, content)
        out = tmp_path / f"{source}-tokens"
        prepare(
            [found.name], out, Section(), fields=Fields("text", "id"), quality=quality, workers=0, validation_share=0.1
        )
        written.append([sorted(map(tuple, read_split(out, split))) for split in ("train", "validation")])
    assert written[0] == written[1]
    assert sum(map(len, written[0])) == sum(int(row["id"]) % 7 > 0 for row in MANY)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("name", ["a.csv", "a.arrow"])
def test_text_and_streams_train_on_the_same_sequences_as_json_lines(tmp_path: Path, name: str) -> None:
    paths = [
        file(tmp_path / source, content).name
        for source, content in ((name, FORMATS[name](MANY)), ("l.jsonl", lines(MANY)))
    ]
    options = dict(seq_len=32, global_batch_size=4, seed=0, validate=False)
    sections = [Data(source="text", path=path, cache=str(tmp_path / "cache"), prompt_field="id") for path in paths]
    first, second = (open_sources(section, BYTES, **options).training for section in sections)
    for step in (1, 2):
        batches = [source.read(step, range(4)) for source in (first, second)]
        assert (batches[0].tokens == batches[1].tokens).all() and (batches[0].loss_mask == batches[1].loss_mask).all()
    streams = [open_stream([list_files(path)]) for path in paths]
    for step in range(1, 40):
        batch, other = (stream.read(step, range(8)) for stream in streams)
        assert (batch.tokens == other.tokens).all()
    resumed = open_stream([list_files(paths[0])])
    resumed.load_position(streams[0].position())
    assert (resumed.read(40, range(8)).tokens == streams[1].read(40, range(8)).tokens).all()


INSTRUCTIONS = [
    {"instruction": f"Add 1 to {n}.", "input": "" if n % 2 else f"{n}", "output": str(n + 1)} for n in range(9)
]


@pytest.mark.parametrize("name", ["a.csv", "a.arrow"])
def test_chats_pairs_and_text_pairs_are_read(tmp_path: Path, name: str) -> None:
    def both(rows: list[dict[str, Any]], open_tokens: Callable[[str], Any]) -> None:
        contents = (name, FORMATS[name](rows)), ("l.jsonl", lines(rows))
        found = [open_tokens(file(tmp_path / source, content).name) for source, content in contents]
        assert len(found[0]) and found[0].fingerprint == found[1].fingerprint

    section = ChatData(source="chat", cache=str(tmp_path / "cache"))
    template = build_chat_template("", BYTES)
    both(INSTRUCTIONS, lambda path: chats.open_chats(replace(section, path=path), path, template))
    answers = [{"prompt": f"{n}?", "chosen": "yes", "rejected": f"no {n}"} for n in range(5)]
    preferences = PreferenceData(source="preference", cache=str(tmp_path / "cache"))
    both(answers, lambda path: open_preferences(preferences, path, template))
    pairs = Data(source="text", cache=str(tmp_path / "cache"), prompt_field="instruction", text_field="output")
    both(INSTRUCTIONS, lambda path: open_text_pairs(pairs, path, BYTES))


def test_conversations_of_save_to_disk_keep_their_messages(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{n}"}]} for n in range(5)
    ]
    save_dataset(tmp_path / "d", rows)
    found = [record for each in list_files(str(tmp_path / "d")) for record in read_records(each, lambda record: record)]
    assert found == rows
