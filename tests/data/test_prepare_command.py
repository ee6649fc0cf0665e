"""`titanlike data prepare` as a command: kills, Ctrl-C, a full disk; terminal output and memory."""

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

from tests.data.preparing import content, random_text
from tests.launching import ROOT, Cli, descendants, environment
from titanlike.tools.cli.data import progress_text
from titanlike.tools.data.prepare import Progress


def test_progress_text() -> None:
    progress = Progress(
        bytes_read=3_000_000_000, total_bytes=12_000_000_000, resumed_bytes=1_000_000_000, tokens=500_000_000, seconds=1000.0
    )  # fmt: skip
    text = " 25%  3.0 GB of 12.0 GB  2.0 MB/s  500.0K tokens/s  500.0M tokens  1:15:00 left"
    assert progress_text(progress) == text
    assert progress_text(Progress(0, 10, 0, 0, 0.0)).endswith("? left")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def start(folder: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    # The command, with work units so small that a second of work has many.
    program = (
        "from titanlike.data.tokens import work_units; work_units.MIN_SIZE = 400_000; "
        "from titanlike.tools.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "data", "prepare", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, **options,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> Ended:
    out, err = process.communicate(timeout=100)
    return Ended(process.returncode, out, err)


def run(folder: Path, *arguments: str, **options: Any) -> Ended:
    return end(start(folder, *arguments, **options))


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """Creates a file that takes a second or more, in 35 work units."""
    rng = random.Random(0)
    text = random_text(rng, 20_000)
    with (tmp_path / "large.jsonl").open("w") as file:
        while file.tell() < 14_000_000:
            begin = rng.randrange(len(text) - 5000)
            file.write(json.dumps({"text": text[begin : begin + rng.randrange(5000)]}) + "\n")
    yield tmp_path / "large.jsonl"
    (tmp_path / "large.jsonl").unlink()


COMMAND = ("large.jsonl", "--out", "out", "--tokenizer", "bytes", "--workers", "2", "--validation", "0.1")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_result_of_all_stages_after_kills_is_bit_identical(large: Path, tmp_path: Path) -> None:
    options = ("--duplicates", "remove-near", "--quality", "default", "--repeated-lines", "3")
    assert run(tmp_path, "large.jsonl", "--out", "undisturbed", *COMMAND[3:], *options).code == 0
    kills = 0
    # Numbers of files in the first pass (each unit writes four), in the second (two) and in the last (two).
    for count in (20, 80, 155, 220):
        process = start(tmp_path, *COMMAND, *options)
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "out.partial/stages").glob("*"))) < count and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kills += process.poll() is None
        children = descendants(process.pid)[1:]
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 5
        while not all(has_ended(pid) for pid in children):
            assert time.monotonic() < deadline, "workers outlive their parent"
    assert kills >= 3
    code, _, err = run(tmp_path, *COMMAND, *options)
    assert (code, err) == (0, "")
    found, expected = content(tmp_path / "out"), content(tmp_path / "undisturbed")
    assert found.keys() == expected.keys()
    assert found == expected
    assert json.loads(found["report.json"])["removed"]


@pytest.mark.slow
def test_ctrl_c_prints_one_line_and_the_command_resumes(large: Path, tmp_path: Path) -> None:
    process = start(tmp_path, *COMMAND)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out.partial").glob("unit-*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
    assert end(process) == (130, "", "stopped; the same command resumes from out.partial\n")
    done = run(tmp_path, *COMMAND)
    assert (done.code, done.err) == (0, "")
    assert "the rest before the interruption" in done.out
    assert run(tmp_path, *COMMAND).out.startswith("out is already complete\n  train ")


def test_user_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    arguments = ("data", "prepare", "a.jsonl", "--out", "out", "--tokenizer")
    for options, message in (
        (["bytes"], "a.jsonl, line 2: the field 'text' is not text: 3; --bad-records skip skips such records\n"),
        (["gpt-2"], "--tokenizer = 'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'?\n"),
        (["bytes", "--filter", "no.py:keep"], "--filter no.py:keep: no.py cannot be read: No such file or directory\n"),
        (
            ["bytes", "--repeated-lines", "1"],
            "--repeated-lines 1 removes every line; give at least 2, or 0 to keep them\n",
        ),
    ):
        assert cli(*arguments, *options, code=2).err == f"error: {message}"
    found = cli(*arguments, "bytes", "--out", "s3://bucket/out", code=2).err
    assert found.endswith(
        "argument --out: expected a local path, got 's3://bucket/out'; copy the result there afterwards\n"
    )
    assert not Path("out").exists() and not Path("s3:").exists()
    printed = cli(*arguments, "bytes", "--bad-records", "skip").out
    assert "1 bad records skipped:\n    a.jsonl, line 2: the field 'text' is not text: 3\n" in printed
    assert tomli.loads(printed.partition("Recipe:\n")[2])["data"]["path"] == "out"


def test_full_disk_is_one_line(large: Path, tmp_path: Path) -> None:
    limit = 2**18

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code, _, err = run(tmp_path, *COMMAND, preexec_fn=limit_file_size)
    assert code == 2
    assert re.fullmatch(
        r"error: out\.partial: the disk is full \(File too large\); free some space, then run the same command to resume, "
        r"or give an --out on another disk\n",
        err,
    )
    assert not list((tmp_path / "out.partial").glob("*.tokens*"))  # unfinished shards do not fill the disk


def test_workers_do_not_import_the_calling_program(tmp_path: Path) -> None:
    program = """
import os
from pathlib import Path
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens import work_units
from titanlike.tools.data.prepare import prepare

with open("imports", "a") as file:
    file.write("imported\\n")
work_units.MIN_SIZE = 10
prepare(["lines.jsonl"], Path("out"), Tokenizer(), workers=2)
"""
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "lines.jsonl").write_text('{"text": "a line"}\n' * 9)
    command = [sys.executable, "program.py"]
    subprocess.run(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), check=True, timeout=100)
    assert (tmp_path / "imports").read_text() == "imported\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak memory of a process")
def test_memory_does_not_grow_with_a_text_file(tmp_path: Path) -> None:
    code = (
        "import re, sys; from pathlib import Path; from titanlike.tools.data.prepare import prepare; "
        "from titanlike.config.sections import Tokenizer; "
        "prepare([sys.argv[1]], Path(sys.argv[1] + '.out'), Tokenizer(), workers=0); "
        # Not getrusage, which includes the parent's memory before exec.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) / 1024)"
    )
    peaks = []
    for size in (5, 40):
        (tmp_path / f"{size}.txt").write_bytes(b"all work and no play\n" * (size * 2**20 // 21))
        command = [sys.executable, "-c", code, str(tmp_path / f"{size}.txt")]
        done = subprocess.run(
            command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True, timeout=200
        )
        peaks.append(float(done.stdout))
    assert peaks[1] < peaks[0] + 10, peaks
