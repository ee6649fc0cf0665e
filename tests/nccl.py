"""NCCL's order of point-to-point operations, to find deadlocks that do not occur with gloo.

A process group whose communicator was created eagerly uses it for all its operations, on one stream: a rank runs the operations in
the order in which it issues them, and one that has no partner yet blocks all later ones, even in the other direction or with
another rank. Only the operations of one batch proceed together. gloo matches any operations that have been issued.

Operations on several communicators are checked as if they shared one stream. This is stricter than NCCL, which orders them only
where a result is waited for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


@dataclass(frozen=True)
class Transfer:
    """One point-to-point operation of a rank."""

    sends: bool
    peer: int
    group: str = ""

    def __str__(self) -> str:
        return f"{'send to' if self.sends else 'receive from'} {self.peer}"


Batch = tuple[Transfer, ...]  # operations that are launched together


@contextmanager
def recorded() -> Iterator[list[Batch]]:
    """Records the point-to-point operations that this rank issues, in order."""
    batches: list[Batch] = []
    batch: list[Transfer] | None = None  # that is being issued
    batch_isend_irecv = c10d.batch_isend_irecv

    def transfer(function: Any, sends: bool) -> Any:
        def issue(tensor: Any, peer: int | None = None, group: Any = None, tag: int = 0, **peers: Any) -> Any:
            key, group_key = ("dst", "group_dst") if sends else ("src", "group_src")
            global_rank = peers.get(key, peer)
            if global_rank is None:
                global_rank = dist.get_global_rank(group, peers[group_key])
            done = Transfer(sends, global_rank, group.group_name)
            if batch is None:
                batches.append((done,))
            else:
                batch.append(done)
            return function(tensor, global_rank, group, tag)

        return issue

    def issue_batch(operations: list[Any]) -> Any:
        nonlocal batch
        batch = []
        works = batch_isend_irecv(operations)
        batches.append(tuple(batch))
        batch = None
        return works

    changed = {
        "isend": transfer(c10d.isend, sends=True),
        "irecv": transfer(c10d.irecv, sends=False),
        "batch_isend_irecv": issue_batch,
    }
    with mock.patch.multiple(dist, **changed), mock.patch.multiple(c10d, **changed):
        yield batches


def blocked(ranks: Sequence[Sequence[Batch]]) -> dict[int, str]:
    """Runs the batches of all ranks in NCCL's order. Returns the operations that never complete, by rank; empty if all do."""
    waiting = [iter(batches) for batches in ranks]
    current = [list(next(batches, ())) for batches in waiting]  # of each rank, the rest of the batch that runs
    progress = True
    while progress:
        progress = False
        for rank, transfers in enumerate(current):
            for transfer in list(transfers):
                partner = Transfer(not transfer.sends, rank, transfer.group)
                if partner in current[transfer.peer]:
                    transfers.remove(transfer)
                    current[transfer.peer].remove(partner)
                    progress = True
            if not transfers and (following := next(waiting[rank], None)) is not None:
                current[rank] = list(following)
                progress = True
    return {rank: ", ".join(map(str, transfers)) for rank, transfers in enumerate(current) if transfers}
