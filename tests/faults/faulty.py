"""Fault injection: runs the shipped program with wrapped library functions, by `--program=.../faulty.py` and the FAULTS variable.

A fault is an action before or after a call of a function, on one rank, at one step. The library is not changed for it.
"""

import errno
import functools
import json
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

PROGRAM = Path(__file__).resolve()
WRITING = "titanlike.checkpoint.format.write_all"
SHIPPED = PROGRAM.parents[2] / "recipes" / "pretrain.py"


@dataclass(frozen=True)
class Fault:
    """An action at a call of a function."""

    what: str
    """Full name of the function."""
    when: str = "before"
    """`before` or `after` the call, or `inside` a write of a shard, when half of it is written."""
    rank: int = 0
    step: int = 0
    """Step of the loop, or of the save that calls the function. 0 matches all."""
    do: str = "SIGKILL"
    """Names of signals to this process, and other actions, separated by commas."""


def variables(*faults: Fault) -> dict[str, str]:
    """Returns the environment variables that inject these faults."""
    return {"FAULTS": json.dumps([asdict(fault) for fault in faults])}


class StepCounter:
    """The current step of the training loop."""

    step = 0

    def install(self) -> None:
        """Records the step when the loop computes its learning rate."""

        def record(step: int, *_: Any) -> None:
            self.step = step

        wrap("titanlike.optim.schedule.learning_rate", before=record)

    def current(self) -> int:
        """Returns the step of the loop, or in a thread that saves, the saved step."""
        name = threading.current_thread().name
        return int(name.rpartition(" ")[2]) if name.startswith("save of step ") else self.step


def wrap(
    what: str, *, before: Callable[..., Any] = lambda *_: None, after: Callable[..., Any] = lambda *_: None
) -> None:
    """Calls functions with the arguments of another function, before or after it."""
    name, original, replace = resolve(what)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **named)
        after(*arguments)
        return result

    replace(name, wrapped)


def wrap_writing(what: str, act: Callable[..., Any]) -> None:
    """Calls `act` when the header, one tensor and half of another one are written to a shard."""
    name, original, replace = resolve(what)

    def wrapped(stream: Any, content: memoryview) -> None:
        stream.parts = getattr(stream, "parts", 0) + 1
        if stream.parts == 3:
            original(stream, content[: len(content) // 2])
            act(stream)
            content = content[len(content) // 2 :]
        original(stream, content)

    replace(name, wrapped)


def resolve(what: str) -> tuple[str, Callable[..., Any], Callable[..., None]]:
    """Returns the attribute name of a function, the function, and a setter that replaces it."""
    owner_name, _, name = what.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    package = sys.modules.get(owner_name.rpartition(".")[0])  # it may export the function

    def replace(name: str, value: Any) -> None:
        for each in (owner, package):
            if getattr(each, name, None) is original:
                setattr(each, name, value)

    return name, original, replace


def inject(fault: Fault, counter: StepCounter) -> None:
    """Wraps the function of a fault."""
    if str(fault.rank) != os.environ.get("RANK", "0"):
        return

    def act(*arguments: Any) -> None:
        if fault.step in (0, counter.current()):
            for action in fault.do.split(", "):
                perform(*action.split())

    if fault.when == "inside":
        wrap_writing(fault.what, act)
    else:
        wrap(fault.what, **{fault.when: act})


def perform(action: str, value: str = "") -> None:
    """Performs an action of a fault."""
    if action.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[action])
    elif action == "mark":
        Path(f"{value}.mark").touch()
    elif action == "await":
        end = time.monotonic() + 60
        while not Path(f"{value}.mark").exists():
            assert time.monotonic() < end, f"{value}.mark did not appear"
            time.sleep(0.005)
    elif action == "sleep":
        time.sleep(float(value))
    elif action == "timeout":  # of collectives
        c10d._set_pg_timeout(timedelta(seconds=float(value)), torch.distributed.group.WORLD)
    elif action == "limit":  # the maximum file size
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), resource.RLIM_INFINITY))
    elif action == "unlimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif action == "refuse":  # fails like a write to a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise ValueError(action)


def add_noise(model: torch.nn.Module, *_: Any) -> None:
    """Adds noise from torch's global generator to the gradients: a resume that does not restore the generator diverges."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                local = getattr(parameter.grad, "_local_tensor", parameter.grad)
                local.add_(torch.randn_like(local), alpha=1e-4)


if __name__ == "__main__":
    counter = StepCounter()
    counter.install()
    wrap("titanlike.optim.clipping.clip_gradients", before=add_noise)
    for fields in json.loads(os.environ.get("FAULTS", "[]")):
        inject(Fault(**fields), counter)
    sys.path[0] = str(SHIPPED.parent)
    # Not by runpy, which would make the shipped program the running one.
    exec(compile(SHIPPED.read_text(), SHIPPED, "exec"), {"__name__": "__main__", "__file__": str(SHIPPED)})
