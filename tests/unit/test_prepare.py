"""Text into token shards: the same to the bit however many processes, whatever is killed; and what is said when it cannot be."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli

from tests.launching import ROOT, descendants, environment
from tests.web import web
from titanlike.cli.data import line, recipe_lines
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data import files, units
from titanlike.data import prepare as module
from titanlike.data.documents import PIECE, BadRecord, Fields, read_documents
from titanlike.data.files import File, list_files
from titanlike.data.prepare import Progress, prepare
from titanlike.data.shards import TRAIN, VALIDATION, Manifest, Shards
from titanlike.data.tokenizer import build_tokenizer
from titanlike.data.units import cut_units, split_of
from titanlike.lock import Lock

BYTES = Section()
MANY = 40  # units of the corpus below, made small


def words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices("abcdeé", k=chance.randint(1, 9))) for _ in range(count))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """All kinds of files: lines to be cut, row groups, a compressed file, small texts, an empty one."""
    chance, folder = random.Random(0), tmp_path / "corpus"
    folder.mkdir()
    records = [{"text": words(chance, 40) if number % 50 else "", "ask": words(chance, 3)} for number in range(1200)]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records[:300]), folder / "b.parquet", row_group_size=20)
    for number in range(20):
        (folder / f"c{number:02}.txt").write_text(words(chance, 100) if number else "")
    return folder


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALLEST", 10_000)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents_of(out: Path, split: str) -> list[list[int]]:
    """The documents of a split, read by the format's own definition."""
    found = []
    manifest = json.loads((out / "manifest.json").read_text())
    for shard in manifest["splits"][split]:
        tokens = np.fromfile(out / f"{shard['name']}.tokens", "<u2" if manifest["dtype"] == "uint16" else "<u4")
        ends = np.fromfile(out / f"{shard['name']}.documents", "<i8").reshape(-1, 2)[:, 0]
        found += [part.tolist() for part in np.split(tokens, ends)[:-1]]
    return found


def test_the_shards_hold_each_document_once_and_in_order(corpus: Path, tmp_path: Path, small_units: None) -> None:
    out, tokenizer = tmp_path / "out", build_tokenizer(BYTES)
    manifest = prepare([str(corpus)], out, BYTES, validation_share=0.1, workers=0)
    texts = [document.text for file in list_files(str(corpus)) for document in read_documents(file, Fields())]
    wanted: dict[str, list[list[int]]] = {TRAIN: [], VALIDATION: []}
    for text in texts:
        wanted[split_of(text.encode(), 0.1)].append(tokenizer.document(text)[0].tolist())
    assert {split: documents_of(out, split) for split in wanted} == wanted
    assert 0.06 < len(wanted[VALIDATION]) / len(texts) < 0.14
    assert manifest.source["empty"] == 24 + 6 + 1
    assert manifest.source["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest.tokenizer == {
        "fingerprint": tokenizer.fingerprint, "encoding": "bytes", "special": "eos", "eos": "", "bos": "", "vocab_size": 257
    }  # fmt: skip
    for split in wanted:
        Shards(str(out), split).verify()
    assert not (tmp_path / "out.partial").exists()
    assert not (tmp_path / ".out.lock").exists()
    assert not any(re.search("partial|unit-", path.name) for path in out.iterdir())


def test_a_long_text_file_is_one_document_of_one_split(tmp_path: Path) -> None:
    texts = [" ".join(map(str, range(number, PIECE // 8 * number))).encode() for number in (2, 3, 4, 5)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    prepare([str(tmp_path / "*.txt")], tmp_path / "out", BYTES, validation_share=0.5, workers=0)
    found = [document for split in (TRAIN, VALIDATION) for document in documents_of(tmp_path / "out", split)]
    assert sorted(found) == [[*text, 256] for text in texts]


def test_a_document_is_in_one_split_wherever_it_stands(tmp_path: Path) -> None:
    chance = random.Random(1)
    texts = [words(chance, 5) for _ in range(300)]
    for name, order in (("a", texts), ("b", texts[::-1] + texts[:50])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in order))
        prepare([str(tmp_path / f"{name}.jsonl")], tmp_path / name, BYTES, validation_share=0.2, workers=0)
    found = {name: {tuple(text) for text in documents_of(tmp_path / name, VALIDATION)} for name in "ab"}
    assert found["a"] == found["b"]
    assert not found["a"] & {tuple(text) for text in documents_of(tmp_path / "b", TRAIN)}


def test_prompts_are_given_and_not_learnt(corpus: Path, tmp_path: Path) -> None:
    fields = Fields("text", "ask")
    prepare([str(corpus / "a.jsonl")], tmp_path / "out", Section(special="eos"), fields=fields, workers=0)
    document = next(iter(read_documents(list_files(str(corpus / "a.jsonl"))[0], fields)))
    shards = Shards(str(tmp_path / "out"))
    [[end, learnt_from]] = shards._documents(shards.shards[0])[:1]
    assert learnt_from == len(document.prompt.encode())
    assert end == learnt_from + len(document.text.encode()) + 1


def test_the_number_of_processes_changes_nothing(corpus: Path, tmp_path: Path, small_units: None) -> None:
    found = []
    for workers in (0, 3):
        out = tmp_path / "out"
        told: list[Progress] = []
        prepare([str(corpus)], out, BYTES, validation_share=0.1, workers=workers, tell=told.append)
        assert told[-1].done == told[-1].total
        assert told[-1].tokens == sum(len(text) for split in (TRAIN, VALIDATION) for text in documents_of(out, split))
        found.append(content(out))
        shutil.rmtree(out)
    assert found[0] == found[1]
    assert len(json.loads(found[0]["plan.json"])["units"]) > MANY


def test_how_files_are_cut(corpus: Path, small_units: None) -> None:
    cut = cut_units(list_files(str(corpus)))
    parts = [part for unit in cut for part in unit.parts]
    sizes = Counter[str]()
    for part in parts:
        sizes[part.file.name] += part.size
    for file in list_files(str(corpus)):
        assert abs(sizes[file.name] - file.size) < 20  # of row groups by their share
    assert max(unit.size for unit in cut) < 12_000
    kinds = Counter(part.file.kind for part in parts)
    assert kinds[".jsonl"] > 30
    assert kinds[".parquet"] > 3
    assert kinds[".txt"] == 20
    assert len([unit for unit in cut if unit.parts[0].file.kind == ".txt"]) <= 3
    assert [unit.number for unit in cut] == list(range(len(cut)))
    assert len(cut_units([File("a.jsonl.gz", 10**6)])) == 1  # has to be read from its start


def test_a_unit_has_one_size_whatever_the_text() -> None:
    for size, wanted in ((10**6, 1), (10**8, 24), (10**10, 256), (10**12, 3726)):
        assert (
            len(units._cut(File("x.jsonl", size), min(max(size // units.MANY, units.SMALLEST), units.LARGEST)))
            == wanted
        )


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
    lock = Lock(tmp_path / ".out.lock")
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


def test_bad_records_are_left_out_and_counted(corpus: Path, tmp_path: Path, small_units: None) -> None:
    lines = (corpus / "a.jsonl").read_text().splitlines()
    for number in range(100, 1100, 100):
        lines[number - 1] = "{"
    (corpus / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 100: not JSON"):
        prepare([str(corpus)], tmp_path / "out", BYTES, workers=1)
    manifest = prepare([str(corpus)], tmp_path / "out", BYTES, workers=0, bad="skip")
    assert manifest.skipped == 10
    places = [int(re.search(r"line (\d+)", example)[1]) for example in manifest.source["skipped"]]  # type: ignore[index]
    assert places == [100, 200, 300, 400, 500]


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


def test_a_tokenizer_of_a_file_comes_along(corpus: Path, tmp_path: Path) -> None:
    ranks = "".join(f"{__import__('base64').b64encode(bytes([value])).decode()} {value}\n" for value in range(256))
    (tmp_path / "my.model").write_text(ranks)
    section = Section(encoding=str(tmp_path / "my.model"), special="both")
    manifest = prepare([str(corpus)], tmp_path / "out", section, workers=0)
    (tmp_path / "my.model").unlink()
    recipe = tomli.loads(recipe_lines(tmp_path / "out", manifest))
    assert recipe["data"] == {"source": "shards", "path": str(tmp_path / "out")}
    assert recipe["model"] == {"vocab_size": 320}
    assert recipe["tokenizer"] == {"encoding": str(tmp_path / "out/my.model"), "special": "both"}
    assert build_tokenizer(Section(**recipe["tokenizer"])).fingerprint == manifest.tokenizer["fingerprint"]
    first = documents_of(tmp_path / "out", TRAIN)[0]
    assert (first[0], first[-1]) == (256, 257)


def test_addresses_and_files_that_vanish(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALLEST", 100_000)
    monkeypatch.setattr(files, "PAUSE", 0.01)
    prepare([str(corpus / "a.jsonl"), str(corpus / "b.parquet")], tmp_path / "local", BYTES, workers=0)
    with web() as server:
        for name in ("a.jsonl", "b.parquet"):
            server.files[name] = (corpus / name).read_bytes()
        places = [f"{server.address}/{name}" for name in server.files]
        prepare(places, tmp_path / "far", BYTES, workers=1)
        assert documents_of(tmp_path / "far", TRAIN) == documents_of(tmp_path / "local", TRAIN)
        server.ranges = False  # so that no unit can begin within a file
        prepare(places[:1], tmp_path / "whole", BYTES, workers=0)
        assert len(json.loads((tmp_path / "whole/plan.json").read_text())["units"]) == 1
        server.ranges = True
        found = list_files(places[0])
        server.files.clear()
        with pytest.raises(UserError, match=r"a\.jsonl: (there is no such file any more|cannot be read)"):
            prepare(found, tmp_path / "gone", BYTES, workers=0)


def test_a_line_of_progress() -> None:
    text = line(
        Progress(done=3_000_000_000, total=12_000_000_000, before=1_000_000_000, tokens=500_000_000, seconds=1000.0)
    )
    assert text == " 25%  3.0 GB of 12.0 GB  2.0 MB/s  500.0K tokens/s  500.0M tokens  1:15:00 left"
    assert line(Progress(0, 10, 0, 0, 0.0)).endswith("? left")


# What follows are real processes.


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def start(folder: Path, *words: str, **options: Any) -> "subprocess.Popen[str]":
    # The command, with units so small that a moment's work has many.
    program = "from titanlike.data import units; units.SMALLEST = 400_000; from titanlike.cli.main import main; main()"
    command = [sys.executable, "-c", program, "data", "prepare", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, **options,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> Ended:
    out, err = process.communicate(timeout=100)
    return Ended(process.returncode, out, err)


def run(folder: Path, *words: str, **options: Any) -> Ended:
    return end(start(folder, *words, **options))


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A second of work, or more, in 35 units."""
    chance = random.Random(0)
    text = words(chance, 20_000)
    with (tmp_path / "large.jsonl").open("w") as file:
        while file.tell() < 14_000_000:
            begin = chance.randrange(len(text) - 5000)
            file.write(json.dumps({"text": text[begin : begin + chance.randrange(5000)]}) + "\n")
    yield tmp_path / "large.jsonl"
    (tmp_path / "large.jsonl").unlink()


COMMAND = ("large.jsonl", "--out", "out", "--tokenizer", "bytes", "--workers", "2", "--validation", "0.1")


def wait_for_units(folder: Path, count: int) -> None:
    end = time.monotonic() + 60
    while len(list((folder / "out.partial").glob("unit-*.json"))) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def stopped(process: "subprocess.Popen[str]") -> None:
    """Let it stand still, its workers too, so that what a test does next is done in time."""
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGSTOP)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_the_same(large: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "large.jsonl", "--out", "undisturbed", *COMMAND[3:]).code == 0
    first = start(tmp_path, *COMMAND)
    wait_for_units(tmp_path, 2)
    workers = descendants(first.pid)[1:]
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    deadline = time.monotonic() + 5
    while not all(ended(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("unit-*.json")}
    second = start(tmp_path, *COMMAND)
    while len(workers := descendants(second.pid)[1:]) < 2:  # before there is much done
        time.sleep(0.01)
    wait_for_units(tmp_path, len(times) + 1)
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = end(second)
    assert code == 2
    assert re.fullmatch(
        r"error: a process was ended by SIGKILL while it read large\.jsonl \(unit \d+\), perhaps for lack of memory: give fewer "
        r"than 2 --workers; the same command goes on from there\n",
        err,
    )
    third = start(tmp_path, *COMMAND)
    code, out, err = end(third)
    assert (code, err) == (0, "")
    assert "the rest by earlier starts" in out
    assert all(not path.exists() for path in times)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


@pytest.mark.slow
def test_ctrl_c_is_one_sentence_and_goes_on(large: Path, tmp_path: Path) -> None:
    process = start(tmp_path, *COMMAND)
    wait_for_units(tmp_path, 1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    code, _, err = end(process)
    assert (code, err) == (130, "stopped; the same command goes on from here, in out.partial\n")
    second = start(tmp_path, *COMMAND)
    wait_for_units(tmp_path, 2)
    stopped(second)
    code, _, err = run(tmp_path, *COMMAND)
    assert code == 2
    assert re.fullmatch(rf"error: out is being prepared by process {second.pid} on host .*; wait for that one.*\n", err)
    os.killpg(second.pid, signal.SIGCONT)
    code, out, err = end(second)
    assert (code, err) == (0, "")
    code, out, err = run(tmp_path, *COMMAND)
    assert (code, err) == (0, "")
    assert out.startswith("out is complete already\n  train ")


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    words = ("a.jsonl", "--out", "out", "--tokenizer")
    found = [
        run(tmp_path, *words, *more) for more in (["bytes"], ["gpt-2"], ["bytes", "--bos", "x", "--special", "bos"])
    ]
    assert [end.code for end in found] == [2, 2, 2]
    assert found[0].err == (
        "error: a.jsonl, line 2: its field 'text' is no text: 3; --bad-records skip leaves such records out\n"
    )
    assert (
        found[1].err == "error: --tokenizer = 'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'?\n"
    )
    assert found[2].err.startswith("error: --bos = 'x' is no special token of --tokenizer = 'bytes'")
    assert not (tmp_path / "out").exists()
    done = run(tmp_path, *words, "bytes", "--bad-records", "skip")
    assert done.code == 0, done.err
    assert "1 bad records are left out:\n    a.jsonl, line 2: its field 'text' is no text: 3\n" in done.out
    assert tomli.loads(done.out.partition("A recipe reads it with\n")[2])["data"]["path"] == "out"


def test_a_full_disk_is_one_sentence(large: Path, tmp_path: Path) -> None:
    limit = 2**18

    def no_larger() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code, _, err = run(tmp_path, *COMMAND, preexec_fn=no_larger)
    assert code == 2
    assert re.fullmatch(
        r"error: out\.partial: the disk is full \(File too large\); make room, and the same command goes on from here\n",
        err,
    )
    assert not list((tmp_path / "out.partial").glob("*.tokens*"))  # room for others


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, titanlike.cli.data, titanlike.data.prepare, titanlike.data.bpe, titanlike.data.workers; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(PYTHONPATH=str(ROOT)), check=True)


def test_a_terminal_has_one_live_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 1000)
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-m",
        "titanlike.cli.main",
        "data",
        "prepare",
        "a.txt",
        "--out",
        "out",
        "--tokenizer",
        "bytes",
    ]
    env = environment(PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="120")
    subprocess.run(command, cwd=tmp_path, env=env, stdout=theirs, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "100%  5.0 KB of 5.0 KB" in shown
    assert shown.rindex("\x1b[?25h") > shown.index("\x1b[?25l")  # the cursor is back


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the most memory that a process had")
def test_memory_does_not_grow_with_a_text_file(tmp_path: Path) -> None:
    code = (
        "import re, sys; from pathlib import Path; from titanlike.data.prepare import prepare; "
        "from titanlike.config.sections import Tokenizer; "
        "prepare([sys.argv[1]], Path(sys.argv[1] + '.out'), Tokenizer(), workers=0); "
        # Not getrusage: what it says of a process that was just started is its parent's.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) / 1024)"
    )
    peaks = []
    for size in (10, 80):
        (tmp_path / f"{size}.txt").write_bytes(b"all work and no play\n" * (size * 2**20 // 21))
        command = [sys.executable, "-c", code, str(tmp_path / f"{size}.txt")]
        done = subprocess.run(
            command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True, timeout=200
        )
        peaks.append(float(done.stdout))
    assert peaks[1] < peaks[0] + 10, peaks
