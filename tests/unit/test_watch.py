"""Who is missing, by what ranks said last; and a watch among threads of one process."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.pool import Pool
from titanlike.distributed.heartbeat import Heartbeat, diagnose_missing_ranks, ranges
from titanlike.distributed.watchdog import PATIENCE, Watchdog, flight_records, group_timeout, place


def sign(step: int, place: str = "all_reduce (x.py:1)", **other: object) -> Heartbeat:
    return Heartbeat(step, "host", 100 + step, time=1000.0, place=place, **other)  # type: ignore[arg-type]


def test_a_silent_rank_is_named_before_all() -> None:
    assert diagnose_missing_ranks({0: sign(57), 1: sign(56)}, [1], now=1031.4) == [
        "rank 1 (pid 156 on host) has not been heard of for 31 s, and then was at step 56: its process is stopped, or its "
        "machine is gone",
        "rank 0 waits in all_reduce (x.py:1)",
    ]


def test_a_rank_that_never_came_is_named() -> None:
    assert diagnose_missing_ranks({0: sign(1), 1: None}, [1], now=1031.4)[0] == (
        "rank 1 has not been heard of: it has not come to the loop, or its machine is gone"
    )


def test_a_rank_that_is_behind_is_named_and_where_it_is() -> None:
    assert diagnose_missing_ranks({0: sign(57), 1: sign(56, "main (own.py:3)"), 2: sign(57)}, [], now=1000.0) == [
        "rank 1 (pid 156 on host) lives, and is at step 56; the others wait in step 57",
        "rank 1 waits in main (own.py:3)",
        "ranks 0, 2 wait in all_reduce (x.py:1)",
    ]


def test_in_the_same_step_the_odd_one_comes_first() -> None:
    signs: dict[int, Heartbeat | None] = {rank: sign(57) for rank in range(64)}
    signs[40] = sign(57, "main (own.py:3)")
    assert diagnose_missing_ranks(signs, [], now=1000.0) == [
        "all 64 ranks live, and are in step 57",
        "rank 40 waits in main (own.py:3)",
        "ranks 0-39, 41-63 wait in all_reduce (x.py:1)",
    ]


def test_one_that_left_is_told() -> None:
    found = diagnose_missing_ranks({0: sign(57), 1: sign(56, left=True)}, [], now=1000.0)
    assert found[0] == "rank 1 left the loop in step 56"


def test_many_are_told_in_few_lines() -> None:
    found = diagnose_missing_ranks(dict.fromkeys(range(512), sign(3)), range(100, 400), now=1000.0)
    assert len(found) == 10
    assert found[8] == "nor have ranks 108-399"
    assert ranges([0, 1, 2, 5]) == "0-2, 5"


def test_a_place_is_the_function_and_who_of_us_called_it() -> None:
    def within(barrier: threading.Barrier) -> None:
        barrier.wait()
        barrier.wait()

    barrier = threading.Barrier(2)
    thread = threading.Thread(target=within, args=(barrier,))
    thread.start()
    barrier.wait()
    time.sleep(0.2)
    found = place(sys._current_frames()[thread.ident or 0])
    barrier.wait()
    thread.join()
    assert found.startswith("wait (")
    assert ", called from within (unit/test_watch.py:" in found


def test_nothing_stays_of_a_watch_that_is_left(tmp_path: Path, alone: None) -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile: those that served another test
    for _ in range(3):
        with Watchdog(1, tmp_path) as watchdog:
            for step in range(3):
                watchdog.step(step)
            with watchdog.pause():  # longer than a second: no alarm
                time.sleep(1.2)
    assert set(threading.enumerate()) <= before
    assert not list(tmp_path.iterdir())


def test_the_process_group_waits_longer_than_the_watch() -> None:
    assert group_timeout(5) > PATIENCE
    assert group_timeout(3600) > 3600


def test_torch_notes_its_collectives(alone: None) -> None:
    assert set(flight_records()) <= {"flight_gloo", "flight_nccl"}
    assert "flight_gloo" in flight_records()


def test_several_runs_of_a_process_tell_each_other_apart(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    assert ranks(2).run(several_runs, tmp_path, 2) == [[2, 2], [2, 2]]


def several_runs(folder: Path, num_runs: int) -> list[int]:
    """How many ranks each run of this process has heard of."""
    found = []
    for _ in range(num_runs):
        with Watchdog(600, folder) as watchdog:
            watchdog.step(1)
            watchdog._roll_call.is_reporter = True  # listen, as one that reports does
            heard = watchdog._roll_call._heard
            watchdog._roll_call.wait_for(lambda h=heard: all(said for said, _ in h.values()) and len(h) == 2, 60)  # type: ignore[misc]
            found.append(sum(bool(said) for said, _ in heard.values()))
            assert not watchdog._roll_call.alarm
    return found
