"""Measurements of a GPU or CPU and of the links between ranks. Each has a time limit, and returns medians of repetitions.

Repetitions of different sizes alternate, so that a change of clock rates affects all of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlike.models.common.layers import attention_backend
from titanlike.tools.planning.torch_internals import float8_matmul
from titanlike.utils.compat import all_gather, reduce_scatter, wait_tensor

REPETITIONS = 5
HEAD_DIM = 128  # the one for which `Hardware` states the speed of attention

Call = Callable[[], object]


@dataclass(frozen=True)
class Timer:
    """Times calls on a device."""

    device: torch.device
    limit: float  # seconds that a measurement may take

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def once(self, call: Call, times: int = 1) -> float:
        """Returns the seconds of a call, the mean of a number of them in a row."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / times

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def medians(self, make: Callable[[int], Call], sizes: Sequence[int], growth: float) -> dict[int, float]:
        """Returns the seconds of the call that `make` returns for each size, in ascending order, as far as the limit allows.

        `growth` is how much longer a call takes with the next size. The first size is always measured.
        """
        start = time.perf_counter()
        calls: dict[int, tuple[Call, int]] = {}
        expected = 0.0
        for size in sizes:
            # All sizes together take a few times as long as the largest.
            if calls and expected * 2 * (REPETITIONS + 2) > self.limit - (time.perf_counter() - start):
                break
            call = make(size)
            self.once(call)  # allocates memory and chooses kernels
            took = self.once(call)
            # Several calls in a row, so that the time of one launch does not count, and the clock rate is of sustained work.
            calls[size] = call, max(1, min(1000, int(self.limit / 10 / REPETITIONS / len(sizes) / took)))
            expected = took * growth
        found: dict[int, list[float]] = {size: [] for size in calls}
        for _ in range(REPETITIONS):
            for size, (call, times) in calls.items():
                found[size].append(self.once(call, times))
            if time.perf_counter() - start > self.limit:
                break
        return {size: median(seconds) for size, seconds in found.items()}


def matmul_rates(timer: Timer, dtype: torch.dtype, sizes: Sequence[int]) -> dict[int, float]:
    """Returns the FLOP/s of products of square matrices, by size."""

    def make(size: int) -> Call:
        if dtype == torch.float8_e4m3fn:
            left, right = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
            one = torch.ones((), device=timer.device)
            return partial(float8_matmul, left, right.t(), one)
        left, right = (torch.randn(size, size, device=timer.device, dtype=dtype) for _ in range(2))
        return lambda: left @ right

    return {size: 2 * size**3 / took for size, took in timer.medians(make, sizes, growth=8.0).items()}


def attention_rates(
    timer: Timer, dtype: torch.dtype, backend: str, lengths: Sequence[int], *, backward: bool
) -> dict[int, float]:
    """Returns the FLOP/s of one pass of causal attention, of which half is computed, by sequence length."""

    def make(length: int) -> Call:
        heads = 16 if timer.is_gpu else 2
        q, k, v = (
            torch.randn(1, heads, length, HEAD_DIM, device=timer.device, dtype=dtype, requires_grad=backward)
            for _ in range(3)
        )

        def forward() -> Tensor:
            with attention_backend(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        if not backward:
            return forward
        out = forward()
        return lambda: torch.autograd.grad(out, (q, k, v), out, retain_graph=True)

    heads = 16 if timer.is_gpu else 2
    flops = 2 * heads * HEAD_DIM * (2.5 if backward else 1.0)
    found = timer.medians(make, lengths, growth=4.0)
    return {length: flops * length**2 / took for length, took in found.items()}


def copy_rate(timer: Timer) -> float:
    """Returns the bytes per second that a copy reads and writes, of a tensor that is much larger than any cache."""
    size = 2**31 if timer.is_gpu else 2**27

    def make(size: int) -> Call:
        source = torch.ones(size // 4, device=timer.device)
        return partial(torch.empty_like(source).copy_, source)

    return 2 * size / timer.medians(make, [size], 1.0)[size]


def host_rate(timer: Timer) -> float:
    """Returns the bytes per second from the host to the device; on a CPU, of a copy."""
    size = 2**28 if timer.is_gpu else 2**25

    def make(size: int) -> Call:
        source = torch.ones(size // 4, pin_memory=timer.is_gpu)
        return partial(torch.empty(size // 4, device=timer.device).copy_, source, non_blocking=True)

    return size / timer.medians(make, [size], 1.0)[size]


def launch_seconds(timer: Timer) -> float:
    """Returns the host's time for an operation in eager mode, measured with one that computes almost nothing."""
    tensor = torch.ones(1, device=timer.device)
    return timer.medians(lambda _: lambda: tensor.add_(1.0), [1], 1.0)[1]


def collective_seconds(timer: Timer, group: dist.ProcessGroup, sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Returns the seconds of collectives of a group by kind and by size: the bytes of the larger of input and output.

    All ranks of the group call it. They agree on the number of repetitions.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        full = torch.zeros(size // 4 // group.size() * group.size(), device=timer.device)
        part = full.chunk(group.size())[group.rank()].clone()
        calls: dict[str, Call] = {
            "all-gather": partial(_gather, part, group),
            "reduce-scatter": partial(_scatter, full, group),
            "all-reduce": partial(dist.all_reduce, full, group=group),
        }
        for call in calls.values():
            timer.once(call)  # connects the ranks
        took = torch.tensor(max(timer.once(call) for call in calls.values()), device=timer.device)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
        times = max(1, min(100, int(timer.limit / len(sizes) / len(calls) / REPETITIONS / took.item())))
        for _ in range(REPETITIONS):
            for kind, call in calls.items():
                found.setdefault(kind, {}).setdefault(size, []).append(timer.once(call, times))
    return {kind: {size: median(seconds) for size, seconds in by.items()} for kind, by in found.items()}


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return wait_tensor(all_gather(tensor, 0, group))


def _scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return wait_tensor(reduce_scatter(tensor, "sum", 0, group))
