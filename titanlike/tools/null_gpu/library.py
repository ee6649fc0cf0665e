"""Builds the null device: the C files of `device/`, and a function for every other symbol that PyTorch imports from CUDA's
libraries."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

FOLDER = Path(__file__).parent
SOURCES = sorted((FOLDER / "device").glob("*.[ch]"))
IMPORTED = re.compile(
    r"cu[A-Z]|cuda[A-Z]|cu(blas|blasLt|dnn|sparse|sparseLt|solver|solverDn|fft|rand|pti)[A-Z]|nccl[A-Z]|nvshmem|__cuda"
)
# `crt/host_defines.h` is not among the headers that come with PyTorch. C needs none of what it defines.
HOST_DEFINES = """
#define __no_return__ __attribute__((noreturn))
#define __align__(n) __attribute__((aligned(n)))
#define __specialization_static static
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __align__(n)
#define __thread__ __thread
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
"""
# Without CUDA's headers: their declarations would contradict these definitions, which ignore the arguments.
GENERATED = """
#include <stdatomic.h>
enum { MATMUL };
struct kernel;
struct kernel *new_kernel(const char *name, int kind);
void launched(struct kernel *kernel);
static char handles[1 << 16];
static atomic_uint next_handle;
static void *new_handle(void) { return &handles[64 * (next_handle++ % (sizeof handles / 64))]; }
"""


class Unavailable(Exception):
    """What the null device is built from is not installed. The message says what."""


class BuildFailed(Exception):
    """The C compiler refused the null device. The message is its output."""


def devices() -> dict[str, dict[str, Any]]:
    """Returns the devices that can be emulated, by name."""
    return tomli.loads((FOLDER / "devices.toml").read_text())


def _torch_libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("PyTorch is not installed")
    folder = Path(spec.origin).parent / "lib"
    if not (folder / "libtorch_cuda.so").exists():
        raise Unavailable(
            f"the PyTorch in {folder.parent} has no CUDA: install the build that pip selects without an index URL"
        )
    return sorted(folder.glob("lib*.so"))


def _header_folders(libraries: list[Path]) -> list[Path]:
    packages = libraries[0].parents[2] / "nvidia"
    found = []
    for header in ("cuda_runtime_api.h", "cudnn.h", "nccl.h", "cupti.h"):
        locations = sorted(packages.glob(f"*/include/{header}"))
        if not locations:
            raise Unavailable(
                f"{header} is not in {packages}: PyTorch's CUDA libraries are not those that pip installs"
            )
        found.append(locations[-1].parent)
    return list(dict.fromkeys(found))


def symbols(libraries: list[Path], *options: str) -> set[str]:
    """Returns the names in the libraries' dynamic symbol tables, without versions."""
    lines = subprocess.run(["nm", "-D", *options, *libraries], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return {line.split()[-1].split("@")[0] for line in lines if len(line.split()) > 1}


def stub(name: str) -> str:
    """Returns the C source of a function that PyTorch imports and that the C files do not define."""
    if re.search(r"Get(Last)?ErrorString$|GetStatusString$|ncclGetLastError$", name):
        return f'const char *{name}(void) {{ return "error of the null device"; }}'
    if name.startswith("cublas") and re.search(r"[Gg]em[mv]|Matmul$", name):
        kernel = f'static struct kernel *kernel; if (!kernel) kernel = new_kernel("{name}", MATMUL); launched(kernel);'
        return f"int {name}(void) {{ {kernel} return 0; }}"
    if re.search(r"Create(_v2)?$|^(cudnn|cusparse|cusolver|cublas).*Create", name):
        return f"int {name}(void **handle) {{ *handle = new_handle(); return 0; }}"
    return f"int {name}(void) {{ return 0; }}"


def _generated(names: set[str]) -> str:
    return "\n".join([GENERATED, *(stub(name) for name in sorted(names))])


def build() -> Path:
    """Returns the folder with `libcuda.so.1`, the null device for the PyTorch that is installed. It is built once per version."""
    libraries = _torch_libraries()
    for program in ("cc", "nm"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not in PATH: install a C compiler, which torch.compile needs, too")
    digest = hashlib.sha256()
    for file in [Path(__file__), *SOURCES]:
        digest.update(file.read_bytes())
    for file in libraries:
        digest.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    cache = Path(
        os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "titanlike", "null_gpu", digest.hexdigest()[:16]
    )
    if (cache / "libcuda.so.1").exists():
        return cache
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as name:
        folder = Path(name, "built")
        _build(folder, libraries)
        with suppress(OSError):  # another process was faster
            folder.rename(cache)
    return cache


def _build(folder: Path, libraries: list[Path]) -> None:
    (folder / "include/crt").mkdir(parents=True)
    (folder / "include/crt/host_defines.h").write_text(HOST_DEFINES)
    (folder / "include/nv").mkdir()
    (folder / "include/nv/target").write_text("")  # of C++
    compiler = ["cc", "-O2", "-fPIC", "-pthread", "-w", "-I", folder / "include", "-I", FOLDER / "device"]
    compiler += [option for place in _header_folders(libraries) for option in ("-I", place)]
    sources = [file for file in SOURCES if file.suffix == ".c"]
    objects = [_compile(compiler, source, folder / f"{source.stem}.o") for source in sources]
    imported = {name for name in symbols(libraries, "--undefined-only") if IMPORTED.match(name)}
    defined = _defined(objects)
    (folder / "generated.c").write_text(_generated(imported - defined))
    objects.append(_compile(compiler, folder / "generated.c", folder / "generated.o"))
    _run(["cc", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", *objects])
    (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")


def _compile(compiler: list[object], source: Path, target: Path) -> Path:
    _run([*compiler, "-c", source, "-o", target])
    return target


def _defined(objects: list[Path]) -> set[str]:
    lines = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return {line.split()[2] for line in lines if len(line.split()) == 3}


def _run(command: list[object]) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildFailed(f"{' '.join(str(part) for part in command)}\n{result.stderr}")
