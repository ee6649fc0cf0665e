"""Processes that make units into shards, side by side. No torch.

Each has a pipe to its parent: a unit comes in, what became of it goes out. They die with the parent.
"""

import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from titanlike import environment
from titanlike.config import UserError
from titanlike.data.tokenizer import Tokenizer, build_tokenizer
from titanlike.data.units import Done, Options, Seen, Unit, make

TICK = 0.2  # seconds between two looks at how far they are

# A process of its own beginning, and no copy: what the parent has of threads and locks would not outlive the copying.
CONTEXT = get_context("spawn")


class Workers:
    """So many processes. Within this context they run; after it they are gone, whatever they were at."""

    def __init__(self, count: int, options: Options) -> None:
        self.count, self.options = count, options
        self._counts: Any = CONTEXT.RawArray("q", 2 * count)  # bytes and tokens of each, written by it alone
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes read and tokens made until now."""
        return sum(self._counts[0::2]), sum(self._counts[1::2])

    def __enter__(self) -> "Workers":
        # A Ctrl-C is sent to all processes of a terminal; these leave it to the parent, from their first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for place in range(self.count):
                pipe, theirs = CONTEXT.Pipe()
                words = (theirs, os.getpid(), self._counts, 2 * place, self.options)
                process = CONTEXT.Process(target=_serve, args=words, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(pipe)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is not None:
                process.kill()
            pipe.close()  # at which one that waits for a unit ends
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def results(self, units: Sequence[Unit]) -> Iterator[Done | None]:
        """What becomes of the units, in the order in which they are done; and None every now and then meanwhile."""
        waiting, busy = list(reversed(units)), dict[int, Unit]()
        for place in range(self.count):
            self._send(place, waiting, busy)
        while busy:
            ready = wait([self._pipes[place] for place in busy], timeout=TICK)
            for place in [place for place in busy if self._pipes[place] in ready]:
                yield self._receive(place, busy.pop(place))
                self._send(place, waiting, busy)
            if not ready:
                yield None

    def _send(self, place: int, waiting: list[Unit], busy: dict[int, Unit]) -> None:
        if waiting:
            busy[place] = waiting.pop()
            with suppress(OSError):  # it is dead, which is told when nothing comes from it
                self._pipes[place].send(busy[place])

    def _receive(self, place: int, unit: Unit) -> Done:
        try:
            found = self._pipes[place].recv()
        except (EOFError, OSError):
            raise UserError(self._how_it_died(place, unit)) from None
        if isinstance(found, Exception):
            raise found
        return found

    def _how_it_died(self, place: int, unit: Unit) -> str:
        process = self._processes[place]
        process.join(5.0)
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"a process {how} while it read {unit.parts[0].file.name} (unit {unit.number}), perhaps for lack of memory: give "
            f"fewer than {self.count} --workers; the same command goes on from there"
        )


def _serve(pipe: Connection, parent: int, counts: Any, place: int, options: Options) -> None:
    """Make units until there are no more."""
    environment.end_with_parent(parent)
    # Each process has a core: the library's own threads would only be in each other's way.
    environment.set_variables({"TOKENIZERS_PARALLELISM": "false"})
    tokenizer = build_tokenizer(options.tokenizer)

    def seen(size: int, tokens: int) -> None:
        counts[place] += size
        counts[place + 1] += tokens
        if os.getppid() != parent:  # where the system does not end us with it
            os._exit(1)

    with suppress(EOFError, BrokenPipeError):  # there is nobody who wants more
        while True:
            pipe.send(_result(pipe.recv(), options, tokenizer, seen))


def _result(unit: Unit, options: Options, tokenizer: Tokenizer, seen: Seen) -> Done | Exception:
    try:
        return make(unit, options, tokenizer, seen)
    except UserError as error:
        return error
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)  # told as if the system had found it first
        raise
    except Exception:  # noqa: BLE001  a fault of ours, which the parent shows
        return RuntimeError(traceback.format_exc())
