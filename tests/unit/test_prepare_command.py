"""`titanlike data prepare` as a user runs it: killed, interrupted, without room; its screen and its memory."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli

from tests.launching import ROOT, descendants, environment
from tests.unit.preparing import content, words
from titanlike.cli.data import line
from titanlike.data.prepare.prepare import Progress


def test_a_line_of_progress() -> None:
    text = line(
        Progress(done=3_000_000_000, total=12_000_000_000, before=1_000_000_000, tokens=500_000_000, seconds=1000.0)
    )
    assert text == " 25%  3.0 GB of 12.0 GB  2.0 MB/s  500.0K tokens/s  500.0M tokens  1:15:00 left"
    assert line(Progress(0, 10, 0, 0, 0.0)).endswith("? left")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def start(folder: Path, *words: str, **options: Any) -> "subprocess.Popen[str]":
    # The command, with units so small that a moment's work has many.
    program = (
        "from titanlike.data.prepare import work_units; work_units.SMALLEST = 400_000; "
        "from titanlike.cli.main import main; main()"
    )
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
        "import sys, titanlike.cli.data, titanlike.data.prepare.prepare; "
        "import titanlike.data.text.train_tokenizer, titanlike.data.prepare.workers; "
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
        "import re, sys; from pathlib import Path; from titanlike.data.prepare.prepare import prepare; "
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
