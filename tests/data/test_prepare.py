"""`titanlike data prepare`: shards, splits and work units; resuming, and errors."""

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.data.preparing import BYTES, read_split
from tests.durability import Disk
from tests.web import web
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents import remote
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import CHUNK_SIZE, BadRecord, Fields, read_documents
from titanlike.data.tokens import work_units
from titanlike.data.tokens.shards import TRAIN, VALIDATION, Shards
from titanlike.data.tokens.tokenization import split_of
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.tools.cli.data import recipe_lines
from titanlike.tools.data import workers
from titanlike.tools.data.prepare import Progress, prepare
from titanlike.utils.file_lock import FileLock


def test_shards_hold_each_document_once_and_in_order(corpus: Path, tmp_path: Path, small_units: None) -> None:
    out, tokenizer = tmp_path / "out", build_tokenizer(BYTES)
    manifest = prepare([str(corpus)], out, BYTES, validation_share=0.1, workers=0)
    texts = [document.text for file in list_files(str(corpus)) for document in read_documents(file, Fields())]
    expected: dict[str, list[list[int]]] = {TRAIN: [], VALIDATION: []}
    for text in texts:
        expected[split_of(hashlib.blake2b(text.encode(), digest_size=8).digest(), 0.1)].append(
            tokenizer.document(text)[0].tolist()
        )
    assert {split: read_split(out, split) for split in expected} == expected
    assert 0.06 < len(expected[VALIDATION]) / len(texts) < 0.14
    assert manifest.source["empty"] == 24 + 6 + 1
    assert manifest.source["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest.tokenizer == {
        "fingerprint": tokenizer.fingerprint, "encoding": "bytes", "special": "eos", "eos": "", "bos": "", "vocab_size": 257
    }  # fmt: skip
    for split in expected:
        Shards(str(out), split).verify()
    assert not (tmp_path / "out.partial").exists()
    assert not (tmp_path / ".out.lock").exists()
    assert not any(re.search("partial|unit-", path.name) for path in out.iterdir())


def test_long_text_file_is_one_document_of_one_split(tmp_path: Path) -> None:
    texts = [" ".join(map(str, range(number, CHUNK_SIZE // 8 * number))).encode() for number in (2, 3, 4, 5)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    prepare([str(tmp_path / "*.txt")], tmp_path / "out", BYTES, validation_share=0.5, workers=0)
    found = [document for split in (TRAIN, VALIDATION) for document in read_split(tmp_path / "out", split)]
    assert sorted(found) == [[*text, 256] for text in texts]


def test_tokenizer_file_is_copied_into_the_folder(corpus: Path, tmp_path: Path, disk: Disk) -> None:
    ranks = "".join(f"{base64.b64encode(bytes([value])).decode()} {value}\n" for value in range(256))
    (tmp_path / "my.model").write_text(ranks)
    section = Section(encoding=str(tmp_path / "my.model"), special="both")
    manifest = prepare([str(corpus)], tmp_path / "out", section, workers=0)
    disk.assert_published(tmp_path / "out")
    (tmp_path / "my.model").unlink()
    recipe = tomli.loads(recipe_lines(tmp_path / "out", manifest))
    assert recipe["data"] == {"source": "shards", "path": str(tmp_path / "out")}
    assert recipe["model"] == {"vocab_size": 320}
    assert recipe["tokenizer"] == {"encoding": str(tmp_path / "out/my.model"), "special": "both"}
    assert build_tokenizer(Section(**recipe["tokenizer"])).fingerprint == manifest.tokenizer["fingerprint"]
    first = read_split(tmp_path / "out", TRAIN)[0]
    assert (first[0], first[-1]) == (256, 257)


def test_resuming_with_other_parameters_is_refused(corpus: Path, tmp_path: Path) -> None:
    out, inputs = tmp_path / "out", [str(corpus / "a.jsonl"), str(corpus / "c01.txt")]
    (corpus / "c01.txt").touch()
    prepare(inputs, out, BYTES, workers=0)

    def refusal(paths: list[str], section: Section = BYTES, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            prepare(paths, out, section, workers=0, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    begin, end = "out was prepared with different parameters: ", "; remove that folder, or give another --out"
    assert refusal(inputs, Section(special="bos", bos="<|endoftext|>")) == f"{begin}the tokenizer differs{end}"
    assert refusal(inputs, validation_share=0.5) == f"{begin}--validation was 0.0 and is 0.5{end}"
    assert "--text-field was 'text' and is 'b'" in refusal(inputs, fields=Fields("b"))
    assert "input file corpus/c01.txt was removed" in refusal(inputs[:1])
    assert "the order of the input files differs" in refusal(inputs[::-1])
    reports: list[Progress] = []
    prepare(inputs, out, BYTES, workers=3, bad="skip", on_progress=reports.append)  # these do not change the result
    assert reports == [Progress(0, 0, 0, 0, 0.0, already_complete=True)]
    os.utime(corpus / "c01.txt", ns=(1, 1))
    assert "input file corpus/c01.txt has changed" in refusal(inputs)


def test_plan_without_finished_work_is_replaced(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 1: no field 'content'; its fields are text, ask"):
        prepare([str(corpus)], tmp_path / "out", BYTES, fields=Fields("content"), workers=0)
    assert not (tmp_path / "out").exists()
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_concurrent_preparation_is_refused(corpus: Path, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".out.lock")
    with pytest.raises(UserError, match=rf"out is being prepared by process {os.getpid()} on host .*; wait for it"):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)
    lock.release()
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_folder_with_other_content_is_not_changed(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="out exists and is not a folder of token shards; give another --out"):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)
    (tmp_path / "out" / "mine").unlink()
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_output_inside_the_input_is_not_read(corpus: Path, tmp_path: Path) -> None:
    for _ in range(2):
        manifest = prepare([str(corpus)], corpus / "out", BYTES, workers=0)
    assert manifest.source["files"] == 22


def test_input_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{\n')
    with pytest.raises(UserError, match=r"and 1 more: no documents: 2 without text, 1 bad records"):
        prepare([str(tmp_path)], tmp_path / "out", BYTES, workers=0, bad="skip")
    assert not (tmp_path / "out.partial").exists()  # there is nothing to resume


def test_file_that_changes_during_reading_is_reported(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = workers.process

    def process_work_unit(*arguments: Any) -> Any:
        with (corpus / "c05.txt").open("a") as file:
            file.write("more")
        return original(*arguments)

    monkeypatch.setattr(workers, "process", process_work_unit)
    with pytest.raises(UserError, match=r"c05\.txt: changed while it was read; run the command again"):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=0)


def test_remote_files_and_files_that_vanish(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "MIN_SIZE", 100_000)
    monkeypatch.setattr(remote, "RETRY_DELAY", 0.01)
    prepare([str(corpus / "a.jsonl"), str(corpus / "b.parquet")], tmp_path / "local", BYTES, workers=0)
    with web() as server:
        for name in ("a.jsonl", "b.parquet"):
            server.files[name] = (corpus / name).read_bytes()
        urls = [f"{server.address}/{name}" for name in server.files]
        prepare(urls, tmp_path / "remote", BYTES, workers=1)
        assert read_split(tmp_path / "remote", TRAIN) == read_split(tmp_path / "local", TRAIN)
        server.ranges = False  # reading cannot begin in the middle of a file
        prepare(urls[:1], tmp_path / "unsplit", BYTES, workers=0)
        assert len(json.loads((tmp_path / "unsplit/plan.json").read_text())["units"]) == 1
        server.ranges = True
        found = list_files(urls[0])
        server.files.clear()
        with pytest.raises(UserError, match=r"a\.jsonl: (no longer exists|cannot be read)"):
            prepare(found, tmp_path / "gone", BYTES, workers=0)
