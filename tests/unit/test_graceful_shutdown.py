"""Graceful shutdown: a signal stops all ranks at the same step."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.pool import Pool
from titanlike.distributed.graceful_shutdown import SIGNALS, GracefulShutdown

Ranks = Callable[[int], Pool]


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_requests_a_shutdown(alone: None, number: int) -> None:
    before = signal.getsignal(number)
    with GracefulShutdown() as shutdown:
        shutdown.begin_sync()
        assert shutdown.result() == 0
        os.kill(os.getpid(), number)
        assert shutdown.result() == shutdown.agreed_signal == number  # a single process stops at this step
        shutdown.begin_sync()
        assert shutdown.result() == number
    assert signal.getsignal(number) == before


def test_second_ctrl_c_raises_keyboard_interrupt(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulShutdown() as shutdown, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert "press Ctrl-C again to exit at once" in capfd.readouterr().err
        assert shutdown.requested_signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_shutdown_without_a_signal(alone: None) -> None:
    with GracefulShutdown() as shutdown:
        shutdown.begin_sync(other_reason=True)
        assert shutdown.result() == 1


def _results_of_three_steps(signaled_rank: int) -> list[int]:
    """Sends a signal to one rank in the second step."""
    import torch.distributed as dist

    results = []
    with GracefulShutdown() as shutdown:
        for step in range(3):
            if step == 1 and dist.get_rank() == signaled_rank:
                os.kill(os.getpid(), signal.SIGUSR1)
            shutdown.begin_sync()
            results.append(shutdown.result())
    return results


@pytest.mark.parametrize("signaled_rank", [0, 1])
def test_all_ranks_stop_at_the_same_step(ranks: Ranks, signaled_rank: int) -> None:
    assert ranks(2).run(_results_of_three_steps, signaled_rank) == [[0, signal.SIGUSR1, signal.SIGUSR1]] * 2
