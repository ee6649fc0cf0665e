"""Graceful shutdown: all ranks stop after the same step when one of them receives a signal."""

import os
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from titanlike.distributed import process_group

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class GracefulShutdown:
    """Context in which a signal requests a shutdown instead of ending the process. A second Ctrl-C raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.requested_signal = 0  # received by this rank
        self.agreed_signal = 0  # the same on all ranks
        self._interrupted = False
        self._work: Any = None
        self._reduced_signal = torch.tensor(0)
        self._previous_handlers: dict[int, Any] = {}

    def begin_sync(self, other_reason: bool = False) -> None:
        """Starts an asynchronous all-reduce of the requests. `other_reason` requests a shutdown without a signal."""
        self._reduced_signal = torch.tensor(self.requested_signal or int(other_reason))
        if process_group.world_size() > 1:
            self._work = dist.all_reduce(self._reduced_signal, op=dist.ReduceOp.MAX, async_op=True)

    def result(self) -> int:
        """Returns the signal number that a rank received, 1 for another reason, or 0. The same on all ranks."""
        if self._work is not None:
            self._work.wait()
        elif self.requested_signal:
            self._reduced_signal.fill_(self.requested_signal)  # a single process can stop at once
        self.agreed_signal = int(self._reduced_signal.numpy())  # on the host: no synchronization with a device
        return self.agreed_signal

    def request(self, number: int = signal.SIGTERM) -> None:
        """Requests a shutdown as if this rank had received the signal."""
        self.requested_signal = max(self.requested_signal, number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            if process_group.is_main():  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping after this step; press Ctrl-C again to exit at once\n")
        self.request(number)

    def __enter__(self) -> "GracefulShutdown":
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
