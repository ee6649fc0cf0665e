"""How a training program computes what a recipe leaves open: this toolkit, or another one whose runs are planned.

The files are in `program_files`. Does not import torch.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from titanlike.config.base import section
from titanlike.tools.planning.hardware import described_by

FILES = Path(__file__).with_name("program_files")

Bytes = Annotated[int, Field(ge=0, le=1000)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


@section
class Program:
    """A training program. The defaults are this toolkit's. Bytes are per element and of eager code: compiled code fuses these
    operations."""

    attention: Literal["", "fused", "flash"] = ""
    """Attention kernel: `fused` is cuDNN's, `flash` is torch's FlashAttention-2. Default: the recipe's."""
    norm_bytes: tuple[Bytes, Bytes] = (4, 10)
    """Of RMSNorm, forward and backward. The default is for torch's fused kernel; a composite one has about 36 and 60."""
    rope_bytes: Bytes = 58
    """Of rotary embeddings, in each pass. The default has two halves in float32 and their concatenation; complex numbers: 24."""
    eager_loss: bool = False
    """The loss is not compiled, and of all logits at once."""
    logit_bytes: Bytes = 0
    """Memory of the loss for each logit, beyond the same recipe here."""
    whole_logits: bool = False
    """Each tensor-parallel rank computes the logits of the whole vocabulary."""
    sequence_parallel: bool = True
    """Tensor-parallel ranks share the tokens outside of attention and feed-forward."""
    overlaps: bool = True
    """FSDP's collectives run beside computation."""
    gathers_once: bool = False
    """A pipeline keeps the weights of all its stages for a step."""
    cast_share: Share = 1.0
    """Of the bytes of casts to float8; less if norms and activation functions write float8."""
    regathers: bool = False
    """Selective activation checkpointing repeats tensor-parallel all-gathers."""
    async_tensor_share: Share = 0.0
    """Share of tensor-parallel collectives that is hidden. 0: as in the recipe."""
    load_variation: Annotated[float, Field(ge=0.0, le=10.0)] = 0.2
    """Standard deviation of the tokens of experts, relative to their mean. 0: balanced by force."""
    padded_experts: bool = False
    """Each expert computes as many rows as the one with most tokens."""
    hidden_exchange: Share = 0.0
    """Share of the all-to-alls of experts that runs beside computation."""
    ranks_per_token: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    """Ranks that a token is sent to, once for all its experts there, as by DeepEP. 0: all-to-alls send a copy for each expert."""
    fused_experts: bool = False
    """Elementwise operations of experts are fused, also with expert parallelism."""
    float8_experts: bool = False
    """Experts multiply in float8 where the recipe does."""
    single_experts: bool = False
    """Each expert has kernels of its own: one for each matmul, and one for each cast."""
    launch_us: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    """Microseconds of the host for each kernel. 0: as the hardware says."""


TITANLIKE = Program()


def load_program(name: str) -> Program:
    """Returns the program of this name, or of the TOML file at this path. Raises `UserError`."""
    return described_by(name, FILES, Program, "program", "--program")
