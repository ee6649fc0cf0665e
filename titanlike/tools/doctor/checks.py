"""Checks of this machine and its packages for training. Each check returns what it found and, if something is wrong, a remedy."""

import importlib
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import titanlike
from titanlike.config.sections import Float8
from titanlike.distributed import launch_config
from titanlike.tools.doctor import interconnect
from titanlike.tools.doctor.finding import GIB, Finding, output
from titanlike.utils import system

MIN_PYTHON = (3, 10)
MIN_DISK_GIB = 20
MIN_SHARED_GIB = 1
MIN_OPEN_FILES = 8192
# Reasons for lower clocks that are faults, as nvidia-smi names them. Others are normal: an idle GPU, its power cap, clocks that an
# administrator has set.
THROTTLE_REASONS = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "hw_slowdown")
EXTRAS = {
    "data": ("aiohttp", "huggingface_hub", "pyarrow", "tokenizers", "zstandard"),
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "azure": ("adlfs",),
    "plot": ("matplotlib",),
    "eval": ("lm_eval",),
    "sagemaker": ("boto3",),
}


def examine() -> Iterator[Finding]:
    """Runs all checks, those without torch first."""
    for check in BASIC_CHECKS:
        yield from check()
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        yield Finding("missing", "torch", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    for check in TORCH_CHECKS:
        yield from check()


def python() -> Iterable[Finding]:
    """Whether this version of Python is supported."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] >= MIN_PYTHON:
        return [Finding("ok", "python", found)]
    required = ".".join(map(str, MIN_PYTHON))
    return [Finding("missing", "python", found, f"install Python {required} or later")]


def packages() -> Iterable[Finding]:
    """Whether the required packages are installed, with supported versions."""
    try:
        requirements = metadata.requires("titanlike") or []
    except metadata.PackageNotFoundError:
        return [Finding("missing", "titanlike", "not installed", 'pip install -e "."')]
    found = {}
    findings = []
    for requirement in map(Requirement, requirements):
        name = requirement.name
        if requirement.marker:  # an extra's
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            findings.append(Finding("missing", name, "not installed", f'pip install "{requirement}"'))
            continue
        if not requirement.specifier.contains(found[name], prereleases=True):
            text = f"{found[name]} is not a supported version"
            findings.append(Finding("warning", name, text, f'pip install "{requirement}"'))
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return [*findings, *([] if findings else [Finding("ok", "packages", listed)])]


def extras() -> Iterable[Finding]:
    """Which optional packages are installed."""
    for extra, names in EXTRAS.items():
        absent = [name for name in names if not _is_installed(name)]
        if absent:
            command = f'pip install "titanlike[{extra}]"'
            yield Finding("missing", f"extra {extra}", ", ".join(absent), command, optional=True)
        else:
            yield Finding("ok", f"extra {extra}", ", ".join(f"{name} {metadata.version(name)}" for name in names))
    if not _is_installed("transformers"):
        text = "transformers, which loads exported folders"
        yield Finding("missing", "transformers", text, "pip install transformers", optional=True)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def compiler() -> Iterable[Finding]:
    """Whether torch.compile has a C++ compiler."""
    found = system.cxx_compiler()
    if found:
        return [Finding("ok", "compiler", found)]
    remedy = 'apt-get install g++, or set compile.mode = "none"'
    return [Finding("warning", "compiler", "no C++ compiler, which torch.compile needs", remedy)]


def processor() -> Iterable[Finding]:
    """Cores and memory."""
    memory = system.total_memory()
    size = f", {memory / GIB:,.0f} GiB of memory" if memory else ""
    return [Finding("ok", "processor", f"{system.num_cores()} cores{size}")]


def disk(folder: Path = Path()) -> Iterable[Finding]:
    """Free space for run directories."""
    free = shutil.disk_usage(folder).free / GIB
    text = f"{free:,.0f} GiB free in {folder.absolute()}"
    if free >= MIN_DISK_GIB:
        return [Finding("ok", "disk", text)]
    remedy = "a checkpoint takes 12 bytes per parameter: free some space, or set run.dir to another disk"
    return [Finding("warning", "disk", text, remedy)]


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterable[Finding]:
    """Shared memory, over which NCCL communicates between GPUs of a node."""
    if not folder.is_dir():
        return []
    size = shutil.disk_usage(folder).total / GIB
    text = f"{size:,.1f} GiB in {folder}"
    if size >= MIN_SHARED_GIB or system.num_gpus() < 2:
        return [Finding("ok", "shared memory", text)]
    remedy = "start the container with --ipc=host or --shm-size=16g"
    return [Finding("warning", "shared memory", f"{text}, which NCCL may exhaust", remedy)]


def port() -> Iterable[Finding]:
    """Whether the port of the first node is free, and this host's name can be resolved, for several nodes."""
    number = launch_config.launch_config(default_processes=1).master_port
    if system.port_is_free(number):
        yield Finding("ok", "port", f"{number} is free")
    else:
        yield Finding("warning", "port", f"{number} is in use", "end that process, or set MASTER_PORT to a free port")
    host = socket.gethostname()
    if system.can_resolve(host):
        yield Finding("ok", "host name", host)
    else:
        remedy = "add it to /etc/hosts, or give MASTER_ADDR as an IP address"
        yield Finding("warning", "host name", f"{host} cannot be resolved", remedy)


def open_files() -> Iterable[Finding]:
    """The limit of open files, which the launcher raises to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        return [Finding("ok", "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard:,}")]
    remedy = "raise the hard limit (nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536)"
    return [Finding("warning", "open files", f"limited to {hard:,}, too few for some hundred processes", remedy)]


def clock(now: Callable[[], float] = time.time) -> Iterable[Finding]:
    """Whether the clock is plausible: object stores and certificates refuse a clock that is wrong."""
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now()))
    if now() < Path(titanlike.__file__).stat().st_mtime - 86_400:
        remedy = "set the clock, for example with timedatectl set-ntp true"
        return [Finding("warning", "clock", f"{text} is before titanlike was installed", remedy)]
    if output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip() == "no":
        return [Finding("warning", "clock", f"{text}, not synchronized", "timedatectl set-ntp true")]
    return [Finding("ok", "clock", text)]


def torch_features() -> Iterable[Finding]:
    """Whether the installed torch has the private APIs that some features use."""
    from titanlike.tools.planning import torch_internals
    from titanlike.utils import compat

    sentences = compat.missing((*compat.REQUIRED, *torch_internals.REQUIRED))
    for sentence in sentences:
        yield Finding("warning", "torch", sentence, "install a supported version (docs/installing.md)")
    if not sentences:
        import torch

        yield Finding("ok", "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not included'}")


def gpus() -> Iterable[Finding]:
    """GPUs, the driver and what each GPU supports."""
    import torch

    present, driver = system.num_gpus(), _driver_version()
    if not present:
        if torch.backends.mps.is_available():
            return [Finding("ok", "gpu", 'Apple GPU: run.device = "mps" trains one process on it')]
        return [Finding("ok", "gpu", "none: training runs on the CPU")]
    if torch.version.cuda is None:
        remedy = "pip install --force-reinstall torch (docs/installing.md)"
        return [Finding("missing", "gpu", f"{present} GPU(s), but torch is a build without CUDA", remedy)]
    if not torch.cuda.is_available():
        text = f"{present} GPU(s) with driver {driver}, which torch for CUDA {torch.version.cuda} cannot use"
        return [Finding("missing", "gpu", text, "update the NVIDIA driver, or install torch for an earlier CUDA")]
    number = torch.cuda.device_count()
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    size = torch.cuda.get_device_properties(0).total_memory / GIB
    return [
        Finding("ok", "gpu", f"{number} x {name}, {size:.1f} GiB each, driver {driver}, CUDA {torch.version.cuda}"),
        _precision("bfloat16", capability >= (8, 0), "8.0", 'set training.compute_dtype = "float16"', capability),
        _precision(
            "float8",
            not Float8(scaling="tensorwise").hardware_problem(name, capability),
            "8.9",
            'leave float8.scaling = "none"',
            capability,
        ),
        *_flash_attention(),
        *_nccl(),
        *_throttling(),
        *_peer_access(number),
    ]


def _precision(name: str, supported: bool, needed: str, remedy: str, capability: tuple[int, int]) -> Finding:
    found = "compute capability {}.{}".format(*capability)
    if supported:
        return Finding("ok", name, f"supported: {found}")
    return Finding("warning", name, f"not supported: {found}, but {needed} is needed", remedy)


def _flash_attention() -> list[Finding]:
    """Which versions of FlashAttention `training.attention` can select besides torch's own."""
    from titanlike.models.common.flash_attention import (
        FLASH_ATTENTION,
        flash_attention_problem,
        restore_flash_attention,
    )

    findings = []
    for name in FLASH_ATTENTION:
        problem = flash_attention_problem(name)
        if not problem:
            restore_flash_attention()
        findings.append(Finding("ok", name, problem or f'available: training.attention = "{name}"'))
    return findings


def _nccl() -> list[Finding]:
    import torch

    if not torch.distributed.is_nccl_available():
        return [Finding("missing", "nccl", "torch is a build without NCCL", "pip install --force-reinstall torch")]
    return [Finding("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))]


def _throttling() -> list[Finding]:
    """Which GPUs are throttled by a fault now. Without an answer of nvidia-smi, nothing is known."""
    query = ",".join(["index", *(f"clocks_event_reasons.{reason}" for reason in THROTTLE_REASONS)])
    rows = [
        line.split(", ") for line in output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines()
    ]
    findings = []
    for index, *states in rows:
        reasons = [name for name, state in zip(THROTTLE_REASONS, states, strict=False) if state.strip() == "Active"]
        if reasons:
            text = f"GPU {index} is throttled: {', '.join(reasons)}"
            findings.append(Finding("warning", "throttling", text, "check cooling and power supply"))
    return findings or [Finding("ok", "throttling", "no GPU is throttled")] * bool(rows)


def _peer_access(number: int) -> list[Finding]:
    """Whether GPUs address each other's memory, which symmetric memory requires, and how they are connected."""
    import torch

    if number < 2:
        return []
    findings = []
    if all(torch.cuda.can_device_access_peer(0, other) for other in range(1, number)):
        findings.append(Finding("ok", "symmetric memory", "peer access between GPUs"))
    else:
        remedy = "leave parallelism.async_tensor_parallel = false"
        findings.append(Finding("warning", "symmetric memory", "no peer access between GPUs", remedy))
    return findings + links(output("nvidia-smi", "topo", "--matrix"))


def links(matrix: str) -> list[Finding]:
    """Returns how GPUs are connected, from the matrix of `nvidia-smi topo`."""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds = {cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"}
    if not kinds:
        return []
    slow = sorted(kind for kind in kinds if not kind.startswith("NV"))
    if not slow:
        return [Finding("ok", "links", f"NVLink between all GPUs ({', '.join(sorted(kinds))})")]
    remedy = "tensor parallelism is slow over PCIe: prefer parallelism.shard, or pipeline"
    return [Finding("warning", "links", f"some GPUs are connected over PCIe ({', '.join(slow)})", remedy)]


def _driver_version() -> str:
    return output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or "unknown"


Check = Callable[[], Iterable[Finding]]
BASIC_CHECKS: tuple[Check, ...] = (
    python, packages, extras, compiler, processor, disk, shared_memory, port, open_files, clock, interconnect.rdma,
    interconnect.locked_memory, interconnect.frame_size, interconnect.peer_memory, interconnect.variables,
)  # fmt: skip
TORCH_CHECKS: tuple[Check, ...] = (torch_features, gpus)
