"""Being told to stop: heard once, and by all ranks at the same step."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.pool import Pool
from titanlike.distributed.graceful_shutdown import SIGNALS, GracefulShutdown, signal_name

Ranks = Callable[[int], Pool]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_for_a_stop_and_no_more(alone: None, number: int) -> None:
    before = signal.getsignal(number)
    with GracefulShutdown() as shutdown:
        shutdown.begin_sync()
        assert shutdown.result() == 0
        os.kill(os.getpid(), number)
        assert shutdown.result() == shutdown.agreed == number  # alone: at the end of this very step
        shutdown.begin_sync()
        assert shutdown.result() == number
    assert signal.getsignal(number) == before
    assert signal_name(number).startswith("SIG")


def test_a_second_ctrl_c_ends_it_at_once(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulShutdown() as shutdown, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert "again to leave at once" in capfd.readouterr().err
        assert shutdown.wanted == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_a_reason_that_is_no_signal_is_heard_too(alone: None) -> None:
    with GracefulShutdown() as shutdown:
        shutdown.begin_sync(otherwise=True)
        assert shutdown.result() == 1


def _steps(told: int) -> list[int]:
    """What each of three steps is answered, where one rank is told to stop in the second."""
    import torch.distributed as dist

    heard = []
    with GracefulShutdown() as shutdown:
        for step in range(3):
            if step == 1 and dist.get_rank() == told:
                os.kill(os.getpid(), signal.SIGUSR1)
            shutdown.begin_sync()
            heard.append(shutdown.result())
    return heard


@pytest.mark.parametrize("told", [0, 1])
def test_all_ranks_hear_it_at_the_same_step(ranks: Ranks, told: int) -> None:
    assert ranks(2).run(_steps, told) == [[0, signal.SIGUSR1, signal.SIGUSR1]] * 2
