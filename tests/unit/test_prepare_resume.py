"""Preparing data that was stopped, and what is said when it cannot go on."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.preparing import BYTES, content, document_ids_and_positions
from tests.web import web
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.prepare import prepare as module
from titanlike.data.prepare import work_units
from titanlike.data.prepare.prepare import Progress, prepare
from titanlike.data.text import files
from titanlike.data.text.documents import BadRecord, Fields
from titanlike.data.text.files import list_files
from titanlike.data.token_shards import TRAIN, Manifest
from titanlike.utils.file_lock import FileLock


class Stop(Exception):
    pass


def stop_after(count: int) -> Callable[[Any], None]:
    """Something to raise at so many calls."""
    calls = iter(range(count))

    def call(*_: Any) -> None:
        if next(calls, None) is None:
            raise Stop

    return call


def test_what_is_done_is_not_done_again(
    corpus: Path, tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([str(corpus)], tmp_path / "whole", BYTES, workers=0)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    made: list[int] = []
    real = module.make

    def make(unit: Any, *rest: Any) -> Any:
        check()
        made.append(unit.number)
        return real(unit, *rest)

    monkeypatch.setattr(module, "make", make)
    for count in (0, 5, 10):
        check = stop_after(count)
        with pytest.raises(Stop):
            prepare([str(corpus)], out, BYTES, workers=0)
    assert made == list(range(15))
    (partial / "train-00003.tokens").write_bytes(b"short")  # a disk that lost what it was given
    (partial / "unit-00004.json").write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", stop_after(0))
        check = stop_after(1000)
        with pytest.raises(Stop):
            prepare([str(corpus)], out, BYTES, workers=0)
    assert made[15:] == [3, 4, *range(15, made[-1] + 1)]
    told: list[Progress] = []
    prepare([str(corpus)], out, BYTES, workers=0, tell=told.append)
    assert (told[-1].before, told[-1].tokens) == (told[-1].total, 0)
    assert made[-1] == len(made) - 3
    assert content(out) == content(tmp_path / "whole")


def test_another_plan_is_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, inputs = tmp_path / "out", [str(corpus / "a.jsonl"), str(corpus / "c01.txt")]
    (corpus / "c01.txt").touch()
    prepare(inputs, out, BYTES, workers=0)

    def refusal(places: list[str], section: Section = BYTES, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            prepare(places, out, section, workers=0, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    ends = "; remove that folder, or give another --out"
    assert (
        refusal(inputs, Section(special="bos", bos="<|endoftext|>"))
        == f"out was prepared otherwise: the tokenizer is another{ends}"
    )
    assert refusal(inputs, validation_share=0.5) == f"out was prepared otherwise: --validation was 0.0 and is 0.5{ends}"
    assert "--text-field was 'text' and is 'b'" in refusal(inputs, fields=Fields("b"))
    assert "--prompt-field was '' and is 'ask'" in refusal(inputs, fields=Fields("text", "ask"))
    assert "corpus/c01.txt was among its files and is not now" in refusal(inputs[:1])
    assert "corpus/c02.txt was not among its files and is now" in refusal([*inputs, str(corpus / "c02.txt")])
    assert "its files were in another order" in refusal(inputs[::-1])
    told: list[Progress] = []
    prepare(inputs, out, BYTES, workers=3, bad="skip", tell=told.append)  # which change nothing of what is there
    assert told == [Progress(0, 0, 0, 0, 0.0, complete=True)]
    os.utime(corpus / "c01.txt", ns=(1, 1))
    assert "corpus/c01.txt has changed since" in refusal(inputs)
    (out / "plan.json").write_text("{}")
    assert "its plan.json cannot be read (KeyError: 'format')" in refusal(inputs)


def test_a_plan_of_which_nothing_is_done_is_no_hindrance(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 1: has no field 'content', but text, ask"):
        prepare([str(corpus)], tmp_path / "out", BYTES, fields=Fields("content"), workers=0)
    assert not (tmp_path / "out").exists()
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_one_process_at_a_time(corpus: Path, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".out.lock")
    with pytest.raises(
        UserError, match=rf"out is being prepared by process {os.getpid()} on host .*; wait for that one"
    ):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)
    lock.release()
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_a_folder_of_something_else_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="out is there already, and is no folder of token shards; give another --out"):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)
    (tmp_path / "out" / "mine").unlink()
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/out cannot be written: "):
        prepare([str(corpus)], tmp_path / "file" / "out", BYTES, workers=0)


def test_a_folder_within_its_own_input_is_not_read(corpus: Path, tmp_path: Path) -> None:
    for _ in range(2):
        manifest = prepare([str(corpus)], corpus / "out", BYTES, workers=0)
    assert manifest.source["files"] == 22


def test_no_document_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{\n')
    with pytest.raises(UserError, match=r"a\.txt: there is no document in it: 1 had no text, and 0 could not be read"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", BYTES, workers=0)
    with pytest.raises(
        UserError, match=r"and 1 more: there is no document in it: 2 had no text, and 1 could not be read"
    ):
        prepare([str(tmp_path)], tmp_path / "out", BYTES, workers=0, bad="skip")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"--validation = 0\.999999 leaves no document to train on"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", BYTES, workers=0, validation_share=0.999999)
    assert not (tmp_path / "out.partial").exists()  # nobody would go on with it
    with pytest.raises(UserError, match="there is no file to read"):
        prepare([], tmp_path / "out", BYTES, workers=0)
    with pytest.raises(UserError, match=r"--validation = 1\.0: give a share"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", BYTES, workers=0, validation_share=1.0)


def test_a_disk_without_room_is_told(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=30_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        UserError, match=r"makes at least about 3\d\d,\d{3} bytes of tokens, and its disk has 30,000 free"
    ):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)
    usage = usage._replace(free=400_000)
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_a_file_that_changes_meanwhile_is_told(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.make

    def make(*words: Any) -> Any:
        with (corpus / "c05.txt").open("a") as file:
            file.write("more")
        return real(*words)

    monkeypatch.setattr(module, "make", make)
    with pytest.raises(UserError, match=r"c05\.txt: was changed while it was read; run the command again"):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_addresses_and_files_that_vanish(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "SMALLEST", 100_000)
    monkeypatch.setattr(files, "PAUSE", 0.01)
    prepare([str(corpus / "a.jsonl"), str(corpus / "b.parquet")], tmp_path / "local", BYTES, workers=0)
    with web() as server:
        for name in ("a.jsonl", "b.parquet"):
            server.files[name] = (corpus / name).read_bytes()
        places = [f"{server.address}/{name}" for name in server.files]
        prepare(places, tmp_path / "far", BYTES, workers=1)
        assert document_ids_and_positions(tmp_path / "far", TRAIN) == document_ids_and_positions(
            tmp_path / "local", TRAIN
        )
        server.ranges = False  # so that no unit can begin within a file
        prepare(places[:1], tmp_path / "whole", BYTES, workers=0)
        assert len(json.loads((tmp_path / "whole/plan.json").read_text())["units"]) == 1
        server.ranges = True
        found = list_files(places[0])
        server.files.clear()
        with pytest.raises(UserError, match=r"a\.jsonl: (there is no such file any more|cannot be read)"):
            prepare(found, tmp_path / "gone", BYTES, workers=0)
