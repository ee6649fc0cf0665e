"""What all programs of the command line share: when they refuse to start, and how they end if output cannot be written."""

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed.environment import fail
from titanlike.utils import system
from titanlike.utils.live_line import DISK_FULL, NO_READER, discard, discard_unread_output

BROKEN_PIPE = 128 + signal.SIGPIPE  # exit code, as a shell reports a program that SIGPIPE ends


@contextmanager
def command_line() -> Iterator[None]:
    """Wraps the main function of a program, as a decorator or in a `with` statement.

    Refuses to start where no command works, and reports output that cannot be written.
    """
    try:
        _check_process()
    except UserError as error:
        fail(error)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # raises here what the interpreter would print at its exit
    except OSError as error:
        exit_if_output_failed(error)
        if error.errno == errno.ENAMETOOLONG:
            fail(UserError(f"{shown(str(error.filename))} is too long for a path"))
        raise


def exit_if_output_failed(error: OSError) -> None:
    """Exits if stdout or stderr is a pipe without a reader, as in `titanlike plan ... | head`, or a file on a full disk.

    The action of SIGPIPE is not restored: a connection that another rank or an object store closes would end the process, too.
    """
    if error.errno in NO_READER and discard_unread_output():
        sys.exit(BROKEN_PIPE)
    if error.errno in DISK_FULL and error.filename is None:
        with suppress(OSError, SystemExit):  # stderr may be on the same disk
            fail(UserError(f"the output cannot be written: {error.strerror}; free some space, or write it elsewhere"))
        discard(1, 2)
        sys.exit(2)


def _check_process() -> None:
    """Raises `UserError` for arguments and a working directory with which no command works."""
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"{shown(argument)} is not text in this terminal's encoding") from None
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; change to another directory") from None
    system.raise_open_file_limit()
