"""Descriptions of hardware: a GPU, the links between GPUs, and their price. Does not import torch.

The files are in `hardware_files`; `titanlike plan --calibrate` writes one for the machine that it runs on.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from titanlike.config import UserError
from titanlike.config.base import has_control_characters, nearest, section, show_value, shown

FILES = Path(__file__).with_name("hardware_files")
DEFAULT_HARDWARE = "h100"
MEMORY_TOLERANCE = 0.1  # data sheets give GB or GiB, and drivers and ECC reserve some
OTHER_CARDS = {"PCIE", "NVL", "MIG"}  # slower cards of the same name, and instances of a GPU

Described = TypeVar("Described", bound=Any)

LEAST, MOST = 1e-6, 1e6  # in the unit of each key: less or more is a mistake, and gives figures of hundreds of digits


def _zero_or_more_than_least(value: float) -> float:
    if 0.0 < value < LEAST:
        raise ValueError(f"it must be 0 or at least {LEAST}")
    return value


def _without_control_characters(name: str) -> str:
    if has_control_characters(name):
        raise ValueError("it must not contain control characters")
    return name


Rate = Annotated[float, Field(ge=LEAST, le=MOST)]
RateOrZero = Annotated[float, Field(ge=0.0, le=MOST), AfterValidator(_zero_or_more_than_least)]
Fraction = Annotated[float, Field(ge=LEAST, le=1.0)]
Efficiency = Annotated[float, Field(ge=0.001, le=2.0)]


@section
class Hardware:
    """A GPU and the cluster that it is part of."""

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_without_control_characters)]
    """Name in reports."""
    memory_gib: Annotated[float, Field(ge=2.0, le=MOST)]
    """Memory of a GPU, as `torch.cuda.get_device_properties` reports it. Less than 2 GiB leave nothing to the allocator."""
    bf16_tflops: Rate
    """Peak dense bfloat16 throughput of the data sheet, or float16 throughput of a GPU without bfloat16. MFU refers to it."""
    float32_tflops: Rate
    """Peak float32 throughput without TF32."""
    memory_gb_per_second: Rate
    """Peak memory bandwidth of the data sheet."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    """GPUs that share the fast links."""
    node_gb_per_second: Rate
    """Bandwidth of a GPU to the others of its node, in one direction."""
    network_gb_per_second: Rate
    """Bandwidth of a GPU to other nodes, in one direction."""

    node_switch: bool | None = None
    """Whether a switch joins the GPUs of a node. Without one, each two GPUs share an equal part of that bandwidth: a pair of four
    GPUs has a third of it. Default: unless a node has four GPUs, whose boards have none."""
    bfloat16: bool = True
    """Whether the GPU multiplies in bfloat16. Those before Ampere do not, and a recipe for them computes in float16."""
    float8_tflops: RateOrZero = 0.0
    """Peak dense float8 throughput. 0: the GPU has no float8 matmuls."""
    tf32_tflops: RateOrZero = 0.0
    """Peak dense TF32 throughput, for float32 with `training.matmul_precision` below `highest`. 0: as float32."""
    gemm_fraction: Fraction = 0.7
    """Fraction of the peak that large bfloat16 or float32 matmuls sustain."""
    float8_gemm_fraction: Fraction = 0.6
    """Fraction of the peak that large float8 matmuls sustain."""
    gemm_half_size: RateOrZero = 128.0
    """Size of one dimension of a bfloat16 matmul at which it reaches half of this fraction. A float8 matmul takes less time for the
    same fixed costs, so the size is larger in the ratio of their speeds."""
    grouped_half_rows: RateOrZero = 4096.0
    """The same for the rows of an expert, whose matmul is in one kernel with other experts' matmuls."""
    attention_forward: Fraction = 0.4
    """Fraction of the bfloat16 peak that the forward pass of the fastest fused attention kernel sustains on long sequences, with a
    head dimension of 128 and a causal mask, of which half is computed."""
    attention_backward: Fraction = 0.3
    """The same for the backward pass."""
    flash_forward: Fraction = 0.35
    """The same for the forward pass of torch's FlashAttention kernel, which context parallelism uses."""
    flash_backward: Fraction = 0.3
    """The same for its backward pass."""
    attention_half_length: RateOrZero = 500.0
    """Sequence length at which attention reaches half of these fractions."""
    memory_fraction: Fraction = 0.85
    """Fraction of the peak memory bandwidth that elementwise kernels reach."""
    node_fraction: Fraction = 0.75
    """Fraction of the bandwidth within a node that large all-gathers reach (the bus bandwidth of nccl-tests)."""
    node_latency_us: RateOrZero = 20.0
    """Microseconds of a small collective within a node."""
    node_half_mb: RateOrZero = 16.0
    """Megabytes of a collective within a node at which it reaches half of its bandwidth: what is in flight before it is at full
    speed."""
    exchange_fraction: Fraction = 0.3
    """Speed of all-to-alls within a node relative to all-gathers."""
    network_fraction: Fraction = 0.8
    """Fraction of the bandwidth between nodes that large all-gathers reach."""
    single_fraction: Fraction = 0.55
    """The same for collectives of one rank per node, such as FSDP's beside tensor parallelism within nodes: each rank uses
    one network link alone, and shares multiprocessors and memory with the collectives within its node."""
    network_latency_us: RateOrZero = 40.0
    """Microseconds that each further node adds to a small collective."""
    launch_us: RateOrZero = 5.0
    """Microseconds of the host for each kernel that eager code launches. The GPU waits for the host if it is faster."""
    host_gb_per_second: Rate = 25.0
    """Bandwidth between a GPU and host memory, for `parallelism.cpu_offload` and `activation_checkpoint.offload`."""
    efficiency: Efficiency = 1.0
    """Measured over predicted speed of training in bfloat16 or float32, from `benchmarks/planner_validation.py`."""
    float8_efficiency: Efficiency = 1.0
    """Measured over predicted speed of training in float8."""
    dollars_per_gpu_hour: RateOrZero = 0.0
    """Price of a GPU for an hour. 0: unknown."""
    price_source: Annotated[str, Field(max_length=100), AfterValidator(_without_control_characters)] = ""
    """Region, kind, date and source of this price."""
    efa: bool = False
    """Whether nodes are connected by AWS's Elastic Fabric Adapter, which SageMaker jobs then require."""
    gpu_watts: RateOrZero = 0.0
    """Power of a GPU. 0: unknown."""

    @property
    def has_switch(self) -> bool:
        """Whether a switch joins the GPUs of a node."""
        return self.gpus_per_node != 4 if self.node_switch is None else self.node_switch

    def check_dtype(self, compute_dtype: str) -> None:
        """Raises `UserError` for a `training.compute_dtype` in which the GPU does not multiply."""
        if compute_dtype == "bfloat16" and not self.bfloat16:
            raise UserError(
                f"training.compute_dtype = 'bfloat16', which {self.name} does not have; set training.compute_dtype = 'float16'"
            )


def hardware_names() -> list[str]:
    """Returns the names of the shipped hardware files."""
    return sorted(file.stem for file in FILES.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """Returns the hardware of this name, or of the TOML file at this path. Raises `UserError`."""
    return described_by(name, FILES, Hardware, "hardware")


def described_by(name: str, folder: Path, type_: type[Described], kind: str) -> Described:
    """Returns the description of this name in a folder, or of the TOML file at this path. Raises `UserError`.

    Args:
        kind: name of the option, and of the file in errors: `hardware` or `program`.
    """
    names = sorted(file.stem for file in folder.glob("*.toml"))
    path = folder / f"{name}.toml" if name in names else Path(name)
    if name not in names and path.suffix != ".toml":
        near = nearest(name.lower(), names)
        meant = f"did you mean {near}? " if near else ""
        raise UserError(f"--{kind} {shown(name)} is unknown; {meant}use {', '.join(names)}, or the path of a TOML file")
    try:
        values = tomli.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"--{kind} {shown(name)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of tomli, or text that is not UTF-8
        raise UserError(f"--{kind} {shown(name)} is not valid TOML: {shown(str(error))}") from None
    keys = type_.__dataclass_fields__
    if "extends" in values:
        values = _extended(values, folder, f"{kind} file {shown(name)}")
    try:
        text = json.dumps(({"name": path.stem} if "name" in keys else {}) | values, default=str)
    except ValueError:  # hexadecimal digits of an integer that Python does not convert to decimal ones
        raise UserError(
            f"{kind} file {shown(name)}: an integer has thousands of digits; write a smaller number"
        ) from None
    try:
        return TypeAdapter(type_).validate_json(text)
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors()]
        raise UserError(
            "\n".join(_message(f"{kind} file {shown(name)}", list(keys), detail) for detail in details)
        ) from None


def _extended(values: dict[str, Any], folder: Path, file: str) -> dict[str, Any]:
    """Returns the values of a file together with the values of the shipped one that it extends."""
    base, names = values["extends"], sorted(file.stem for file in folder.glob("*.toml"))
    if base not in names:
        raise UserError(f"{file}: extends = {show_value(base)} is not a shipped file; use one of {', '.join(names)}")
    inherited = tomli.loads((folder / f"{base}.toml").read_text())
    if "extends" in inherited:
        inherited = _extended(inherited, folder, file)
    return inherited | {key: values[key] for key in values if key != "extends"}


def _message(file: str, keys: list[str], detail: dict[str, object]) -> str:
    """Formats one pydantic error as: file, key, value and remedy."""
    location = detail["loc"]
    key = shown(".".join(map(str, location))) if isinstance(location, tuple) else ""
    if detail["type"] == "missing":
        return f"{file}: {key} is missing; add it, as in {FILES.name}/h100.toml"
    if detail["type"] == "unexpected_keyword_argument":
        near = nearest(key, keys)
        return f"{file}: {key} is an unknown key; " + (f"did you mean {near}?" if near else "remove it")
    value, message = show_value(detail["input"]), str(detail["msg"]).removeprefix("Value error, ")
    return f"{file}: {key} = {value} is not valid: {message[:1].lower()}{message[1:]}"


def hardware_of_device(name: str, memory_gib: float) -> Hardware | None:
    """Returns the description of a GPU by the name that CUDA reports and its memory, or None if there is none."""
    file = file_of_device(name, memory_gib)
    return load_hardware(file) if file else None


def file_of_device(name: str, memory_gib: float) -> str:
    """Returns the name of the description of a GPU for `--hardware`, or "" if there is none."""
    parts = set(re.split(r"[\s_-]+", name.upper()))
    if parts & OTHER_CARDS:
        return ""
    for file in hardware_names():
        is_named = file.partition("_")[0].upper() in parts
        if is_named and abs(load_hardware(file).memory_gib / memory_gib - 1) <= MEMORY_TOLERANCE:
            return file
    return ""
