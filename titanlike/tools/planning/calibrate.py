"""Measures the GPU or CPU and the links that are here, and writes them as a hardware file. Imports torch late."""

import errno
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config import UserError
from titanlike.tools.output_files import write_text, writing
from titanlike.tools.planning.hardware import Hardware, hardware_of
from titanlike.utils import system

if TYPE_CHECKING:
    import torch

    from titanlike.tools.planning.measure import Timer

SECONDS = {"cpu": 4.0, "cuda": 4.0}  # limit of a measurement
MATMUL_SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
LENGTHS = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192, 16384)}
COLLECTIVE_BYTES = {"cpu": (2**12, 2**24), "cuda": (2**16, 2**29)}
ETHERNET = 12.5  # GB/s, where no link between nodes is measured: 100 Gb/s

Progress = Callable[[str, int, int], None]  # what is measured, and how many of how many measurements are done


@dataclass
class Description:
    """The lines of a hardware file."""

    lines: list[str] = field(default_factory=list)

    def add(self, key: str, value: float | str, comment: str) -> None:
        """Adds a key, and a comment that says how its value was found."""
        text = (
            json.dumps(value)
            if isinstance(value, (str, bool))
            else f"{value:.4g}"
            if isinstance(value, float)
            else str(value)
        )
        self.lines += [f"# {comment}", f"{key} = {text}"]


def calibrate(
    device: "torch.device",
    path: Path,
    on_progress: Progress = lambda text, done, total: None,
    *,
    seconds: float = 0.0,
    ranks_per_node: int = 0,
) -> None:
    """Measures this device and, with several processes, the links between them, and writes a hardware file.

    All ranks of the process group call it. They measure at the same time, as they train; the first one writes. `seconds` limits
    each measurement; by default it depends on the kind of device. `ranks_per_node` is the launcher's by default. Raises
    `UserError` if the file cannot be written.
    """
    from titanlike.distributed import environment, process_group
    from titanlike.tools.planning.measure import Timer

    if path.suffix != ".toml" or not path.parent.is_dir():
        raise UserError(f"--calibrate {path} is not a TOML file in a directory that exists; give such a path")
    with writing(path, "--calibrate"), tempfile.TemporaryFile(dir=path.parent):  # before what takes minutes
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
    steps = ["matmuls", "attention", "memory", "links"]

    def progress(text: str) -> None:
        on_progress(text, steps.index(text), len(steps))

    local = ranks_per_node or environment.rank_info().local_world_size
    timer = Timer(device, seconds or SECONDS[device.type])
    description = Description()
    base = hardware_of(device)
    _device(description, device, base, local)
    progress("matmuls")
    peak = _matmuls(description, timer, base)
    progress("attention")
    _attention(description, timer, peak)
    progress("memory")
    _memory(description, timer, base)
    progress("links")
    _links(description, timer, base, local)
    on_progress("links", len(steps), len(steps))
    if process_group.is_main():
        write_text(path, "\n".join(description.lines) + "\n", "--calibrate")


def fit_half(rates: Mapping[int, float], power: int) -> tuple[float, float]:
    """Fits `rate = limit * (size / (size + half)) ** power`. Returns the limit and the size `half`."""
    if len(rates) == 1:
        return next(iter(rates.values())), 0.0
    largest = max(rates)
    best = (math.inf, 0.0, 0.0)
    for step in range(97):
        half = largest * (
            2 ** (step / 8 - 10) if step else 0.0
        )  # 0, and from a thousandth to four times the largest size
        limits = [rate / (size / (size + half)) ** power for size, rate in rates.items()]
        limit = math.exp(sum(map(math.log, limits)) / len(limits))
        error = sum(math.log(each / limit) ** 2 for each in limits)
        best = min(best, (error, limit, half))
    return best[1], best[2]


def _name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _device(description: Description, device: "torch.device", base: Hardware | None, processes: int) -> None:
    import torch

    kind = f"one process with {torch.get_num_threads()} thread(s)" if device.type == "cpu" else "one GPU"
    description.lines.append(
        f"# Measured by `titanlike plan --calibrate` with torch {torch.__version__}, on {kind} of {processes} per machine.\n"
        + (
            f"# The data sheet is of {base.name}."
            if base
            else "# The data sheet is unknown; measured figures replace it."
        )
    )
    description.add("name", _name(device), "As the machine reports it.")
    if device.type == "cuda":
        memory, comment = torch.cuda.get_device_properties(device).total_memory, "Of the GPU, as torch reports it."
    else:
        memory, comment = (system.total_memory() or 2**32) // processes, "Of this machine, for each of its processes."
    description.add("memory_gib", memory / 2**30, comment)
    if base and base.gpu_watts:
        description.add("gpu_watts", base.gpu_watts, "Data sheet.")
    for key in ("bfloat16", "node_switch"):
        if base and getattr(base, key) != getattr(Hardware, key):
            description.add(key, getattr(base, key), "Data sheet.")


def _matmuls(description: Description, timer: "Timer", base: Hardware | None) -> tuple["torch.dtype", float]:
    """Returns the faster of bfloat16 and float32, and its peak in FLOP/s."""
    import torch

    from titanlike.tools.planning.measure import matmul_rates

    sizes = MATMUL_SIZES[timer.device.type]
    measured = {dtype: matmul_rates(timer, dtype, sizes) for dtype in (torch.bfloat16, torch.float32)}
    main = max(measured, key=lambda dtype: max(measured[dtype].values()))
    half = fit_half(measured[main], 3)[1]

    def limit(rates: Mapping[int, float]) -> float:
        """Returns the rate of infinitely large matrices, and no less than the best one."""
        limits = [rate * (1 + half / size) ** 3 for size, rate in rates.items()]
        return max(*rates.values(), math.exp(sum(map(math.log, limits)) / len(limits)), 1.0)

    def comment(rates: Mapping[int, float]) -> str:
        return ", ".join(f"{size}: {rate / 1e12:.3g}" for size, rate in rates.items())

    limits = {dtype: limit(rates) for dtype, rates in measured.items()}
    peak = base.bf16_tflops * 1e12 if base else limits[torch.bfloat16]
    fraction = min(1.0, limits[torch.bfloat16] / peak) if base else 1.0
    text = f"TFLOP/s of square matmuls in bfloat16 by size: {comment(measured[torch.bfloat16])}."
    description.add(
        "bf16_tflops", peak / 1e12, f"Data sheet. {text}" if base else f"Extrapolated to large matrices. {text}"
    )
    description.add("gemm_fraction", fraction, "Large matmuls relative to that.")
    description.add("gemm_half_size", half, f"Fitted to the {str(main).removeprefix('torch.')} matmuls, the fastest.")
    # The same fraction applies to float32.
    description.add(
        "float32_tflops",
        limits[torch.float32] / fraction / 1e12,
        f"Large matmuls divided by gemm_fraction. TFLOP/s by size: {comment(measured[torch.float32])}.",
    )
    if timer.is_gpu:
        with_tf32 = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        rates = matmul_rates(timer, torch.float32, sizes)
        torch.set_float32_matmul_precision(with_tf32)
        description.add("tf32_tflops", limit(rates) / fraction / 1e12, f"The same with TF32: {comment(rates)}.")
        if torch.version.cuda and torch.cuda.get_device_capability(timer.device) >= (8, 9):
            rates = matmul_rates(timer, torch.float8_e4m3fn, sizes)
            found = max(rates.values())
            peak8 = base.float8_tflops * 1e12 if base and base.float8_tflops else found
            description.add(
                "float8_tflops", peak8 / 1e12, ("Data sheet. " if base else "") + f"By size: {comment(rates)}."
            )
            description.add("float8_gemm_fraction", min(1.0, found / peak8), "The fastest matmul relative to that.")
    return main, (peak if main == torch.bfloat16 else limits[torch.float32] / fraction)


def _attention(description: Description, timer: "Timer", peak: tuple["torch.dtype", float]) -> None:
    from titanlike.tools.planning.measure import HEAD_DIM, attention_rates

    dtype, flops = peak
    lengths = LENGTHS[timer.device.type]
    kernels = {"attention": "auto", "flash": "flash"} if timer.is_gpu else {"attention": "auto"}
    half: float | None = None
    for name, backend in kernels.items():
        for backward in (False, True):
            try:
                rates = attention_rates(timer, dtype, backend, lengths, backward=backward)
            except RuntimeError as error:
                description.lines.append(f"# {name} is not available: {str(error).splitlines()[0]}")
                continue
            limit, fitted = fit_half(rates, 1)
            if half is None:  # one length for both passes
                half = min(fitted, float(max(rates)))
                description.add("attention_half_length", half, "Fitted to the forward pass of attention.")
            limit = max(rates[max(rates)] * (1 + half / max(rates)), 1.0)
            text = ", ".join(f"{length}: {rate / 1e12:.3g}" for length, rate in rates.items())
            key = f"{name}_{'backward' if backward else 'forward'}"
            fraction = max(1e-6, min(1.0, limit / flops))
            comment = f"TFLOP/s by sequence length, with heads of {HEAD_DIM}: {text}."
            description.add(key, fraction, comment)
            if not timer.is_gpu:
                description.add(key.replace("attention", "flash"), fraction, "The same: a CPU has one kernel.")


def _memory(description: Description, timer: "Timer", base: Hardware | None) -> None:
    from titanlike.tools.planning.measure import copy_rate, host_rate, launch_seconds

    measured = copy_rate(timer) / 1e9
    peak = base.memory_gb_per_second if base else measured
    text = f"A copy reads and writes {measured:.4g} GB/s."
    description.add("memory_gb_per_second", peak, f"Data sheet. {text}" if base else text)
    description.add("memory_fraction", min(1.0, measured / peak), "The copy relative to that.")
    description.add("launch_us", launch_seconds(timer) * 1e6, "An operation on one element in eager mode.")
    description.add("host_gb_per_second", host_rate(timer) / 1e9, "A copy from host memory.")


def _links(description: Description, timer: "Timer", base: Hardware | None, local: int) -> None:
    import torch.distributed as dist

    from titanlike.distributed import process_group
    from titanlike.tools.planning.measure import collective_seconds

    world = process_group.world_size()
    sizes = COLLECTIVE_BYTES[timer.device.type]
    node_bandwidth = base.node_gb_per_second if base else ETHERNET
    description.add("gpus_per_node", local, "Processes of this machine.")
    node_latency = 0.0
    if local > 1:
        group = process_group.subgroup([range(first, first + local) for first in range(0, world, local)])
        measured, node_latency, comment = link_speed(collective_seconds(timer, group, sizes), local)
        node_bandwidth = base.node_gb_per_second if base else measured
        description.add("node_gb_per_second", node_bandwidth, comment)
        description.add("node_fraction", min(1.0, measured / node_bandwidth), f"{measured:.4g} GB/s relative to that.")
        description.add("node_latency_us", node_latency * 1e6, f"Collectives of {sizes[0]} bytes.")
    else:
        description.add("node_gb_per_second", node_bandwidth, "Not measured: one process. Correct it.")
    if world > local:
        assert dist.group.WORLD is not None
        measured, latency, comment = link_speed(collective_seconds(timer, dist.group.WORLD, sizes), world)
        # A ring enters and leaves each node once, over the links of all its GPUs.
        description.add("network_gb_per_second", measured / local, f"{comment} Divided by the GPUs of a node.")
        description.add("network_fraction", 1.0, "Included.")
        if local == 1:
            description.add("single_fraction", 1.0, "Included: one rank per node.")
        else:
            slower = Hardware.single_fraction / Hardware.network_fraction
            description.add("single_fraction", slower, "Not measured: relative to network_fraction as by default.")
        nodes = world // local
        added = max(0.0, latency - node_latency) / max(1, nodes - 1)
        description.add("network_latency_us", added * 1e6, f"Added by each of {nodes - 1} further nodes.")
    else:
        bandwidth = base.network_gb_per_second if base else min(ETHERNET, node_bandwidth)
        description.add("network_gb_per_second", bandwidth, "Not measured: one node. Correct it.")


def link_speed(seconds: Mapping[str, Mapping[int, float]], ranks: int) -> tuple[float, float, str]:
    """Returns the bandwidth in GB/s and the latency in seconds that explain the times of two sizes, and a comment."""
    bandwidths, latencies = {}, []
    for kind, by_size in seconds.items():
        rounds = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        small, large = min(by_size), max(by_size)
        slope = max((by_size[large] - by_size[small]) / (large - small), by_size[large] / large / 10) / rounds
        bandwidths[kind] = (ranks - 1) / ranks / slope / 1e9
        latencies.append(by_size[small] / rounds)
    mean = math.exp(sum(map(math.log, bandwidths.values())) / len(bandwidths))
    text = ", ".join(f"{kind} {bandwidth:.3g}" for kind, bandwidth in bandwidths.items())
    return mean, sorted(latencies)[len(latencies) // 2], f"GB/s of {ranks} ranks: {text}."
