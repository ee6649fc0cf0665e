"""Where the time of traced steps went: reads a trace of torch.profiler.

Every moment of a step counts once: as computation if the device computes; otherwise as exposed communication if it communicates;
otherwise as waiting for data if the host does, or as a host gap.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.layout import LAYOUT_KEYS
from titanlike.metrics.monitor import DATA_WAIT
from titanlike.metrics.profiler import DIRECTORY

AXES = (*LAYOUT_KEYS, "expert_shard")  # descriptions of process groups

COMPUTATION = ("attention", "matmul", "elementwise")  # the first one counts where kernels overlap
HOST = "host gaps"

# Operators of PyTorch on a CPU, without "aten::". All others that do not only call operators or create views are elementwise.
MATMULS = {
    "grouped_matmul",
    "grouped_matmul_weight_gradient",
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "mkldnn_linear",
    "_int_mm",
    "dot",
    "mv",
}
ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|flex_attention|attention", re.IGNORECASE)
NO_COMPUTATION = {
    "linear", "matmul", "einsum", "reshape", "view", "_unsafe_view", "_reshape_alias", "view_as", "view_as_real", "view_as_complex",
    "transpose", "t", "permute", "expand", "expand_as", "as_strided", "slice", "narrow", "select", "squeeze", "unsqueeze",
    "split", "split_with_sizes", "chunk", "unbind", "unflatten", "flatten", "alias", "detach", "detach_", "empty", "empty_like",
    "empty_strided", "new_empty", "resize_", "set_", "lift_fresh", "contiguous", "to", "type_as", "is_nonzero", "numpy_T",
}  # fmt: skip

# Kernels of a GPU, by parts of their names.
MATMUL_KERNEL = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|scaled_mm|triton_tem_", re.IGNORECASE)


@dataclass(frozen=True)
class Profile:
    """Mean of the traced steps of a rank, in seconds."""

    rank: int
    num_steps: int
    seconds: float
    parts: dict[str, float]  # add up to `seconds`: names of COMPUTATION, optimizer, "exposed <axis>", data, host gaps
    hidden: dict[str, float]  # communication behind computation, by axis
    longest: list[tuple[str, int, float]]  # kernels or operators: name, calls and seconds in all traced steps


def traces(run: Path) -> dict[tuple[int, int], Path]:
    """Returns the traces of a run by step and rank."""
    found = {}
    for path in (run / DIRECTORY).glob("step-*-rank-*.json.gz"):
        _, step, _, rank = path.name.removesuffix(".json.gz").split("-")
        found[int(step), int(rank)] = path
    return dict(sorted(found.items()))


def read_profile(path: Path, axis: str = "") -> Profile:
    """Reads a trace.

    Args:
        path: The file.
        axis: The mesh dimension of collectives of which the trace does not name one, if there is only one dimension above 1.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; profile again") from None
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        event for event in events if _category(event) == "user_annotation" and re.fullmatch(r"step \d+", event["name"])
    ]
    if not steps:
        raise UserError(f"{path} contains no complete step; profile again")
    start, end = min(map(_start, steps)), max(map(_end, steps))
    on_gpu = any(_category(event) == "kernel" for event in events)
    kept = list(_intervals(events, on_gpu, steps[0]["tid"], axis))
    parts, hidden = _attribute(kept, start, end)
    calls, durations = Counter[str](), Counter[str]()
    for event in events:
        if _computes(event, on_gpu):
            calls[event["name"]] += 1
            durations[event["name"]] += event["dur"]
    scale = 1e-6 / len(steps)
    return Profile(
        rank=int(path.name.removesuffix(".json.gz").rpartition("-")[2]),
        num_steps=len(steps),
        seconds=(end - start) * scale,
        parts={name: value * scale for name, value in parts.items()},
        hidden={name: value * scale for name, value in hidden.items()},
        longest=[(name, calls[name], duration * 1e-6) for name, duration in durations.most_common(20)],
    )


def _category(event: dict[str, Any]) -> str:
    return str(event.get("cat", ""))


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _computes(event: dict[str, Any], on_gpu: bool) -> bool:
    if on_gpu:
        return _category(event) in ("kernel", "gpu_memcpy", "gpu_memset")
    return _category(event) == "cpu_op" and bool(_operator_kind(event["name"]))


def _intervals(
    events: Iterable[dict[str, Any]], on_gpu: bool, host_thread: int, axis: str
) -> Iterator[tuple[float, float, str]]:
    """Yields start, end and kind of what the device and the host do. Collectives have the kind "exposed <axis>"."""
    optimizer = "gpu_user_annotation" if on_gpu else "user_annotation"
    for event in events:
        category, name, kind = _category(event), event["name"], ""
        if category == optimizer and name.startswith("Optimizer.step"):
            kind = "optimizer"
        elif category == "user_annotation" and name == DATA_WAIT:
            kind = "data"
        elif on_gpu and category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = _kernel_kind(event, axis)
        elif category == "user_annotation" and name.startswith("gloo:"):
            kind = f"exposed {axis or 'communication'}"
        elif not on_gpu and category == "cpu_op" and event["tid"] == host_thread:
            kind = _operator_kind(name)
        if kind:
            yield _start(event), _end(event), kind


def _kernel_kind(event: dict[str, Any], axis: str) -> str:
    name = event["name"]
    if "nccl" in name.lower():
        group = str(event.get("args", {}).get("Process Group Description", ""))
        return f"exposed {axis or (group if group in AXES else 'communication')}"
    if ATTENTION.search(name):
        return "attention"
    return "matmul" if MATMUL_KERNEL.search(name) else "elementwise"


def _operator_kind(name: str) -> str:
    """Returns the kind of an operator on a CPU, or "" if it computes nothing itself."""
    if name.startswith("## Call CompiledFxGraph"):
        return "elementwise"  # fused; matmuls and attention within it are operators of their own
    namespace, _, operator = name.partition("::")
    if namespace not in ("aten", "fsdp", "torchao", "titanlike") or operator in NO_COMPUTATION:
        return ""
    if ATTENTION.search(operator):
        return "attention"
    return "matmul" if operator in MATMULS else "elementwise"


def _attribute(
    intervals: Iterable[tuple[float, float, str]], start: float, end: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the time of each part between `start` and `end`, and the communication behind computation by axis."""
    changes: list[tuple[float, int, str]] = []
    for first, last, kind in intervals:
        if first < end and last > start:
            changes += [(max(first, start), 1, kind), (min(last, end), -1, kind)]
    changes.append((end, 0, HOST))
    parts, hidden = defaultdict[str, float](float), defaultdict[str, float](float)
    active, now = Counter[str](), start
    for moment, change, kind in sorted(changes):
        if moment > now:
            running = {name for name, count in active.items() if count > 0}
            communication = sorted(name for name in running if name.startswith("exposed "))
            computation = next((name for name in COMPUTATION if name in running), "")
            if computation:
                parts["optimizer" if "optimizer" in running else computation] += moment - now
                for name in communication:
                    hidden[name.removeprefix("exposed ")] += moment - now
            else:
                parts[communication[0] if communication else "data" if "data" in running else HOST] += moment - now
            now = moment
        active[kind] += change
    return dict(parts), dict(hidden)
