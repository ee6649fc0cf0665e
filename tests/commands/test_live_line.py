"""The status line of commands: updated in place on a terminal, plain lines elsewhere."""

import errno
import os
import sys

import pytest

from titanlike.utils import live_line
from titanlike.utils.live_line import LiveLine, print_line


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
