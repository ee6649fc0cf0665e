"""Training health: statistics of each parameter, and ranks that are slow. A run imports it if it measures one of the two."""

import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.distributed import collectives, process_group
from titanlike.metrics.hardware import peak_memory_gib
from titanlike.utils.dtensor import local_tensor, shard_groups
from titanlike.utils.modules import copies_of

SLOW_RATIO = 1.3  # of the median
SLOW_RECORDS = 3  # in a row


@contextmanager
def parameter_statistics(model: nn.Module) -> Iterator[dict[str, float]]:
    """Measures an optimizer update in its block: the norm of each full gradient at the start, of each full weight, and the norm of
    its update divided by it. Equal on all ranks, for all stages of a pipeline. Collective; copies this rank's weights meanwhile."""
    result: dict[str, float] = {}
    parameters = {n: p for n, p in model.named_parameters() if p.grad is not None and n not in copies_of(model)}
    with torch.no_grad():
        gradients = [local_tensor(p.grad) for p in parameters.values() if p.grad is not None]
        before = [local_tensor(p).detach().clone() for p in parameters.values()]
        squares = [_squares(gradients), _squares(before)]
    yield result
    with torch.no_grad():
        after = [local_tensor(p).detach() for p in parameters.values()]
        updates = (new.float() - old.float() for new, old in zip(after, before, strict=True))
        squares.append(_squares(updates))
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for index, parameter in enumerate(parameters.values()):
            by_groups.setdefault(shard_groups(parameter), []).append(index)
        sums = torch.stack(squares)  # (3, number of parameters)
        for groups, indices in by_groups.items():
            sums[:, indices] = collectives.all_reduce_sum(sums[:, indices].contiguous(), groups)
        norms = sums.sqrt().tolist()
        found = {name: values for name, *values in zip(parameters, *norms, strict=True)}
    for part in process_group.all_gather_object(found) if dist.is_initialized() else [found]:
        for name, (gradient, weight, update) in part.items():
            result[f"layers/grad_norm/{name}"] = gradient
            result[f"layers/weight_norm/{name}"] = weight
            result[f"layers/update_ratio/{name}"] = update / weight if weight else 0.0


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.stack(norms).square() if norms else torch.zeros(0)


class RankStatistics:
    """Compares the ranks: memory, data wait, and the time of a matmul that is the same on all of them.

    Ranks wait for each other in every step, so that the time of a step does not tell which of them is slow. All ranks create it
    together.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        name = f"rank {process_group.rank()} (host {socket.gethostname()}, {device})"
        self.names = process_group.all_gather_object(name)  # for messages
        size = 2048 if device.type == "cuda" else 192
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._matrix = torch.full((size, size), 0.5, device=device, dtype=dtype)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._has_timed = False
        self._seconds = 0.0
        self._slow, self._num_slow = -1, 0  # rank, and number of records in a row

    def gather(self, data_wait: float) -> Tensor:
        """Times the matmul and returns (ranks, 3) values: peak memory in GiB, data wait in seconds and seconds of the matmul. On a
        GPU it is the matmul of the previous call, so that the host does not wait."""
        if self._events:
            if self._has_timed and self._events[1].query():
                self._seconds = self._events[0].elapsed_time(self._events[1]) / 1000
            self._events[0].record()
            torch.mm(self._matrix, self._matrix)
            self._events[1].record()
            self._has_timed = True
        else:
            self._seconds = min(self._time_on_host() for _ in range(3))  # the least disturbed
        own = torch.tensor([peak_memory_gib(self.device), data_wait, self._seconds], device=self.device)
        found = [torch.empty_like(own) for _ in range(process_group.world_size())]
        dist.all_gather(found, own)
        return torch.stack(found)

    def summarize(self, values: Sequence[float]) -> tuple[dict[str, float], str]:
        """Returns what to record of the values of `gather`, rank by rank, and a warning if a rank has become slow."""
        memory, waits, seconds = values[::3], values[1::3], values[2::3]
        median = statistics.median_low(seconds)
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        ratio = seconds[slowest] / median if median else 1.0
        result: dict[str, float] = {
            "max_memory_gib": max(memory),
            "max_data_wait_seconds": max(waits),
            "slowest_rank": slowest,
            "slowest_rank_ratio": ratio,
        }
        is_same = slowest == self._slow
        self._slow = slowest
        self._num_slow = 0 if ratio <= SLOW_RATIO else self._num_slow + 1 if is_same else 1
        if self._num_slow != SLOW_RECORDS:
            return result, ""
        return (
            result,
            f"{self.names[slowest]} is slow: it takes {ratio:.1f} times as long as the median rank for the same matmul",
        )

    def _time_on_host(self) -> float:
        start = time.perf_counter()
        torch.mm(self._matrix, self._matrix)
        return time.perf_counter() - start
