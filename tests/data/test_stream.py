"""Streamed text: every document once an epoch, the same rows on any ranks, exact positions, skipped and missing data."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.data.sequences import open_stream, write
from titanlike.config import UserError
from titanlike.data.batches import stream
from titanlike.data.batches.stream import Stream
from titanlike.data.documents.data_files import File
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields

END = 256


def text_of(files: Sequence[File]) -> list[str]:
    return sorted(json.loads(line)["text"] for file in files for line in Path(file.name).read_text().splitlines())


def rows_of(source: Stream, reader: int) -> range:
    num_rows = source.batch_sizes.final // source.num_readers
    return range(reader * num_rows, (reader + 1) * num_rows)


def tokens_of_reader(source: Stream, reader: int, steps: int) -> list[int]:
    """Returns the tokens of a reader in order, without the one that consecutive sequences share."""
    rows = rows_of(source, reader)
    return np.concatenate([source.read(step, rows).tokens[:, :-1].ravel() for step in range(1, steps + 1)]).tolist()


def split(tokens: list[int]) -> list[str]:
    """Splits tokens into complete documents; drops the last, which may be cut."""
    return bytes(min(token, 255) if token != END else 0 for token in tokens).decode().split("\0")[:-1]


@pytest.mark.parametrize(("sizes", "readers"), [([40], 1), ([5, 60, 0, 7], 4), ([3] * 11, 8)])
def test_each_reader_yields_its_documents_once_an_epoch(tmp_path: Path, sizes: list[int], readers: int) -> None:
    files = write(tmp_path, sizes)
    source = open_stream([files])
    assert source.num_readers == readers
    for reader in range(readers):
        expected = text_of(files[reader::readers])
        if not expected:
            with pytest.raises(UserError, match=r"part02\.jsonl: no document found"):
                source.read(1, rows_of(source, reader))
            continue
        length = sum(len(text) + 1 for text in expected)
        steps = 2 * length // (16 * len(rows_of(source, reader))) + 2
        found = split(tokens_of_reader(source, reader, steps))
        first, second = found[: len(expected)], found[len(expected) : 2 * len(expected)]
        assert sorted(first) == sorted(second) == expected
        if len(expected) > 5:
            assert first != expected != second != first  # shuffled, differently each epoch


def test_a_position_is_restored_on_another_number_of_ranks(tmp_path: Path) -> None:
    files = write(tmp_path, [30, 20, 50, 10])
    source = open_stream([files])
    expected = [source.read(step, range(8)).tokens for step in (1, 2, 3, 4)]
    position = []
    for rows in (range(4), range(4, 8)):
        source = open_stream([files])
        for step in (1, 2):
            source.read(step, rows)
        position += source.position()
    for ranks in (1, 4):
        for rank in range(ranks):
            rows = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            resumed = open_stream([files])
            resumed.load_position(position)
            for step in (3, 4):
                assert np.array_equal(resumed.read(step, rows).tokens, expected[step - 1][rows.start : rows.stop])


def test_prompts_are_masked(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"text": "answer" * n, "prompt": "ask?" * n}) + "\n" for n in range(1, 30)))
    source = open_stream([list_files(str(file))], fields=Fields("text", "prompt"))
    for step in range(1, 30):
        batch = source.read(step, range(8))
        assert batch.loss_mask is not None
        in_prompt = np.isin(batch.tokens, list(b"k?"))  # characters that only prompts have
        in_text = np.isin(batch.tokens, [*b"newr", END])
        assert not batch.loss_mask[in_prompt].any()
        assert batch.loss_mask[in_text].all()


def test_bad_records_are_errors_or_skipped_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = write(tmp_path, [20])
    lines = Path(file.name).read_text().splitlines()
    lines[3] = "{broken"
    lines[7] = '{"txt": "no"}'
    Path(file.name).write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"part00\.jsonl, line (4|8): "):
        open_stream([[file]]).read(1, range(8))
    source = open_stream([[file]], skip_bad=True)
    expected = sorted(json.loads(line)["text"] for number, line in enumerate(lines) if number not in (3, 7))
    assert sorted(split(tokens_of_reader(source, 0, 8))[:18]) == expected
    warnings = capsys.readouterr().err
    assert warnings.count("warning: skipped ") == 2
    assert "part00.jsonl, line 4: not JSON" in warnings
    assert "part00.jsonl, line 8: no field 'text'; its fields are txt; set data.text_field" in warnings
    Path(file.name).write_text("\n".join([*lines[:2], *["{"] * (stream.MAX_WARNINGS + 3)]))
    open_stream([[file]], skip_bad=True).read(1, range(8))
    warnings = capsys.readouterr().err
    assert warnings.count("warning: skipped ") == stream.MAX_WARNINGS + 1
    assert warnings.endswith(f"warning: skipped more records of {file.name}\n")


def test_remote_files_are_read_and_a_missing_one_is_reported() -> None:
    memory = fsspec.filesystem("memory")
    for number in range(4):
        content = "".join(json.dumps({"text": f"{number}.{line} " * 3}) + "\n" for line in range(600))
        memory.pipe_file(f"/remote/{number}.jsonl", content.encode())
    files = list_files("memory://remote/*.jsonl")
    source = open_stream([files], seq_len=64)
    assert all(b"." in bytes(min(token, 255) for token in row) for row in source.read(1, range(8)).tokens.tolist())
    memory.rm("/remote/2.jsonl")
    with pytest.raises(UserError, match=r"memory://(/?)remote/2\.jsonl: no longer exists"):
        open_stream([files], seq_len=64).read(1, range(8))


def test_a_blocked_read_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_stream([write(tmp_path, [9, 9])], workers=2)
    unblock = threading.Event()
    monkeypatch.setattr(stream.PackedText, "next", lambda text: unblock.wait(60))
    reading = threading.Thread(target=lambda: source.read(1, range(8)), daemon=True)
    reading.start()
    while source._pool is None:
        time.sleep(0.01)
    source._pool.terminate()
    assert reading.is_alive()  # it has not waited for the blocked read
    unblock.set()
