"""An NVML library in C, which reports what a test plants, for the bindings of the package `nvidia-ml-py`."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ADDRESS = "00000000:01:00.0"  # of its GPU
GIB = 2**30


def build(folder: Path) -> Path:
    """Compiles the library."""
    pytest.importorskip("pynvml", reason="requires nvidia-ml-py")
    if shutil.which("cc") is None:
        pytest.skip("requires a C compiler")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library


def plant(
    file: Path,
    *,
    utilization: int = 90,
    memory: int = 60 * GIB,
    milliwatts: int = 650_000,
    temperature: int = 60,
    reasons: int = 0,
    sent: int = 0,
    received: int = 0,
) -> None:
    """Writes what the GPU reports. NVLink counts KiB."""
    values = utilization, memory, milliwatts, temperature, reasons, sent, received
    file.write_text(" ".join(map(str, values)))


def use(library: Path, file: Path) -> None:
    """Makes the bindings of this process use the library, with the values of a file."""
    import pynvml

    os.environ["FAKE_NVML"] = str(file)
    pynvml.nvmlLib = ctypes.CDLL(str(library))
    pynvml._nvmlGetFunctionPointer_cache.clear()


def forget() -> None:
    """Undoes `use`."""
    import pynvml

    os.environ.pop("FAKE_NVML", None)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
