"""Runs a command on null GPUs and returns the record of its processes. Called by the command, by tests and by the tables."""

import json
import os
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from titanlike.tools.null_gpu import collectives, library

KINDS = ("matmul", "attention", "generated", "other")
LEDGER = {"NULL_GPU_LEDGER": "1", "TORCHINDUCTOR_BENCHMARK_KERNEL": "1"}  # inductor counts bytes for its benchmarks
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def environment(
    device: str, devices: int, folder: Path, memory: float | None = None, ranks: int = 0, *, ledger: bool = False
) -> dict[str, str]:
    """Returns the variables with which a process and its children run on null GPUs. Messages and records go to this folder.

    Args:
        ledger: also records the kernels of a step. The compiler's caches are then in the folder.
    """
    d = library.devices()[device]
    total = int(memory * 2**30) if memory else d["memory"]
    figures = (
        d["name"], *d["capability"], d["multiprocessors"], total, d["shared_memory_per_block"],
        d["shared_memory_per_multiprocessor"], d["l2_cache"], d["clock_khz"], d["memory_clock_khz"], d["memory_bus_bits"],
        d["context"], devices,
    )  # fmt: skip
    built = library.build()
    paths = [str(Path(__file__).parent / "process"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_PRELOAD": str(built / "libcuda.so.1"),
        "LD_LIBRARY_PATH": os.pathsep.join([str(built), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "TRITON_LIBCUDA_PATH": str(built),
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(devices)),
        "NULL_GPU_DEVICE": ";".join(str(figure) for figure in figures),
        "NULL_GPU_FOLDER": str(folder),
        **({"NULL_GPU_RANKS": str(ranks)} if ranks else {}),
        **(LEDGER | {name: str(folder / part) for name, part in CACHES.items()} if ledger else {}),
    }


def run(
    command: list[str],
    device: str = "h100",
    devices: int = 8,
    memory: float | None = None,
    ranks: int = 0,
    *,
    folder: Path | None = None,
    ledger: bool = False,
    **options: Any,
) -> tuple[int, dict[str, Any]]:
    """Runs a command on null GPUs. Returns its exit code and the record of its processes, in order of their ranks.

    Args:
        device: one of `devices.toml`.
        memory: of a device in GiB, instead of its own.
        ranks: runs the command as rank 0 of this number of ranks, of which the others are absent.
        folder: keeps messages and records; by default, a temporary one has them.
        ledger: also records the kernels of a step, in this folder.
        options: of `subprocess.run`.
    """
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as name:
        folder = folder or Path(name)
        variables = os.environ | environment(device, devices, folder, memory, ranks, ledger=ledger)
        code = subprocess.run(command, env=variables, check=False, **options).returncode
        found = read(folder)
    if ranks:
        found["mismatch"] = None  # the other ranks call nothing
    return code, {"device": device, "command": command, **found}


def read(folder: Path) -> dict[str, Any]:
    """Reads what processes on null GPUs left in this folder."""
    processes = [json.loads(path.read_text()) for path in folder.glob("process-*.json")]
    processes.sort(key=lambda process: (process["rank"], process["process"]))
    logs = collectives.read_logs(folder)
    return {"processes": [_summarize(process) for process in processes], "mismatch": collectives.mismatch(logs)}


def _summarize(process: dict[str, Any]) -> dict[str, Any]:
    steps = process["steps"]
    differences = [_difference(before, after) for before, after in pairwise(steps)]
    kernels = process["end"]["kernels"]
    return {
        "rank": process["rank"],
        "process": process["process"],
        "command": process["command"],
        "allocated_peak": process["allocated_peak"],
        "reserved_peak": process["reserved_peak"],
        "allocator_retries": process["allocator_retries"],
        "reserved_by_stream": process["reserved_by_stream"],
        "graphs": process.get("graphs", 0),
        "operators": process.get("operators", 0),
        "graph_breaks": process.get("graph_breaks", {}),
        "steps": differences,
        "growth": _growth([step["allocated"] for step in steps]),
        "total": _difference(
            {"kernels": [], "copies": [], "communicators": [], "synchronizations": 0, "locations": {}}, process["end"]
        ),
        "compiled_kernels": [
            {"name": name, "registers": registers, "spill_bytes": spills, "shared_bytes": shared}
            for name, _, _, registers, spills, shared in (kernel for kernel in kernels if len(kernel) == 6)
        ],
    }


def _growth(allocated: list[int]) -> int:
    """Returns the bytes by which every step after the first two leaves more memory allocated than the one before: a leak."""
    return max(0, min((after - before for before, after in pairwise(allocated[1:])), default=0))


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns what happened between two readings of the counters."""
    launches: dict[tuple[str, str], int] = {}
    for sign, reading in ((-1, before), (1, after)):
        for name, kind, count, *_ in reading["kernels"]:
            launches[kind, name] = launches.get((kind, name), 0) + sign * count
    copies = {name: (0, 0, 0) for name, *_ in after["copies"]} | {name: tuple(rest) for name, *rest in before["copies"]}
    groups = {identity: operations for identity, _, _, _, operations in before["communicators"]}
    found: dict[str, Any] = {
        "launches": {kind: sum(n for (k, _), n in launches.items() if k == kind) for kind in KINDS},
        "kernels": {name: n for (_, name), n in sorted(launches.items(), key=lambda item: -item[1]) if n},
        "copies": {
            name: {
                "count": count - copies[name][0],
                "bytes": size - copies[name][1],
                "pageable": pageable - copies[name][2],
            }
            for name, count, size, pageable in after["copies"]
        },
        "synchronizations": after["synchronizations"] - before["synchronizations"],
        "locations": {
            place: n - before["locations"].get(place, 0)
            for place, n in after["locations"].items()
            if n > before["locations"].get(place, 0)
        },
        "collectives": [
            {"communicator": identity, "name": name, "size": size, "calls": changed}
            for identity, name, size, _, operations in after["communicators"]
            if (changed := _calls(groups.get(identity, {}), operations))
        ],
    }
    if "start" in before:
        found["host_seconds"], found["host_cpu_seconds"] = (
            end - start for start, end in zip(before["start"], after["end"], strict=True)
        )
    return found


def _calls(before: dict[str, list[int]], after: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    changed = {}
    for operation, (count, size) in after.items():
        old_count, old_size = before.get(operation, (0, 0))
        if count > old_count:
            changed[operation] = {"count": count - old_count, "bytes": size - old_size}
    return changed


def as_json(found: dict[str, Any]) -> str:
    """Returns the record as the text of a JSON file."""
    return json.dumps(found, indent=1) + "\n"


def summary(found: dict[str, Any]) -> str:
    """Returns a line for each process: its last step and its peaks."""
    lines = []
    for process in found["processes"]:
        step = process["steps"][-1] if process["steps"] else process["total"]
        launches = ", ".join(f"{n} {kind}" for kind, n in step["launches"].items())
        calls = sum(call["count"] for group in step["collectives"] for call in group["calls"].values())
        host = f", {1e3 * step['host_seconds']:.0f} ms of the host" if "host_seconds" in step else ""
        lines.append(
            f"null GPU, rank {process['rank']}, {'a step' if process['steps'] else 'in total'}: "
            f"{sum(step['launches'].values())} launches ({launches}), {step['synchronizations']} synchronizations, {calls} "
            f"collectives{host}; peak {process['allocated_peak'] / 2**30:.2f} GiB allocated, "
            f"{process['reserved_peak'] / 2**30:.2f} GiB reserved; {process['graphs']} graphs, "
            f"{sum(process['graph_breaks'].values())} graph breaks"
        )
        lines += [f"  {count} x {place}" for place, count in step["locations"].items()]
        if process["growth"]:
            lines.append(f"  every step leaves {process['growth']:,} more bytes allocated")
    return "\n".join(lines) or "null GPU: no process launched a kernel"
