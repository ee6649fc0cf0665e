"""Graceful shutdown: a signal stops all ranks at the same step."""

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.pool import Ranks
from tests.traffic import Traffic
from tests.training import mesh_of
from titanlike.distributed.graceful_shutdown import SIGNALS, GracefulShutdown
from titanlike.utils.live_line import LiveLine


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is not ignored, as it is if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_requests_a_shutdown(alone: None, number: int, hangup: None) -> None:
    before = signal.getsignal(number)
    with GracefulShutdown() as shutdown:
        shutdown.exchange(torch.device("cpu"))
        assert shutdown.result() == 0
        os.kill(os.getpid(), number)
        assert shutdown.result() == shutdown.agreed_signal == number  # a single process stops at this step
    assert signal.getsignal(number) == before and LiveLine.when_unread is None


def test_under_nohup_nothing_depends_on_the_terminal(alone: None, hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with GracefulShutdown() as shutdown:
        os.kill(os.getpid(), signal.SIGHUP)
        assert LiveLine.when_unread is not None
        LiveLine.when_unread()
        assert shutdown.result() == 0


def test_second_ctrl_c_raises_keyboard_interrupt(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulShutdown() as shutdown, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert "press Ctrl-C again to exit at once" in capfd.readouterr().err
        assert shutdown.requested_signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def _results_of_three_steps(sizes: dict[str, int], signaled_rank: int) -> tuple[list[int], Counter[str]]:
    """Sends a signal to one rank in the second step, and another one to rank 3. Returns the results and the collectives."""
    mesh = mesh_of("cpu", **sizes)
    results, counter = [], Traffic(mesh)
    with GracefulShutdown() as shutdown:
        for step in range(3):
            if step == 1 and dist.get_rank() == signaled_rank:
                os.kill(os.getpid(), signal.SIGUSR1)
            if step == 1 and dist.get_rank() == 3:
                shutdown.request(signal.SIGINT)
            with counter:
                shutdown.exchange(torch.device("cpu"))
            results.append(shutdown.result())
    return results, Counter({axis: calls for (_, axis), (calls, _) in counter.total.items()})


@pytest.mark.parametrize("sizes", [dict(shard=2, tensor=2), dict(replicate=2, pipeline=2), dict(shard=4)], ids=str)
@pytest.mark.parametrize("signaled_rank", [1, 2])
def test_all_ranks_stop_at_the_same_step(ranks: Ranks, sizes: dict[str, int], signaled_rank: int) -> None:
    """By one collective of all ranks a step."""
    for results, calls in ranks(4).run(_results_of_three_steps, sizes, signaled_rank):
        assert results == [0, signal.SIGUSR1, signal.SIGUSR1]
        assert calls.total() == 3
