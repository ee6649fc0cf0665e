"""Samples this rank's GPU and host in a thread, and summarizes the samples of all ranks.

A record has the median over the ranks of each value, its extremes, and the rank of the extreme that can be a fault. Prometheus has
the values of each rank.
"""

import math
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from titanlike.distributed import environment
from titanlike.metrics.gpu import GPU, throttle_reasons
from titanlike.metrics.host import Host

JOIN_TIMEOUT = 1.0  # seconds that the end of a run waits for a sample
MAX_NAMED = 4  # ranks in a warning
CLEAR_RECORDS = 3  # without throttling, before it is reported again
BITS = "gpu/throttle_bits"


@dataclass(frozen=True)
class Quantity:
    """How the samples since the last record, and then the ranks, are summarized."""

    samples: Literal["mean", "max", "last", "rate", "bits"]
    fault: Literal["min", "max"] = "max"
    """The extreme of which the rank is recorded."""


QUANTITIES = {
    "gpu/utilization": Quantity("mean", "min"),
    "gpu/memory_gib": Quantity("max"),
    "gpu/power_watts": Quantity("mean", "min"),
    "gpu/temperature_celsius": Quantity("max"),
    "gpu/nvlink_sent_bytes_per_second": Quantity("rate", "min"),
    "gpu/nvlink_received_bytes_per_second": Quantity("rate", "min"),
    BITS: Quantity("bits"),
    "host/cpu_utilization": Quantity("mean"),
    "host/memory_utilization": Quantity("max"),
    "host/disk_utilization": Quantity("last"),
    "host/disk_free_gib": Quantity("last", "min"),
    "host/disk_read_bytes_per_second": Quantity("rate"),
    "host/disk_written_bytes_per_second": Quantity("rate"),
    "host/network_sent_bytes_per_second": Quantity("rate"),
    "host/network_received_bytes_per_second": Quantity("rate"),
}


class Source(Protocol):
    """What is sampled."""

    def read(self) -> Mapping[str, float]:
        """Returns some of `QUANTITIES`. Of a rate, the total so far."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str
    gpu: str
    """Number of the GPU in nvidia-smi, or "" without one."""

    def of(self, rank: int) -> str:
        """Returns the name of a rank for messages."""
        return f"rank {rank} (host {self.host}{f', GPU {self.gpu}' if self.gpu else ''})"


def open_gpu(device: torch.device) -> GPU | None:
    """Returns the GPU of this process, or None without one or without NVML."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        return GPU(f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0")
    except OSError:  # `titanlike doctor` reports it
        return None


def open_sources(gpu: GPU | None, folder: Path | None) -> list[Source]:
    """Returns what this rank samples: its GPU and, on the first rank of a node, the host, as far as their packages are
    installed."""
    sources: list[Source] = [] if gpu is None else [gpu]
    if environment.is_first_on_node():
        try:
            sources.append(Host(folder))
        except ImportError:  # `titanlike doctor` reports it
            return sources
    return sources


def place_of(device: torch.device, gpu: GPU | None) -> Place:
    """Returns where this rank runs."""
    index = gpu.index if gpu is not None else (device.index or 0) if device.type == "cuda" else -1
    return Place(socket.gethostname(), "" if index < 0 else str(index))


class Sampler:
    """Samples in a daemon thread, so that training does not wait for a driver.

    Args:
        sources: are read by the thread only.
        interval: seconds between samples.
    """

    def __init__(self, sources: Sequence[Source], interval: float) -> None:
        self._sources, self._interval = list(sources), interval
        self._samples: list[tuple[float, dict[str, float]]] = []  # time and values, since the last `take`
        self._previous: tuple[float, dict[str, float]] | None = None  # the last sample of those before
        self._taken = [math.nan] * len(QUANTITIES)
        self._lock = threading.Lock()  # of `_samples`; not held while a source is read
        self._problem = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine metrics", daemon=True)
        if self._sources:
            self._thread.start()

    def take(self) -> list[float]:
        """Returns the values of `QUANTITIES` since the last call, without waiting for a sample. Without a new one, they are those
        of the last call."""
        with self._lock:
            samples, self._samples = self._samples, []
        if samples:
            self._taken = [
                _summary(name, quantity.samples, samples, self._previous) for name, quantity in QUANTITIES.items()
            ]
            self._previous = samples[-1]
        return self._taken

    def take_problem(self) -> str:
        """Returns what to tell the user, once, or ""."""
        problem, self._problem = self._problem, ""
        return problem

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT)

    def sample(self) -> None:
        """Takes a sample."""
        values: dict[str, float] = {}
        for source in list(self._sources):
            try:
                values |= source.read()
            except Exception as error:  # noqa: BLE001  psutil raises anything on an unusual system, and training goes on
                self._sources.remove(source)
                self._problem = f"{type(source).__name__} is not measured any more, training continues: {error}"
        with self._lock:
            self._samples.append((time.monotonic(), values))

    def _run(self) -> None:
        while not self._ended.is_set():
            self.sample()
            self._ended.wait(self._interval)


def _summary(
    name: str,
    kind: str,
    samples: Sequence[tuple[float, Mapping[str, float]]],
    previous: tuple[float, Mapping[str, float]] | None,
) -> float:
    values = [found for _, sample in samples if math.isfinite(found := sample.get(name, math.nan))]
    if not values:
        return math.nan
    if kind == "mean":
        return statistics.fmean(values)
    if kind == "max":
        return max(values)
    if kind == "bits":
        bits = 0
        for value in values:
            bits |= int(value)
        return float(bits)
    if kind == "last":
        return values[-1]
    start, first = previous or samples[0]
    end, last = samples[-1]
    rate = (last.get(name, math.nan) - first.get(name, math.nan)) / (end - start) if end > start else math.nan
    return rate if rate >= 0 else math.nan  # a counter that was reset, as by a driver


def by_name(row: Sequence[float]) -> dict[str, float]:
    """Returns the values of a rank that are known, by name: whether it is throttled, not the reasons."""
    values = {name: value for name, value in zip(QUANTITIES, row, strict=True) if math.isfinite(value)}
    if (bits := values.pop(BITS, None)) is not None:
        values["gpu/throttled"] = float(bool(throttle_reasons(int(bits))))
    return values


def summarize(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns what to record of the values of all ranks, of which some are NaN."""
    result: dict[str, float] = {}
    for index, (name, quantity) in enumerate(QUANTITIES.items()):
        known = [(row[index], rank) for rank, row in enumerate(rows) if math.isfinite(row[index])]
        if not known:
            continue
        group, _, short = name.partition("/")
        if name == BITS:
            result["gpu/num_throttled"] = sum(bool(throttle_reasons(int(bits))) for bits, _ in known)
            continue
        result[name] = statistics.median(value for value, _ in known)
        if len(known) > 1:
            least, most = min(known), max(known)
            result[f"{group}/min_{short}"], result[f"{group}/max_{short}"] = least[0], most[0]
            result[f"{group}/{quantity.fault}_{short}_rank"] = (least if quantity.fault == "min" else most)[1]
    return result


class ThrottleWarnings:
    """Reports a GPU that is throttled once, and again after some records without throttling."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], int] = {}  # number of the last record with a rank and a reason
        self._num_records = 0

    def update(self, rows: Sequence[Sequence[float]], places: Sequence[Place]) -> list[str]:
        """Returns a warning for each reason that is new for some rank."""
        self._num_records += 1
        index = list(QUANTITIES).index(BITS)
        found = [(rank, int(row[index])) for rank, row in enumerate(rows) if math.isfinite(row[index])]
        new: dict[str, list[int]] = {}
        for rank, bits in found:
            for reason in throttle_reasons(bits):
                if self._num_records - self._last.get((rank, reason), -CLEAR_RECORDS) > CLEAR_RECORDS:
                    new.setdefault(reason, []).append(rank)
                self._last[rank, reason] = self._num_records
        warnings = []
        for reason, ranks in new.items():
            names = ", ".join(places[rank].of(rank) for rank in ranks[:MAX_NAMED])
            others = f" and {len(ranks) - MAX_NAMED} other ranks" if len(ranks) > MAX_NAMED else ""
            warnings.append(f"the GPU of {names}{others} is throttled: {reason}")
        return warnings
