"""Checks of the network between nodes: RDMA devices, what they require of the system, and the variables of NCCL and libfabric.

A machine without such devices and variables has no findings.
"""

import difflib
import importlib.util
import mmap
import re
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

from titanlike.config.base import shown
from titanlike.tools.doctor.finding import GIB, Finding, output
from titanlike.utils import system

ROOT = Path("/")
FAST_ETHERNET = 25_000  # Mbit/s, from which frames of 1,500 bytes limit the throughput
JUMBO_MTU = 8_000  # bytes; clouds have 8,896 to 9,001
FI_INFO = ("fi_info", "/opt/amazon/efa/bin/fi_info")  # AWS installs it outside of the PATH
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
# Values with which NCCL is slower than by default. None: any value.
SLOW: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a node communicate through host memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without peer access communicate through the network"),
    "NCCL_NVLS_ENABLE": (("0",), "NVSwitch does not reduce in the switch"),
    "NCCL_DMABUF_ENABLE": (("0",), "RDMA to GPU memory requires the module nvidia_peermem"),
    "NCCL_NET_GDR_LEVEL": (("0", "LOC"), "RDMA goes through host memory"),
    "NCCL_ALGO": (None, "one algorithm for all sizes of messages"),
    "NCCL_PROTO": (None, "one protocol for all sizes of messages"),
    "NCCL_CHECK_POINTERS": (("1",), "each collective checks its pointers"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "thousands of lines of log with many ranks"),
}
SLOW_WITH_RDMA: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "NCCL_IB_DISABLE": (("1",), "nodes communicate over TCP, although this machine has RDMA devices"),
    "NCCL_NET": (("SOCKET",), "nodes communicate over TCP, although this machine has RDMA devices"),
    "FI_PROVIDER": (("TCP", "SOCKETS", "UDP"), "nodes communicate over TCP, although this machine has RDMA devices"),
}
# Read by torch or by container images, not by NCCL.
OTHERS = {
    "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING", "NCCL_HOME", "NCCL_ROOT",
    "NCCL_VERSION",
}  # fmt: skip
MIN_SIMILARITY = 0.85  # of a misspelled name; plugins of clouds have variables of their own


def devices(root: Path = ROOT) -> dict[str, str]:
    """Returns the RDMA devices and their drivers, such as `mlx5_core` or `efa`."""
    found = {}
    for device in _children(root / "sys/class/infiniband"):
        driver = device / "device/driver"
        found[device.name] = driver.resolve().name if driver.exists() else "unknown driver"
    return found


def rdma(root: Path = ROOT) -> Iterator[Finding]:
    """Devices of InfiniBand, RoCE and EFA: whether a port is active, and the rate."""
    drivers = devices(root)
    for device, driver in drivers.items():
        for port in _children(root / "sys/class/infiniband" / device / "ports"):
            state = _read(port / "state").rpartition(":")[2].strip() or "unknown"
            link, rate = _read(port / "link_layer"), _read(port / "rate")
            text = f"{device} port {port.name}: {state}, {rate} ({', '.join(filter(None, (driver, link)))})"
            if state == "ACTIVE":
                yield Finding("ok", "rdma", text)
                continue
            remedy = "connect it, or leave it out of NCCL_IB_HCA if it is not used"
            if state == "INIT":
                remedy = "start the subnet manager, which has not configured the port (sminfo)"
            yield Finding("warning", "rdma", text, remedy)
    if "efa" in drivers.values():
        yield _libfabric()


def _libfabric() -> Finding:
    for program in FI_INFO:
        if "provider: efa" in output(program, "-p", "efa"):
            return Finding("ok", "efa", "libfabric has the provider efa")
    remedy = "install AWS's EFA installer in the image (aws-efa-installer), which has libfabric and the plugin of NCCL"
    return Finding("warning", "efa", "fi_info -p efa finds no provider: NCCL communicates over TCP", remedy)


def locked_memory(root: Path = ROOT) -> Iterable[Finding]:
    """The limit of locked memory: RDMA registers all buffers."""
    if not devices(root):
        return []
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [Finding("ok", "locked memory", "unlimited")]
    text = f"limited to {soft / GIB:,.3f} GiB: registering the buffers of RDMA may fail"
    remedy = "docker run --ulimit memlock=-1, memlock unlimited in /etc/security/limits.conf, or LimitMEMLOCK=infinity of slurmd"
    if hard == resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited"
    return [Finding("warning", "locked memory", text, remedy)]


def frame_size(root: Path = ROOT) -> Iterator[Finding]:
    """The MTU of fast Ethernet interfaces that are up."""
    for interface in _children(root / "sys/class/net"):
        speed, mtu = _integer(interface / "speed"), _integer(interface / "mtu")
        ethernet = _read(interface / "type") == "1"  # ARPHRD_ETHER; InfiniBand has limits of its own
        if not ethernet or _read(interface / "operstate") != "up" or speed < FAST_ETHERNET:
            continue
        text = f"{interface.name}: {mtu:,} bytes at {speed // 1000} Gbit/s"
        if mtu >= JUMBO_MTU:
            yield Finding("ok", "mtu", text)
        else:
            remedy = f"if the switches allow jumbo frames: ip link set {interface.name} mtu 9000, on all nodes"
            yield Finding("warning", "mtu", text, remedy)


def peer_memory(root: Path = ROOT) -> Iterable[Finding]:
    """Whether network adapters read and write GPU memory: with nvidia_peermem, or with DMA-BUF."""
    version = _read(root / "proc/driver/nvidia/version")
    adapters = [driver for driver in devices(root).values() if driver != "efa"]  # the driver of EFA needs neither
    if not version or not adapters:
        return []
    for module in PEER_MODULES:
        if (root / "sys/module" / module).is_dir():
            return [Finding("ok", "peer memory", f"module {module}")]
    kernel = _read(root / "proc/sys/kernel/osrelease")
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    if "Open Kernel Module" in version and numbers and (int(numbers[1]), int(numbers[2])) >= (5, 12):
        return [Finding("ok", "peer memory", f"DMA-BUF: open kernel modules, Linux {kernel}")]
    remedy = "modprobe nvidia_peermem, or install the open kernel modules of the driver on Linux 5.12 or later"
    return [
        Finding("warning", "peer memory", "neither nvidia_peermem nor DMA-BUF: RDMA goes through host memory", remedy)
    ]


def variables(root: Path = ROOT) -> Iterator[Finding]:
    """Variables of NCCL and libfabric that are set: misspelled ones, and those that slow NCCL down."""
    values = system.communication_variables()
    if not values:
        return
    yield Finding("ok", "variables", shown(" ".join(f"{name}={value}" for name, value in values.items())))
    for prefix, known in (("NCCL_", known_to_nccl), ("FI_", known_to_libfabric)):
        names = {name for name in values if name.startswith(prefix)} - OTHERS
        yield from _misspelled(names, known() if names else set())
    slow = SLOW | (SLOW_WITH_RDMA if devices(root) else {})
    for name, (settings, effect) in slow.items():
        if name in values and (settings is None or values[name].upper() in settings):
            yield Finding("warning", "variables", shown(f"{name}={values[name]}: {effect}"), f"unset {name}")
    yield from _interface(root, values.get("NCCL_SOCKET_IFNAME", ""))


def _misspelled(names: set[str], known: set[str]) -> Iterator[Finding]:
    for name in sorted(names - known) if known else ():
        nearest = difflib.get_close_matches(name, known, 1, MIN_SIMILARITY)
        if nearest:
            yield Finding("warning", "variables", f"{shown(name)} is not known here", f"did you mean {nearest[0]}?")


def _interface(root: Path, selection: str) -> Iterator[Finding]:
    """Whether NCCL_SOCKET_IFNAME, a list of prefixes or of =exact names that ^ excludes, leaves an interface."""
    names = [interface.name for interface in _children(root / "sys/class/net")]
    if not selection or not names:
        return
    exclude, exact = selection.startswith("^"), selection.lstrip("^").startswith("=")
    parts = selection.lstrip("^").removeprefix("=").split(",")
    found = [name for name in names if any(name == part if exact else name.startswith(part) for part in parts)]
    if not (set(names) - set(found) if exclude else found):
        text = shown(f"NCCL_SOCKET_IFNAME={selection} selects none of {', '.join(names)}")
        yield Finding("warning", "variables", text, "unset NCCL_SOCKET_IFNAME, or name one of them")


def known_to_nccl(library: Path | None = None) -> set[str]:
    """Returns the names in the library of the installed NCCL, or none if it is not found."""
    if library is None:
        try:
            spec = importlib.util.find_spec("nvidia.nccl")
        except ModuleNotFoundError:
            return set()
        library = Path(next(iter(spec.submodule_search_locations or ()), "") if spec else "", "lib/libnccl.so.2")
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return {match[0].decode() for match in re.finditer(rb"(?<![A-Z0-9_])NCCL_[A-Z0-9_]+(?=\0)", content)}
    except (OSError, ValueError):  # ValueError: an empty file
        return set()


def known_to_libfabric() -> set[str]:
    """Returns the variables that `fi_info --env` lists, or none if it is not installed."""
    return {name for program in FI_INFO for name in re.findall(r"\bFI_[A-Z0-9_]+", output(program, "--env"))}


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(file: Path) -> str:
    """Returns the text of a file of the kernel, or "" if it has none: reading the speed of some interfaces fails."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _integer(file: Path) -> int:
    text = _read(file)
    return int(text) if re.fullmatch(r"-?\d+", text) else -1
