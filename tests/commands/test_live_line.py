"""The status line of commands: updated in place on a terminal, plain lines elsewhere."""

import argparse
import errno
import os
import re
import select
import subprocess
import sys

import pytest

from titanlike.tools.arguments import positive_int
from titanlike.utils import live_line
from titanlike.utils.live_line import LiveLine, print_line

PROGRAM = """
from titanlike.utils.live_line import LiveLine
line = LiveLine(bar=True)
line.update("starting", 0, 4)
line.print("[bold] is text, ", ("colored", "cyan"))
line.update("half", 2, 4)
line.close()
line.print("below")
line = LiveLine(transient=True)
line.update("erased")
line.close()
"""


def test_without_a_terminal_updates_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    line = LiveLine()
    line.update("1 of 2", 1, 2)
    line.print("text ", ("in color", "cyan"))
    line.update("2 of 2", 2, 2)
    line.close()
    assert capsys.readouterr().out == "1 of 2\ntext in color\n2 of 2\n"


def test_plain_lines_have_an_interval(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(live_line.time, "monotonic", lambda: now)
    line = LiveLine(plain_interval=10.0)
    for now in (105.0, 110.0, 115.0):
        line.update(f"update {now:g}")
    line.print("text")  # restarts the interval
    for now in (120.0, 125.0):
        line.update(f"update {now:g}")
    assert capsys.readouterr().out == "update 110\ntext\nupdate 125\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_ignored(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.print", fail)
    LiveLine().print("text")
    number = errno.EPIPE
    with pytest.raises(BrokenPipeError):
        LiveLine().print("text")


def test_output_that_nobody_reads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, calls = True, list[str]()

    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "")

    monkeypatch.setattr("builtins.print", fail)
    monkeypatch.setattr(live_line, "discard_unread_output", lambda: lost)
    monkeypatch.setattr(LiveLine, "when_unread", lambda: calls.append("unread"))
    LiveLine().print("text")
    print_line("text", sys.stderr)
    assert calls == ["unread", "unread"]
    lost = False  # the error of another file
    with pytest.raises(BrokenPipeError):
        print_line("text")


@pytest.mark.parametrize("descriptor", [1, 2])
def test_only_the_output_that_nobody_reads_is_discarded(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[tuple[int, ...]] = []
    monkeypatch.setattr(live_line, "discard", lambda *descriptors: discarded.append(descriptors))
    unread, written = os.pipe()
    os.close(unread)
    saved = os.dup(descriptor)
    os.dup2(written, descriptor)
    found = live_line.discard_unread_output()
    os.dup2(saved, descriptor)
    os.close(saved)
    os.close(written)
    assert (found, discarded) == (True, [(descriptor,)])


def test_what_is_written_to_a_discarded_descriptor_is_lost() -> None:
    reader, written = os.pipe()
    live_line.discard(written)
    os.write(written, b"lost")
    os.close(written)
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_terminal() -> None:
    controller, terminal = os.openpty()
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=variables, stdout=terminal, stderr=terminal, check=True)
    os.close(terminal)
    shown = ""
    while select.select([controller], [], [], 1)[0]:
        try:
            shown += os.read(controller, 10_000).decode()
        except OSError:  # end of the output
            break
    os.close(controller)
    assert "[bold] is text, \x1b[36mcolored\x1b[0m\r\n" in shown
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 2  # the cursor is visible again
    assert re.search(r"half\S*\r\n\x1b\[\?25hbelow\r\n", shown)
    assert shown.endswith("erased\r\n\x1b[?25h\r\x1b[1A\x1b[2K")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_positive_int(text: str) -> None:
    assert positive_int("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match=f"^expected an integer of at least 1, got '{text}'$"):
        positive_int(text)
