"""Text made into tokens while it is read: every document once an epoch, the same rows on any ranks, exact positions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data import stream
from titanlike.data.stream import Stream
from titanlike.data.text.documents import Fields
from titanlike.data.text.files import File, list_files
from titanlike.data.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Section())
END = 256


def write(folder: Path, sizes: Sequence[int], name: str = "part") -> list[File]:
    """Files of so many documents, each known by its words."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        lines = [json.dumps({"text": f"{name}{number}.{line} " * (1 + line % 4)}) for line in range(size)]
        (folder / f"{name}{number:02}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return list_files(str(folder / f"{name}*"))


def open_stream(sources: Sequence[Sequence[File]], **options: Any) -> Stream:
    weights = options.pop("weights", [1.0] * len(sources))
    usual = dict(fields=Fields(), seq_len=16, global_batch_size=8, seed=0)
    return Stream(sources, weights, BYTES, **usual | options)


def text_of(files: Sequence[File]) -> list[str]:
    return sorted(json.loads(line)["text"] for file in files for line in Path(file.name).read_text().splitlines())


def tokens_of_lane(feed: Stream, lane: int, steps: int) -> list[int]:
    """What a lane gives, in its order, without the token that two sequences share."""
    rows = range(lane * feed.rows_per_reader, (lane + 1) * feed.rows_per_reader)
    return np.concatenate([feed.rows(step, rows).tokens[:, :-1].ravel() for step in range(1, steps + 1)]).tolist()


def split(tokens: list[int]) -> list[str]:
    """Whole documents: the last may be cut."""
    return bytes(min(token, 255) if token != END else 0 for token in tokens).decode().split("\0")[:-1]


@pytest.mark.parametrize(("sizes", "lanes"), [([40], 1), ([5, 300, 0, 7], 4), ([3] * 11, 8)])
def test_each_lane_has_its_documents_once_an_epoch(tmp_path: Path, sizes: list[int], lanes: int) -> None:
    files = write(tmp_path, sizes)
    feed = open_stream([files])
    assert feed.num_readers == lanes
    for lane in range(lanes):
        expected = text_of(files[lane::lanes])
        if not expected:
            with pytest.raises(UserError, match=r"part02\.jsonl: there is no text in it"):
                feed.rows(1, range(lane * feed.rows_per_reader, (lane + 1) * feed.rows_per_reader))
            continue
        length = sum(len(text) + 1 for text in expected)
        steps = 2 * length // (16 * feed.rows_per_reader) + 2
        found = split(tokens_of_lane(feed, lane, steps))
        first, second = found[: len(expected)], found[len(expected) : 2 * len(expected)]
        assert sorted(first) == sorted(second) == expected
        if len(expected) > 5:
            assert first != expected != second != first  # shuffled, each epoch in its own way


def test_a_row_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    files = write(tmp_path, [30, 20, 50, 10])
    for step in (1, 2, 3):
        whole = open_stream([files])
        for earlier in range(1, step + 1):
            expected = whole.rows(earlier, range(8))
        for ranks in (2, 4, 8):
            parts = []
            for rank in range(ranks):
                mine = open_stream([files], workers=1 + rank % 3)
                share = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
                parts += [mine.rows(earlier, share) for earlier in range(1, step + 1)][-1:]
            assert np.array_equal(np.concatenate([part.tokens for part in parts]), expected.tokens)
            assert np.array_equal(np.concatenate([part.numbers for part in parts]), expected.numbers)


@pytest.mark.parametrize("block", [2, 256])
def test_a_position_is_exact_wherever_it_is(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK", block)
    files = [write(tmp_path, [9, 4, 0, 5, 6]), write(tmp_path, [3, 8], "other")]
    files[0] = [file for file in files[0] if file.size]
    options = dict(weights=[2, 1], seq_len=12)
    whole = open_stream(files, **options)
    expected = {step: whole.rows(step, range(8)).tokens for step in range(1, 41)}
    for stop in (1, 5, 17):
        first = open_stream(files, **options)
        for step in range(1, stop + 1):
            first.rows(step, range(8))
        position = json.loads(json.dumps(first.position()))
        for again in (stop + 3, 40):  # resumed, and resumed again
            resumed = open_stream(files, workers=3, **options)
            resumed.begin(position)
            for step in range(stop + 1, again + 1):
                assert np.array_equal(resumed.rows(step, range(8)).tokens, expected[step]), (stop, again, step)
            position, stop = resumed.position(), again


def test_a_position_is_read_by_other_ranks(tmp_path: Path) -> None:
    files = write(tmp_path, [30, 20, 50, 10])
    whole = open_stream([files])
    expected = [whole.rows(step, range(8)).tokens for step in (1, 2, 3, 4)]
    position = []
    for share in (range(4), range(4, 8)):
        mine = open_stream([files])
        for step in (1, 2):
            mine.rows(step, share)
        position += mine.position()
    for ranks in (1, 4):
        for rank in range(ranks):
            share = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            resumed = open_stream([files])
            resumed.begin(position)
            for step in (3, 4):
                assert np.array_equal(resumed.rows(step, share).tokens, expected[step - 1][share.start : share.stop])


def test_a_mixture_has_its_shares_in_each_lane(tmp_path: Path) -> None:
    feed = open_stream([write(tmp_path, [40, 40]), write(tmp_path, [40, 40], "other")], weights=[3, 1], seq_len=64)
    counts = {"part": 0, "other": 0}
    for step in range(1, 257):
        for row in feed.rows(step, range(8)).tokens:
            text = bytes(min(token, 255) for token in row.tolist())
            counts["other" if b"other" in text else "part"] += 1
    assert counts == {"part": 6 * 256, "other": 2 * 256}


def test_what_is_given_is_not_learnt(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"text": "answer" * n, "prompt": "ask?" * n}) + "\n" for n in range(1, 30)))
    feed = open_stream([list_files(str(file))], fields=Fields("text", "prompt"))
    for step in range(1, 30):
        rows = feed.rows(step, range(8))
        assert rows.loss_mask is not None
        asked = np.isin(rows.tokens, list(b"ask?")) & ~np.isin(rows.tokens, list(b"as"))  # k and ? are in prompts alone
        answered = np.isin(rows.tokens, [*b"new r".replace(b" ", b""), END])
        assert not rows.loss_mask[asked].any()
        assert rows.loss_mask[answered].all()


def test_bad_records_stop_the_run_or_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = write(tmp_path, [20])
    lines = Path(file.name).read_text().splitlines()
    lines[3] = "{broken"
    lines[7] = '{"txt": "no"}'
    Path(file.name).write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"part00\.jsonl, line (4|8): "):
        open_stream([[file]]).rows(1, range(8))
    feed = open_stream([[file]], skip_bad=True)
    expected = sorted(json.loads(line)["text"] for number, line in enumerate(lines) if number not in (3, 7))
    assert sorted(split(tokens_of_lane(feed, 0, 8))[:18]) == expected
    told = capsys.readouterr().err
    assert told.count("warning: left out: ") == 2
    assert "part00.jsonl, line 4: not JSON" in told
    assert "part00.jsonl, line 8: no field 'text'; its fields are txt; set data.text_field" in told


def test_a_file_far_away_is_read_and_missed() -> None:
    memory = fsspec.filesystem("memory")
    for number in range(4):
        content = "".join(json.dumps({"text": f"{number}.{line} " * 3}) + "\n" for line in range(600))
        memory.pipe_file(f"/far/{number}.jsonl", content.encode())
    files = list_files("memory://far/*.jsonl")
    feed = open_stream([files], seq_len=64)
    assert all(b"." in bytes(min(token, 255) for token in row) for row in feed.rows(1, range(8)).tokens.tolist())
    memory.rm("/far/2.jsonl")
    with pytest.raises(UserError, match=r"memory://(/?)far/2\.jsonl: no longer exists"):
        open_stream([files], seq_len=64).rows(1, range(8))
