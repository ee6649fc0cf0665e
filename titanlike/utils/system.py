"""Resources of this machine and settings of this process: cores, GPUs, memory, caches, the death of the parent process.

Together with `titanlike.distributed.environment` the only reader of environment variables. Does not import torch.
"""

import ctypes
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process without a stack trace, for use before there is anything to clean up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignores_hangup() -> bool:
    """Whether this process was started to outlive its terminal, as by nohup."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def signal_at_parent_death(parent: int, number: signal.Signals) -> None:
    """Sends a signal to this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
        if os.getppid() != parent:  # it has died already
            os.kill(os.getpid(), number)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of NVIDIA GPUs that this process may use, without importing torch."""
    return len(visible_gpus(environ))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, each as an entry of CUDA_VISIBLE_DEVICES."""
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        return [entry.strip() for entry in devices.split(",") if entry.strip() not in ("", "-1")]
    return [str(index) for index in range(_num_installed_gpus())]


@cache
def _num_installed_gpus() -> int:
    if shutil.which("nvidia-smi"):  # takes up to a second
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        return sum(line.startswith("GPU ") for line in listing.splitlines())
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def raise_open_file_limit() -> None:
    """Raises the limit of open files, often 1024, to the one that the system allows: gloo connects each pair of ranks in every
    group, and the process with the key-value store has a connection to each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports a limit that it does not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def total_memory() -> int | None:
    """Returns the bytes of memory of this machine, or None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def share_cores(processes: int) -> dict[str, str]:
    """Returns variables that divide the cores evenly among processes."""
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // processes))}


def wait_policy() -> dict[str, str]:
    """Returns variables that make OpenMP's threads sleep while they wait for each other, if other processes use the cores.

    Threads wait by spinning, which takes the core that the awaited thread needs: a step can take 100 times as long. On free cores,
    sleeping takes longer: 1.45 times for a small model. The load average covers a minute, in which an earlier run may have
    ended. Results do not depend on it.
    """
    is_busy = os.getloadavg()[0] > num_cores() / 4
    if is_busy:
        with suppress(ImportError, IndexError):  # psutil does not number cores that are offline
            import psutil

            cores = psutil.cpu_percent(interval=0.1, percpu=True)
            if hasattr(os, "sched_getaffinity"):  # other cores of the machine do not matter
                cores = [cores[number] for number in os.sched_getaffinity(0)]
            is_busy = sum(cores) / len(cores) > 25
    return {"OMP_WAIT_POLICY": "PASSIVE"} if is_busy else {}


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> None:
    """Makes glibc keep freed memory: every step allocates the same sizes again, and page faults are slow.

    Has no effect without glibc, or if the user has set its variables.
    """
    never_trim, never_mmap = (-1, -1), (-4, 0)  # M_TRIM_THRESHOLD, M_MMAP_MAX
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and not any(name.startswith("MALLOC_") for name in environ):
        for setting in (never_trim, never_mmap):
            mallopt(*setting)


def reduce_fragmentation(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes torch extend segments of GPU memory rather than allocate others, unless the user configures its allocator."""
    if not environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def cxx_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of the C++ compiler that torch.compile uses, or None if there is none."""
    return shutil.which(environ.get("CXX", "g++"))


def skip_isa_checks() -> dict[str, str]:
    """Returns variables that skip torch.compile's checks of the compiler's instruction sets, 7 s of the first start on a CPU.

    GCC 11 and later support all of them.
    """
    command = [os.environ.get("CXX", "g++"), "-dumpversion"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition(".")[0].strip()
    except OSError:
        return {}
    is_recent = version.isdigit() and int(version) >= 11
    return {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if is_recent and platform.machine() == "x86_64" else {}


def can_resolve(host: str) -> bool:
    """Whether a host name or IP address can be resolved."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # such as an empty or too long part of the name
        return False
    return True


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def address_towards(host: str, port: int) -> str:
    """Returns the address of this machine from which it reaches another one. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def cache_folder(folder: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory for reproducible files that later runs reuse: `folder`, or one in the user's cache directory."""
    if folder:
        return Path(folder)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlike"


def communication_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of NCCL and libfabric that are set."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(("NCCL_", "FI_"))}


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets environment variables that a library reads, unless the user has set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
