"""Processes that died of a signal that nobody sent: a fault in native code, such as a corrupted heap.

A test with such a process fails with `Crash`, and `.ci/run` does not run it again. Signals that tests send are not among these.
"""

import functools
import re
import signal
import subprocess
from typing import Any

SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
MAX_TEXT = 6000  # characters of stderr; the native message precedes the Python stacks of all threads
FATAL = "Fatal Python error: "  # printed by faulthandler, also in the processes that a process starts
# The stack of a thread, printed by torch.
NATIVE = re.compile(
    r"^SIG[A-Z]+\(\d+\), PID: \d+, Thread \d+: \n(?: ?frame #\d.*\n|<omitting python frames>\n)+\n?", re.MULTILINE
)
CRASHED = "FatalSignalHandler::fatalSignalHandler"  # in the stack of the thread that received the signal


class Crash(AssertionError):
    """A process died of one of `SIGNALS`. `.ci/run` looks for the name of this class."""


def cause(returncode: int | None) -> str:
    """Returns how a process ended: the signal, its own or that of a shell or a launcher, or the exit code."""
    number = -(returncode or 0)
    if number > 0:
        return signal.Signals(number).name
    if -number - 128 in SIGNALS:
        return signal.Signals(-number - 128).name
    return f"exit code {returncode}"


def check(what: str, returncode: int | None, errors: str) -> None:
    """Raises `Crash` if the process, or one that it started, died of one of `SIGNALS`."""
    ended = cause(returncode)
    if ended in [number.name for number in SIGNALS] or FATAL in errors:
        native = "".join(stack for stack in NATIVE.findall(errors) if CRASHED in stack)
        errors = NATIVE.sub("", errors)
        start = max(0, errors.find(FATAL) - MAX_TEXT // 2)
        raise Crash(f"{what}: {ended}\n{native}{errors[start : start + MAX_TEXT]}")


def check_all_processes() -> None:
    """Has every process that this one starts and communicates with checked when it ends."""
    communicate = subprocess.Popen.communicate

    @functools.wraps(communicate)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = communicate(self, *args, **kwargs)
        texts = [text.decode(errors="replace") if isinstance(text, bytes) else text or "" for text in found]
        check(f"a process crashed: {self.args}", self.returncode, "\n".join(texts))
        return found

    subprocess.Popen.communicate = checked  # type: ignore[method-assign]
