"""Processes that make units into shards, side by side. No torch.

Each is a python of its own: a copy of the parent would have its threads and locks without what holds them, and a process of
`multiprocessing` would import the parent's program once more, which may take seconds. A pipe brings units to it, and what has
become of them back. They die with the parent.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType

from titanlike.config import UserError
from titanlike.data.prepare.work_units import Options, Seen, WorkUnit, WorkUnitResult, make
from titanlike.data.text.tokenizer import Tokenizer, build_tokenizer
from titanlike.utils import system

TICK = 0.2  # seconds between two looks at how far they are
PROGRAM = "import sys; sys.path = {path!r}; from titanlike.data.prepare.workers import serve; serve({pipe}, {parent})"


class Workers:
    """So many processes. Within this context they run; after it they are gone, whatever they were at."""

    def __init__(self, count: int, options: Options) -> None:
        self.count, self.options = count, options
        self._workers: list[_Worker] = []

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes read and tokens made until now."""
        return sum(worker.read for worker in self._workers), sum(worker.tokens for worker in self._workers)

    def __enter__(self) -> "Workers":
        # A Ctrl-C is sent to all processes of a terminal; these leave it to the parent, from their first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self.count):
                self._workers.append(_Worker(self.options))
        except OSError as error:
            self._end(at_once=True)
            raise UserError(f"no more processes can be started ({error.strerror}); give fewer --workers") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end(at_once=kind is not None)

    def results(self, units: Sequence[WorkUnit]) -> Iterator[WorkUnitResult | None]:
        """What becomes of the units, in the order in which they are done; and None every now and then meanwhile."""
        waiting, busy = list(reversed(units)), dict[Connection, _Worker]()
        for worker in self._workers:
            if waiting:
                worker.begin(waiting.pop())
                busy[worker.pipe] = worker
        while busy:
            for pipe in wait(list(busy), timeout=TICK):
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                done = worker.hear(self.count)
                if done is not None:
                    del busy[pipe]
                    yield done
                    if waiting:
                        worker.begin(waiting.pop())
                        busy[pipe] = worker
            yield None

    def _end(self, at_once: bool) -> None:
        for worker in self._workers:
            if at_once:
                worker.process.kill()
            worker.pipe.close()  # at which one that waits for a unit ends
        for worker in self._workers:
            try:
                worker.process.wait(5.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self, options: Options) -> None:
        self.read = self.tokens = 0
        self.pipe, theirs = Pipe()
        program = PROGRAM.format(path=sys.path, pipe=theirs.fileno(), parent=os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._tell(options)

    def begin(self, unit: WorkUnit) -> None:
        self.unit = unit
        self._tell(unit)

    def hear(self, count: int) -> WorkUnitResult | None:
        """What has become of its unit, if it is done."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            raise UserError(self._how_it_died(count)) from None
        if isinstance(found, Exception):
            raise found
        if isinstance(found, WorkUnitResult):
            return found
        self.read, self.tokens = found
        return None

    def _tell(self, what: WorkUnit | Options) -> None:
        with suppress(OSError):  # it is dead, which is told when nothing comes from it
            self.pipe.send(what)

    def _how_it_died(self, count: int) -> str:
        code = self.process.wait(5.0)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"a process {how} while it read {self.unit.parts[0].file.name} (unit {self.unit.number}), perhaps for lack of "
            f"memory: give fewer than {count} --workers; the same command goes on from there"
        )


def serve(descriptor: int, parent: int) -> None:
    """What a process does: make units until there are no more."""
    system.kill_with_parent(parent)
    # Each process has a core: the library's own threads would only be in each other's way.
    system.set_variables({"TOKENIZERS_PARALLELISM": "false"})
    pipe = Connection(descriptor)
    with suppress(EOFError, OSError):  # there is nobody who wants more
        options = pipe.recv()
        meter = _Meter(pipe, parent)
        tokenizer = build_tokenizer(options.tokenizer)
        while True:
            result = _result(pipe.recv(), options, tokenizer, meter.add)
            meter.tell()
            pipe.send(result)


class _Meter:
    """Tells the parent how far this process is, not too often."""

    def __init__(self, pipe: Connection, parent: int) -> None:
        self.pipe, self.parent = pipe, parent
        self.read = self.tokens = 0
        self.told = time.monotonic()

    def add(self, read: int, tokens: int) -> None:
        self.read += read
        self.tokens += tokens
        if time.monotonic() - self.told >= TICK:
            self.tell()

    def tell(self) -> None:
        if os.getppid() != self.parent:  # where the system does not end us with it
            os._exit(1)
        self.told = time.monotonic()
        self.pipe.send((self.read, self.tokens))


def _result(unit: WorkUnit, options: Options, tokenizer: Tokenizer, seen: Seen) -> WorkUnitResult | Exception:
    try:
        return make(unit, options, tokenizer, seen)
    except UserError as error:
        return error
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)  # told as if the system had found it first
        raise
    except Exception:  # noqa: BLE001  a fault of ours, which the parent shows
        return RuntimeError(traceback.format_exc())
