"""Output: a status line that is updated in place on a terminal, plain lines elsewhere, and what happens if nobody reads them."""

import errno
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_READER = (errno.EPIPE, errno.EIO)  # of a pipe that nobody reads, and of a terminal that was closed


def discard_unread_output() -> bool:
    """Discards stdout and stderr if they are a pipe that nobody reads or a terminal that was closed. Returns whether one is."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    closed = [descriptor for descriptor, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]
    discard(*closed)
    return bool(closed)


def discard(*descriptors: int) -> None:
    """Makes descriptors /dev/null, also for what is still buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)


class LiveLine:
    """Prints lines, and shows a status line that is updated in place.

    On a terminal, `update` redraws the status line and `print` writes above it. Without a terminal, `update` prints a plain line,
    unless something was printed within the last `plain_interval` seconds. If stdout is a file on a full disk, lines are lost. If
    nobody reads it any more, `when_unread` is called, and lines are lost; without it, they raise `OSError`.

    Args:
        plain_interval: Seconds without output after which `update` prints a plain line where there is no terminal.
        bar: Draws a progress bar before the status text.
        transient: Erases the status line on `close` instead of leaving it on the screen.
        style: Style of the status text, in rich's syntax, such as "dim".
    """

    when_unread: ClassVar[Callable[[], None] | None] = None

    def __init__(
        self, *, plain_interval: float = 0.0, bar: bool = False, transient: bool = False, style: str = "none"
    ) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._plain_interval, self._bar, self._transient, self._style = plain_interval, bar, transient, style
        self._last_print = time.monotonic()
        self._progress: Progress | None = None

    def print(self, *parts: str | tuple[str, str]) -> None:
        """Prints one line made of `parts`; each is a text, or a text and its style on a terminal."""
        self._last_print = time.monotonic()
        with _output():
            if self._progress is not None or (self.is_terminal and any(isinstance(part, tuple) for part in parts)):
                from rich.console import Console
                from rich.text import Text

                console = self._progress.console if self._progress is not None else Console(highlight=False)
                console.print(Text.assemble(*parts), soft_wrap=True)
            else:
                print("".join(part if isinstance(part, str) else part[0] for part in parts), flush=True)

    def update(self, text: str, completed: float | None = None, total: float | None = None) -> None:
        """Sets the status text and the bar to `completed` of `total`. Shows the status line if it is not shown yet."""
        if not self.is_terminal:
            if time.monotonic() - self._last_print >= self._plain_interval:
                self.print(text)
            return
        with _output():
            if self._progress is None:
                self._progress = self._start(text)
            (task,) = self._progress.task_ids
            self._progress.update(task, description=text, completed=completed, total=total)
            self._progress.refresh()

    def close(self) -> None:
        """Stops updating the status line. Lines printed later appear below it; `update` starts a new one."""
        if self._progress is not None:
            with _output():
                self._progress.stop()
            self._progress = None

    def _start(self, text: str) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

        columns: list[ProgressColumn] = [TextColumn("{task.description}", style=self._style, markup=False)]
        if self._bar:
            columns.insert(0, BarColumn(bar_width=16))
        console = Console(highlight=False)
        progress = Progress(*columns, console=console, auto_refresh=False, transient=self._transient)
        progress.add_task(text, total=None)
        progress.start()
        return progress


def print_line(text: str, file: TextIO | None = None) -> None:
    """Prints a line to stdout, or another stream, whose loss is handled as by `LiveLine`."""
    with _output():
        print(text, file=file, flush=True)


@contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        when_unread = LiveLine.when_unread
        if error.errno in NO_READER and when_unread is not None and discard_unread_output():
            when_unread()
        elif error.errno not in DISK_FULL:
            raise
