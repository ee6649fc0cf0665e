"""Graceful shutdown: all ranks stop after the same step when one of them receives a signal."""

import os
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from titanlike.distributed import process_group
from titanlike.utils.async_d2h import AsyncD2H
from titanlike.utils.live_line import LiveLine, discard_unread_output
from titanlike.utils.system import ignores_hangup

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class GracefulShutdown:
    """Context in which a signal requests a shutdown instead of ending the process, and so does output that nobody reads any more. A
    second Ctrl-C raises `KeyboardInterrupt`. Under nohup, a closed terminal and unread output have no effect."""

    def __init__(self) -> None:
        self.requested_signal = 0  # received by this rank
        self.agreed_signal = 0  # the same on all ranks
        self._interrupted = False
        self._num_requests: AsyncD2H | None = None
        self._previous_handlers: dict[int, Any] = {}

    def exchange(self, device: torch.device) -> None:
        """Starts to sum the requests of all ranks. Does not synchronize a GPU with the host."""
        if process_group.world_size() > 1:
            request = torch.full((1,), float(self.requested_signal > 0), device=device)
            dist.all_reduce(request)
            self._num_requests = AsyncD2H(request)

    def result(self) -> int:
        """Returns the signal that a rank had received before the last exchange, or 0. The same on all ranks."""
        if process_group.world_size() == 1:
            self.agreed_signal = self.requested_signal  # a single process can stop at once
        elif self._num_requests and self._num_requests.read(deferred=True)[0] > 0:
            self.agreed_signal = max(process_group.all_gather_object(self.requested_signal))
        return self.agreed_signal

    def request(self, number: int = signal.SIGTERM) -> None:
        """Requests a shutdown as if this rank had received the signal. Any other number is another reason."""
        self.requested_signal = max(self.requested_signal, number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            if process_group.is_main():  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping after this step or the next; press Ctrl-C again to exit at once\n")
        if number == signal.SIGHUP:
            discard_unread_output()
        self.request(number)

    def __enter__(self) -> "GracefulShutdown":
        numbers = [number for number in SIGNALS if number != signal.SIGHUP or not ignores_hangup()]
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in numbers}
        LiveLine.when_unread = lambda: None if ignores_hangup() else self.request(signal.SIGPIPE)
        return self

    def __exit__(self, *error: object) -> None:
        LiveLine.when_unread = None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
