"""Descriptions of hardware: a GPU, the links between GPUs, and their price. Does not import torch.

The files are in `titanlike/hardware`; `titanlike plan --calibrate` writes one for the machine that it runs on.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from titanlike.config import UserError
from titanlike.config.base import has_control_characters, nearest, section, show_value, shown
from titanlike.hardware.files import FOLDER, file_of_device, read_file

if TYPE_CHECKING:
    import torch

DEFAULT_HARDWARE = "h100"

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
    efa_interfaces: Annotated[int, Field(ge=0, le=1024)] = 0
    """Interfaces of AWS's Elastic Fabric Adapter of a node, which jobs of SageMaker, Kubernetes and Slurm then require. 0: none."""
    gpu_watts: RateOrZero = 0.0
    """Power of a GPU. 0: unknown."""
    devices: tuple[str, ...] = ()
    """Names that CUDA gives this GPU, by which a run finds its file. A file that extends another one does not inherit them."""
    sources: tuple[str, ...] = ()
    """Where the figures come from: data sheets, measurements, lists of instance types."""

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
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load_hardware(name: str, option: str = "--hardware") -> Hardware:
    """Returns the hardware of this name, or of the TOML file at this path. Raises `UserError`, which names the option."""
    return described_by(name, FOLDER, Hardware, "hardware", option)


def hardware_of(device: "torch.device") -> Hardware | None:
    """Returns the description of a GPU of this machine, or None for a device without one."""
    from titanlike.metrics.hardware import device_name

    file = file_of_device(device_name(device))
    return load_hardware(file) if file else None


def described_by(name: str, folder: Path, type_: type[Described], kind: str, option: str) -> Described:
    """Returns the description of this name in a folder, or of the TOML file at this path. Raises `UserError`."""
    names = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in names and Path(name).suffix != ".toml":
        near = nearest(name.lower(), names)
        meant = f"did you mean {near}? " if near else ""
        raise UserError(f"{option} {shown(name)} is unknown; {meant}use {', '.join(names)}, or the path of a TOML file")
    try:
        values = read_file(name, folder)
    except UserError as error:
        raise UserError(f"{option} {error}") from None
    keys = type_.__dataclass_fields__
    try:
        text = json.dumps(({"name": Path(name).stem} if "name" in keys else {}) | values, default=str)
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


def _message(file: str, keys: list[str], detail: dict[str, object]) -> str:
    """Formats one pydantic error as: file, key, value and remedy."""
    location = detail["loc"]
    key = shown(".".join(map(str, location))) if isinstance(location, tuple) else ""
    if detail["type"] == "missing":
        return f"{file}: {key} is missing; add it, as in titanlike/hardware/h100.toml"
    if detail["type"] == "unexpected_keyword_argument":
        near = nearest(key, keys)
        return f"{file}: {key} is an unknown key; " + (f"did you mean {near}?" if near else "remove it")
    value, message = show_value(detail["input"]), str(detail["msg"]).removeprefix("Value error, ")
    return f"{file}: {key} = {value} is not valid: {message[:1].lower()}{message[1:]}"
