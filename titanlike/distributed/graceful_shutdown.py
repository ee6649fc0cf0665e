"""Being told to stop: heard at the end of a step, by all ranks at the same one, so that it can be saved."""

import os
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from titanlike.distributed import process_group

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class GracefulShutdown:
    """Within this context a signal does not end the process but asks for a stop. A second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.wanted = 0  # number of the signal that this rank was sent
        self.agreed = 0  # of the one that all ranks know of
        self._interrupted = False
        self._question: Any = None
        self._answer = torch.tensor(0)
        self._before: dict[int, Any] = {}

    def begin_sync(self, otherwise: bool = False) -> None:
        """Ask all ranks whether one was told to stop, or has to for a reason of its own. The answer comes while the work
        goes on."""
        self._answer = torch.tensor(self.wanted or int(otherwise))
        if process_group.world_size() > 1:
            self._question = dist.all_reduce(self._answer, op=dist.ReduceOp.MAX, async_op=True)

    def result(self) -> int:
        """The signal that some rank was sent, or another number that is not 0, or 0. The same on all ranks."""
        if self._question is not None:
            self._question.wait()
        elif self.wanted:
            self._answer.fill_(self.wanted)  # alone: nobody else has to hear it at the same step
        self.agreed = int(self._answer.numpy())  # on the host: no device is waited for
        return self.agreed

    def request(self, number: int = signal.SIGTERM) -> None:
        """As if this rank had been sent the signal."""
        self.wanted = max(self.wanted, number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            if process_group.is_main():  # not print: this may be in the middle of one
                os.write(2, b"\nstopping at the end of this step; again to leave at once\n")
        self.request(number)

    def __enter__(self) -> "GracefulShutdown":
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """SIGTERM of 15."""
    return signal.Signals(number).name
