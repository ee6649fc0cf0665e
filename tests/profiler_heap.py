"""Shows with torch alone that its profiler corrupts the heap if it stops while gloo still runs a collective.

    python -m tests.profiler_heap pending    # crashes, in three of five minutes: SIGSEGV, SIGABRT of malloc, or std::bad_alloc
    python -m tests.profiler_heap waited     # the same collectives, waited for before the profiler stops: no crash

A thread of gloo records when a collective begins and ends, in memory that the profiler frees when it stops. What it writes then
overwrites a block of somebody else, and the process dies later, in another place.
"""

import argparse
import faulthandler
import socket
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile


def run(rank: int, port: int, waits: bool, seconds: float) -> None:
    """Profiles a few collectives again and again, on one of two ranks."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    end, rounds, go_on = time.monotonic() + seconds, 0, torch.ones(1)
    while go_on.item() > 0:
        with profile(activities=[ProfilerActivity.CPU]):
            works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(20)]
            if waits:
                for work in works:
                    work.wait()
        for _ in range(20):
            dist.all_reduce(torch.ones(8))
        go_on.fill_(time.monotonic() < end)
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
        rounds += 1
    if rank == 0:
        print(f"no crash in {rounds} profiles", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the two ranks. Exits with code 1 if one of them dies."""
    parser = argparse.ArgumentParser(description="Profiles collectives of gloo, with torch alone.")
    parser.add_argument("mode", choices=("pending", "waited"))
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = mp.spawn(run, (port, options.mode == "waited", options.seconds), nprocs=2, join=False)
    end = time.monotonic() + options.seconds + 60
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > end:  # a process with a corrupted heap can also wait for a lock of malloc
                for process in ranks.processes:
                    process.kill()
                sys.exit("the processes hang")
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        sys.exit(f"{error}".strip().rpartition("\n")[2])


if __name__ == "__main__":
    main()
