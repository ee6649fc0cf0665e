"""How spare processes of an elastic job, which are not in its process group, learn that it is complete."""

import datetime
import signal
import sys
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import Store

from titanlike.distributed import environment

END, SEEN = "end", "end/seen"  # keys of the store: the job is complete, and the number of spare processes that know it
LIMIT = 60  # seconds; a spare process may still import torch


def announce_end(store: Store) -> None:
    """Ends the spare processes, and waits for them: the store ends with this process, and a spare one that had not read the end
    would take it for a failure. Call it on rank 0."""
    store.set(END, "")
    end = time.monotonic() + LIMIT
    while store.add(SEEN, 0) < environment.num_spares() and time.monotonic() < end:
        time.sleep(0.1)


def wait_for_end() -> None:
    """Waits until rank 0 of the job ends its session. For a process outside of the process group, which exits as if stopped by a
    signal if the session fails."""
    lost = (dist.DistNetworkError, dist.DistStoreError)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=2)))
        store.wait([END], datetime.timedelta(days=365))
    except lost:
        sys.exit(128 + signal.SIGTERM)
    with suppress(*lost):  # rank 0 may end before it answers
        store.add(SEEN, 1)
