"""The shipped program, unchanged, with faults planted into what it calls: `--recipe=.../faulty.py`, with FAULTS set.

A fault says what is done before or after which function, on which rank, at which step. The library knows nothing of it.
"""

import errno
import functools
import json
import os
import pkgutil
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PROGRAM = Path(__file__).resolve()
WRITING = "titanlike.checkpoint.format.write_all"
SHIPPED = PROGRAM.parents[2] / "recipes" / "pretrain.py"
Room = namedtuple("Room", "total used free")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    what: str
    """The function, by its full name."""
    when: str = "before"
    """`before` it, `after` it, or `inside`: when half of a shard is written, for what writes it."""
    rank: int = 0
    step: int = 0
    """Of the loop, or of the save where a save is what calls it. 0: any."""
    do: str = "SIGKILL"
    """Signals to this process by name, and other deeds, separated by commas."""
    given: str = ""
    """Only if this is one of the arguments."""


def variables(*faults: Fault) -> dict[str, str]:
    """What plants these faults."""
    return {"FAULTS": json.dumps([asdict(fault) for fault in faults])}


class Clock:
    """The step that the loop is at."""

    step = 0

    def plant(self) -> None:
        """The loop asks for the learning rate of each step once, first of all."""

        def note(step: int, *_: Any) -> None:
            self.step = step

        wrap("titanlike.optim.schedule.learning_rate", before=note)

    def now(self) -> int:
        """In a thread that saves, the step that is saved."""
        name = threading.current_thread().name
        return int(name.rpartition(" ")[2]) if name.startswith("save of step ") else self.step


def wrap(
    what: str, *, before: Callable[..., Any] = lambda *_: None, after: Callable[..., Any] = lambda *_: None
) -> None:
    """Have something done before or after a function, with its arguments."""
    name, original, put = found(what)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **named)
        after(*arguments)
        return result

    put(name, wrapped)


def wrap_writing(what: str, act: Callable[..., Any]) -> None:
    """Have something done when the header, one piece and half of another are written into a shard."""
    name, original, put = found(what)

    def wrapped(stream: Any, content: memoryview) -> None:
        stream.parts = getattr(stream, "parts", 0) + 1
        if stream.parts == 3:
            original(stream, content[: len(content) // 2])
            act(stream)
            content = content[len(content) // 2 :]
        original(stream, content)

    put(name, wrapped)


def found(what: str) -> tuple[str, Callable[..., Any], Callable[..., None]]:
    """The name of a function in what holds it, the function, and how another is put there."""
    owner_name, _, name = what.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    return name, getattr(owner, name), functools.partial(setattr, owner)


def plant(fault: Fault, clock: Clock) -> None:
    """Let a fault happen when its time comes."""
    if str(fault.rank) != os.environ.get("RANK", "0"):
        return

    def act(*arguments: Any) -> None:
        if fault.step in (0, clock.now()) and (not fault.given or fault.given in map(str, arguments)):
            for deed in fault.do.split(", "):
                if deed == "spoil":  # a tensor, the first argument
                    arguments[0].data.fill_(float("nan"))
                else:
                    do(*deed.split())

    if fault.when == "inside":
        wrap_writing(fault.what, act)
    else:
        wrap(fault.what, **{fault.when: act})


def do(deed: str, word: str = "") -> None:
    """What a fault can do."""
    if deed.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[deed])
    elif deed == "mark":
        Path(f"{word}.mark").touch()
    elif deed == "await":
        end = time.monotonic() + 60
        while not Path(f"{word}.mark").exists():
            assert time.monotonic() < end, f"{word} did not come to pass"
            time.sleep(0.005)
    elif deed == "sleep":
        time.sleep(float(word))
    elif deed == "limit":  # the size that a file may have
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(word), resource.RLIM_INFINITY))
    elif deed == "unlimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif deed == "full":  # the disk seems to be
        shutil.disk_usage = lambda _: Room(1 << 30, (1 << 30) - 1000, 1000)  # type: ignore[assignment, return-value]
    elif deed == "refuse":  # as a full disk does
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise ValueError(deed)


def draw(model: torch.nn.Module, *_: Any) -> None:
    """Noise on the gradients, from torch's generator: a resume that does not restore it goes another way."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                mine = getattr(parameter.grad, "_local_tensor", parameter.grad)
                mine.add_(torch.randn_like(mine), alpha=1e-4)


if __name__ == "__main__":
    clock = Clock()
    clock.plant()
    wrap("titanlike.optim.clipping.clip_gradients", before=draw)
    for said in json.loads(os.environ.get("FAULTS", "[]")):
        plant(Fault(**said), clock)
    sys.path[0] = str(SHIPPED.parent)
    runpy.run_path(str(SHIPPED), run_name="__main__")
