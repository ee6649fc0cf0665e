"""What this machine has, and how a process behaves on it: cores, GPUs, memory, caches, the death of its parent.

Together with `titanlike.distributed.environment` the only reader of environment variables. Does not import torch.
"""

import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def exit_on_interrupt() -> None:
    """Let Ctrl-C end this process without a stack trace, while there is nothing yet to tidy up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_with_parent(parent: int) -> None:
    """Be killed when this process dies, which has started us. Linux alone can do this."""
    signal_at_parent_death(parent, signal.SIGKILL)


def signal_at_parent_death(parent: int, how: signal.Signals) -> None:
    """Have this process receive the signal when its parent dies. Linux only."""
    if sys.platform == "linux":
        tell_me = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(tell_me, how)
        if os.getppid() != parent:  # it has just died
            os.kill(os.getpid(), how)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs that a process started here may use, found without torch."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        return sum(line.startswith("GPU ") for line in listing.splitlines())
    return len([device for device in Path("/dev").glob("nvidia[0-9]*")])


def share_cores(processes: int) -> dict[str, str]:
    """Variables that give each of so many processes an even share of the cores."""
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // processes))}


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> None:
    """Let the process keep what it frees: the next step takes the same sizes again, and the system is slow to give them anew.
    Does nothing where the C library is not glibc, or the user has set its variables."""
    keep_all, from_system_never = (-1, -1), (-4, 0)  # M_TRIM_THRESHOLD, M_MMAP_MAX
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and not any(name.startswith("MALLOC_") for name in environ):
        for setting in (keep_all, from_system_never):
            mallopt(*setting)


def skip_isa_checks() -> dict[str, str]:
    """Variables that spare torch.compile its trials of the processor's instructions, seven seconds of a first start on a CPU:
    a compiler of these years knows them all."""
    command = [os.environ.get("CXX", "g++"), "-dumpversion"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return {}
    recent = version.partition(".")[0].strip().isdigit() and int(version.partition(".")[0]) >= 11
    return {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if recent and platform.machine() == "x86_64" else {}


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def cache_folder(given: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Where what can be made again is kept for later runs: the given folder, or the user's own."""
    return Path(given or environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / ("" if given else "titanlike")


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables that a library reads, except those that the user has set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
