"""How the launcher starts a job, restarts it and explains its end, without processes: `tests/faults` has them."""

import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher import api

from titanlike.distributed import torchrun
from titanlike.distributed.launch_config import LaunchConfig
from titanlike.distributed.process_group import PEER_ENDED
from titanlike.utils import system
from titanlike.utils.live_line import LiveLine

ELASTIC = LaunchConfig(2, 0, 8, "127.0.0.1", 4711, max_restarts=3, max_nodes=4)
PLACE = "MASTER_ADDR=127.0.0.1 and MASTER_PORT=4711"
USED_UP, FAILED = "all of MAX_RESTARTS=3 are used up", "process 0 exited with code 7; see its output above"


def failures(*ends: tuple[int, int]) -> dict[int, ProcessFailure]:
    """Returns the failures of ranks that ended with these codes at these seconds."""
    found = {rank: ProcessFailure(rank, pid=1, exitcode=code, error_file="") for rank, (code, _) in enumerate(ends)}
    for failure, (_, seconds) in zip(found.values(), ends, strict=True):
        failure.timestamp = seconds
    return found


def test_the_process_that_failed_first_is_named() -> None:
    """Not one that the launcher has killed because it did not end, and not one that lost the connection to a killed one."""
    assert torchrun._first_failure(failures((-9, 130), (1, 100), (-15, 101)))[0] == 1
    assert torchrun._first_failure(failures((1, 100), (-9, 101), (-15, 101)))[0] == 1
    assert torchrun._first_failure(failures((1, 100), (-9, 100), (2, 101)))[0] == 2


def test_only_a_lost_connection_of_gloo_is_taken_for_one() -> None:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711. More"
    found = PEER_ENDED.search(text)
    assert found and found[1] == "Connection closed by peer [127.0.0.1]:4711"
    for other in (
        "Caught OSError in a worker: Connection reset by peer",
        "remote process exited or there was a network error",
    ):
        assert PEER_ENDED.search(other) is None


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (7, 7, f"{FAILED}; {USED_UP}"), (3, 3, USED_UP), *((code, code, "") for code in (2, 129, 130, 138, 141, 143)),
        (-9, 1, f"process 0 was terminated by SIGKILL, as by Linux when memory runs out; {USED_UP}"),
        (RendezvousClosedError(), 1, "the job has ended"),
        (RendezvousTimeoutError(), 1, f"fewer than 2 nodes have met at {PLACE}"),
        (
            RendezvousError(), 1,
            f"the node that other nodes meet at cannot be reached ({PLACE}); start the job again, and it resumes",
        ),
    ],
)  # fmt: skip
def test_the_end_of_an_elastic_job_is_explained_once(
    end: Any, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not if the process has printed what it was, and a restart would not help."""
    for owner, name, value in ((LiveLine, "when_unread", None), (api, "LocalElasticAgent", None)):
        monkeypatch.setattr(owner, name, value)
    error = ChildFailedError("", failures((end, 1))) if isinstance(end, int) else end
    monkeypatch.setattr(torchrun, "run", run := Mock(side_effect=error))
    monkeypatch.setattr(torchrun, "parse_args", lambda options: options)
    monkeypatch.setattr(system, "set_variables", variables := Mock())
    monkeypatch.setattr(system, "ignores_hangup", lambda: False)
    assert torchrun.torchrun(ELASTIC, ["mlm.py", "--a=b"], 30) == code
    assert run.call_args.args[0] == [
        "--nproc-per-node=8", "--max-restarts=3", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-id=titanlike", "--rdzv-endpoint=127.0.0.1:4711",
        "--local-addr=127.0.0.1", "mlm.py", "--a=b",
    ]  # fmt: skip
    variables.assert_called_once_with({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert capsys.readouterr().err == (f"error: {message}\n" if message else "")


@pytest.mark.parametrize(
    ("code", "is_elastic", "left", "message"),
    [
        (7, False, 2, f"{FAILED}; restarting (2 of 3)"), (7, True, 2, f"{FAILED}; restarting (2 of 3)"), (2, False, 0, ""),
        (143, False, 0, ""), (143, True, 2, "a node leaves or joins; restarting"),
    ],
)  # fmt: skip
def test_user_errors_and_signals_cause_no_restart(
    code: int,
    is_elastic: bool,
    left: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = SimpleNamespace(is_failed=lambda: True, failures=failures((code, 1)))
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: result)
    kind: Any = torchrun._agent_type(30, is_elastic=is_elastic)
    agent, group, restarted = kind.__new__(kind), SimpleNamespace(spec=SimpleNamespace(max_restarts=3)), list[object]()
    agent._remaining_restarts, agent._restart_workers = 2, restarted.append
    found = agent._monitor_workers(group)
    assert (agent._remaining_restarts, restarted) == (left, [group] if "joins" in message else [])
    assert found.state == WorkerState.HEALTHY if restarted else found is result
    assert capsys.readouterr().err == (f"warning: {message}\n" if message else "")


def test_processes_have_the_shutdown_timeout_after_a_signal_and_30_s_after_a_failure() -> None:
    agent: Any = object.__new__(torchrun._agent_type(600, is_elastic=False))
    given: list[float] = []
    agent._pcontext = SimpleNamespace(close=lambda _, timeout=None: given.append(timeout))
    agent._worker_watchdog = agent._health_check_server = None
    agent._shutdown()
    try:
        raise SignalException("SIGTERM", signal.SIGTERM)
    except SignalException as stopped:
        agent._shutdown(stopped.sigval)
    assert given[::2] == [30, 600]  # after each of these, torch closes what is closed
