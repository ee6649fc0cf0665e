"""Diagnosis of missing ranks from heartbeats, and the watchdog in a single process and in two."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Ranks
from titanlike.distributed.heartbeat import HeartbeatThread, diagnose_missing_ranks, format_ranks
from titanlike.distributed.watchdog import PAUSE_TIMEOUT, Heartbeat, Watchdog, stack_location
from titanlike.utils.compat import flight_records


def heartbeat(step: int, location: str = "all_reduce (x.py:1)", **other: object) -> Heartbeat:
    return Heartbeat(step, "host", 100 + step, 1, time=1000.0, location=location, **other)  # type: ignore[arg-type]


FINISHED = {1: heartbeat(56, finished=True), 2: heartbeat(57, finished=True)}
MANY = {rank: heartbeat(57, "main (own.py:3)") if rank == 40 else heartbeat(57) for rank in range(64)}


@pytest.mark.parametrize(
    ("heartbeats", "silent", "expected"),
    [
        (
            {0: heartbeat(57), 1: heartbeat(56)}, [1],
            ["rank 1 (pid 156 on host) sent its last heartbeat 31 s ago at step 56: its process is stopped, or its host is down",
             "rank 0 waits in all_reduce (x.py:1)"],
        ),
        ({0: heartbeat(1), 1: None}, [1], ["rank 1 has sent no heartbeat: its process is stopped, or its host is down"]),
        (
            {0: heartbeat(57), 1: heartbeat(56, "main (own.py:3)"), 2: heartbeat(57)}, [],
            ["rank 1 (pid 156 on host) is alive at step 56; the others wait at step 57", "rank 1 waits in main (own.py:3)",
             "ranks 0, 2 wait in all_reduce (x.py:1)"],
        ),
        # The rarest location comes first.
        (MANY, [], ["all 64 ranks are alive at step 57", "rank 40 waits in main (own.py:3)",
                    "ranks 0-39, 41-63 wait in all_reduce (x.py:1)"]),
        ({0: heartbeat(57), **FINISHED}, [], ["ranks 1-2 left the training loop at step 56"]),
        (FINISHED, [], ["ranks 1-2 left the training loop at step 56"]),
    ],
    ids=["silent", "no heartbeat", "behind", "elsewhere", "some finished", "all finished"],
)  # fmt: skip
def test_the_ranks_that_others_wait_for_are_named(heartbeats: Any, silent: list[int], expected: list[str]) -> None:
    assert diagnose_missing_ranks(heartbeats, silent, now=1031.4)[: len(expected)] == expected


def test_a_rank_is_silent_if_its_heartbeat_does_not_change_over_a_series_of_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, thread = dist.HashStore(), HeartbeatThread(heartbeat(1), 0, 4, interval=1, timeout=5)
    changes = {1: 0, 2: 0}  # of ranks; rank 2 has finished, and rank 3 has no heartbeat
    for now, silence, expected in (
        (10, 3, []), (13, 3, []), (14, 3, [1, 3]), (14, None, []), (16, None, [1, 3]), (22, None, []), (26, None, []),
        (28, None, [1, 3]),
    ):  # fmt: skip
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        for rank, step in {0: now, **changes}.items():
            store.set(str(rank), json.dumps(dataclasses.asdict(heartbeat(step, finished=rank == 2))))
        heartbeats, silent = thread.read_all(store, silence)
        assert silent == expected, now
        assert [bool(each) for each in heartbeats.values()] == [True, True, True, False]


def test_a_silent_process_of_the_same_launcher_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    own, killed = heartbeat(1), list[str]()
    thread = HeartbeatThread(own, 0, 4, interval=1, timeout=5)
    others = {0: own, 1: heartbeat(2), 2: dataclasses.replace(own, host="other"), 3: None}
    monkeypatch.setattr(thread, "_wait_for_dumps", lambda: (others, [1, 2, 3]))
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: killed.append(command[-1]))
    assert thread.diagnose(is_reporter=True) and killed == ["sleep 3; kill -9 102"]


def test_number_of_lines_is_limited() -> None:
    found = diagnose_missing_ranks(dict.fromkeys(range(512), heartbeat(3)), range(100, 400), now=1000.0)
    assert len(found) == 10
    assert found[8] == "no heartbeat from ranks 108-399 either"
    assert format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"


def test_stack_location_is_the_innermost_function_and_its_caller_outside_libraries() -> None:
    def within(barrier: threading.Barrier) -> None:
        barrier.wait()
        barrier.wait()

    barrier = threading.Barrier(2)
    thread = threading.Thread(target=within, args=(barrier,))
    thread.start()
    barrier.wait()
    time.sleep(0.2)
    found = stack_location(sys._current_frames()[thread.ident or 0])
    barrier.wait()
    thread.join()
    assert found.startswith("wait (")
    assert ", called from within (tests/start/test_watchdog.py:" in found


def test_watchdog_leaves_no_threads_and_no_files(tmp_path: Path, alone: None) -> None:
    before = set(threading.enumerate())  # threads of earlier tests may end during this one
    for _ in range(3):
        with Watchdog(1, tmp_path) as watchdog:
            for step in range(3):
                watchdog.step(step)
            with watchdog.pause():  # longer than the timeout: no alarm
                time.sleep(1.2)
        assert watchdog.heartbeat.finished and not watchdog.heartbeat.paused  # no rank waits for another heartbeat
    assert set(threading.enumerate()) <= before
    assert not list(tmp_path.iterdir())


LIVE, PAUSED = heartbeat(5, paused=False), heartbeat(5)


def store_with(answer: Any) -> Any:
    """Returns a thread that reads these heartbeats and silent ranks of a timeout of 100 s; None: the store does not answer."""

    def read_all(_: object, silence: float) -> Any:
        assert silence == 50
        return answer

    return SimpleNamespace(read_all=read_all, call=lambda operation: operation(None))


@pytest.mark.parametrize(
    ("phase", "others", "silent", "seconds"),  # without progress, from which on there is a hang: with a timeout of 100 s
    [
        ("start", [], [], None), ("train", [], [], 100), ("pause", [], [], PAUSE_TIMEOUT), ("end", [], [], None),
        ("first step", [], [], PAUSE_TIMEOUT), ("train", [LIVE, LIVE], [], 100), ("train", [LIVE, PAUSED], [], PAUSE_TIMEOUT),
        ("start", [LIVE, PAUSED], [], None), ("end", [LIVE, PAUSED], [], None),
        *((phase, [LIVE, PAUSED], [1], 100) for phase in ("start", "train", "pause", "end")),
        ("pause", None, [], 100), ("start", None, [], 100),  # the store does not answer
    ],
)  # fmt: skip
def test_a_hang_is_found_at_the_timeout(
    tmp_path: Path, alone: None, phase: str, others: list[Heartbeat] | None, silent: list[int], seconds: float | None
) -> None:
    def watchdog() -> Watchdog:
        found = Watchdog(100, tmp_path)
        for step in range({"start": 0, "first step": 1}.get(phase, 2)):
            found.step(step)
        found.heartbeat.paused |= phase == "pause"
        if phase == "end":
            found.finish()
        if others != []:
            found._heartbeats = store_with(None if others is None else (dict(enumerate(others)), silent))
        return found

    assert not watchdog()._is_hang(0.99 * (seconds or 1e9))
    assert watchdog()._is_hang(1.01 * (seconds or 1e9)) == (seconds is not None)


def test_a_store_that_stops_to_answer_is_found_after_a_silence(tmp_path: Path, alone: None) -> None:
    for last, expected in ((90, [False] * 4 + [True]), (49, [False, False, True, True, True])):
        watchdog, found = Watchdog(100, tmp_path), []
        for stalled in (49, 90, 110, 139, 141):
            watchdog._heartbeats = store_with(({0: PAUSED, 1: PAUSED}, []) if stalled <= last else None)
            found.append(watchdog._is_hang(stalled))
        assert found == expected


def test_time_counts_from_the_last_progress_and_not_while_the_job_is_suspended(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, found, times = Watchdog(100, tmp_path), list[float](), iter([0.0, 5.0, 10.0, 15.0, 1e6, 1e6 + 5.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))

    def wait(interval: float) -> bool:
        if len(found) in (1, 2):
            (watchdog.finish if len(found) == 1 else partial(watchdog.step, 1))()
        return len(found) == 5

    watchdog._stop_event = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    watchdog._is_hang = lambda stalled: found.append(stalled)  # type: ignore[assignment,func-returns-value,method-assign]
    watchdog._monitor()
    assert found == [5.0, 0.0, 0.0, 11.0, 16.0]  # an interval of 1 s, and 10 s for the store


def test_each_forward_pass_of_a_pause_is_progress(tmp_path: Path, alone: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with Watchdog(3600, tmp_path) as watchdog:
        with watchdog.pause():
            pass
        assert watchdog.heartbeat.paused  # still, until the first step has compiled
        watchdog.step(1)
        watchdog.step(2)
        before = watchdog._progress
        with watchdog.pause(model):
            model(torch.zeros(2))
            model[0](torch.zeros(2))  # as a pipeline calls its stage
        assert watchdog._progress == before + 2 + 1 + 1
        with watchdog.pause():
            model(torch.zeros(2))
        assert watchdog._progress == before + 5


def test_torch_keeps_flight_records(alone: None) -> None:
    assert set(flight_records()) <= {"flight_gloo", "flight_nccl"}
    assert "flight_gloo" in flight_records()


def test_watchdogs_of_one_process_use_separate_keys(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(run_watchdogs, tmp_path, 2) == [[2, 2], [2, 2]]


def run_watchdogs(run_dir: Path, count: int) -> list[int]:
    """Returns the number of ranks that each of several consecutive watchdogs has a heartbeat of when all ranks train."""
    found = []
    for _ in range(count):
        with Watchdog(600, run_dir) as watchdog:
            assert watchdog._heartbeats
            dist.barrier()
            heartbeats, _ = watchdog._heartbeats.call(watchdog._heartbeats.read_all) or ({}, [])
            found.append(sum(bool(heartbeat and heartbeat.time) for heartbeat in heartbeats.values()))
            assert not watchdog._heartbeats.is_alarm_raised
            dist.barrier()
    return found
