"""Processor, memory, disk and network of a host. It requires the package `psutil`. Does not import torch."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NETWORK, RDMA, CGROUP = Path("/sys/class/net"), Path("/sys/class/infiniband"), Path("/sys/fs/cgroup")
RDMA_WORD = 4  # bytes: InfiniBand and RoCE count words, EFA bytes


class Host:
    """The host of this process. Raises `ImportError` without psutil."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is on the disk whose free space is measured; None: it is not."""
        import psutil

        self._psutil: Any = psutil
        self._folder = folder
        psutil.cpu_percent()  # the next call returns the utilization since this one

    def read(self) -> dict[str, float]:
        """Returns the current values; of bytes, those since the start of the host. Unknown values are NaN."""
        disk = self._psutil.disk_io_counters()
        sent, received = self._network_bytes()
        used, free = self._disk_space()
        return {
            "host/cpu_utilization": self._psutil.cpu_percent() / 100,
            "host/memory_utilization": self._memory(),
            "host/disk_utilization": used,
            "host/disk_free_gib": free,
            "host/disk_read_bytes_per_second": disk.read_bytes if disk else math.nan,
            "host/disk_written_bytes_per_second": disk.write_bytes if disk else math.nan,
            "host/network_sent_bytes_per_second": sent,
            "host/network_received_bytes_per_second": received,
        }

    def _memory(self) -> float:
        memory = self._psutil.virtual_memory()
        used, total = memory.total - memory.available, memory.total
        limit = _integer(CGROUP / "memory.max")
        if limit is None or limit >= total:
            return used / total
        # The container is ended at its own limit. The cache of files that it has not used recently does not count.
        statistics = (CGROUP / "memory.stat").read_text().split()
        inactive = dict(zip(statistics[::2], statistics[1::2], strict=False)).get("inactive_file", "0")
        return max(0, (_integer(CGROUP / "memory.current") or 0) - int(inactive)) / limit

    def _disk_space(self) -> tuple[float, float]:
        if self._folder is None:
            return math.nan, math.nan
        try:
            usage = self._psutil.disk_usage(str(self._folder))
        except OSError:  # such as a folder that was deleted
            return math.nan, math.nan
        # As df does: what is reserved for the administrator is not free.
        return usage.used / max(usage.used + usage.free, 1), usage.free / 2**30

    def _network_bytes(self) -> tuple[float, float]:
        """Returns the bytes of network interfaces and of RDMA devices, which the interfaces do not count."""
        interfaces = self._psutil.net_io_counters(pernic=True)
        # Bridges and bonds count the bytes of devices again. In a container, no interface is a device.
        devices = [name for name in interfaces if (NETWORK / name / "device").exists()]
        names = devices or [name for name in interfaces if name != "lo"]
        sent, received = (
            sum(getattr(interfaces[name], field) for name in names) for field in ("bytes_sent", "bytes_recv")
        )
        for is_sent, count in _rdma_bytes():
            sent, received = (sent + count, received) if is_sent else (sent, received + count)
        return sent, received


def _rdma_bytes() -> Iterator[tuple[bool, int]]:
    """Yields the bytes of each port and direction, and whether they were sent."""
    counters = (
        ("counters/port_xmit_data", True, RDMA_WORD),
        ("counters/port_rcv_data", False, RDMA_WORD),
        ("hw_counters/tx_bytes", True, 1),
        ("hw_counters/rx_bytes", False, 1),
    )
    for port in sorted(RDMA.glob("*/ports/*")):
        for name, is_sent, unit in counters:
            if (count := _integer(port / name)) is not None:
                yield is_sent, unit * count


def _integer(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # ValueError: the limit "max"
        return None
