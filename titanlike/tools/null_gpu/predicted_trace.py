"""A predicted step as a trace in the format of torch.profiler."""

import gzip
import json
from pathlib import Path
from typing import Any

from titanlike.tools.null_gpu.kernels import Kernel, class_of
from titanlike.tools.null_gpu.ledger import Ledger
from titanlike.tools.null_gpu.rates import Rates, product_of

# Of times, in a microsecond: a float holds them and their sums exactly. A viewer draws a kernel that ends after the next one
# starts, or that takes no time, as if it contained what follows.
STEPS = 1024


def write(path: Path, ledger: Ledger, rates: Rates) -> None:
    """Writes the kernels of a step, each stream as a thread."""
    spans = ledger.timeline(rates)
    events = []
    names: dict[int, str] = {}
    ends: dict[int, int] = {}  # of the last kernel of a stream
    for kernel, stream, *times in spans:
        start, end = (round(1e6 * STEPS * seconds) for seconds in times)
        start = max(start, ends.get(stream, 0))
        end = ends[stream] = max(end, start + 1)
        kind = class_of(kernel, ledger.parameters)
        names[stream] = f"collectives: {rates.axis(kernel)}" if kind == "collectives" else names.get(stream, "kernels")
        event = _event("kernel", _name(kernel), stream, start, end)
        shapes = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kernel.tensors[:8])
        event["args"] = {"class": kind, "operator": kernel.name, "bytes": kernel.bytes, "tensors": shapes}
        if kernel.kind == "collective":
            event["args"]["Process Group Description"] = rates.axis(kernel)
        events.append(event)
        if kernel.optimizer:
            events.append(_event("gpu_user_annotation", "Optimizer.step", stream, start, end))
    events.append(_event("user_annotation", "step 1", 0, 0, max(ends.values())))
    events += [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}} for tid, name in names.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)


def _event(category: str, name: str, stream: int, start: int, end: int) -> dict[str, Any]:
    times = {"ts": start / STEPS, "dur": (end - start) / STEPS}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, **times}


def _name(kernel: Kernel) -> str:
    if kernel.is_matmul:
        product = product_of(kernel)
        return f"gemm {product.m:.0f} x {product.n:.0f} x {product.k:.0f}"
    return f"nccl {kernel.collective}" if kernel.kind == "collective" else kernel.name
