"""A kernel of a recorded step, and the class of what it computes."""

import math
import re
from dataclasses import dataclass

CROSS_ENTROPY = "_rows"  # of `losses.fused_cross_entropy`
SMALL = 2**16  # elements: what has fewer is neither a matrix of weights nor an activation
MATMUL = re.compile(r"(^|_)(mm|bmm|addmm|baddbmm|matmul|product)(_|$)")
ATTENTION = re.compile(r"attention|flash|flex")
ACTIVATION = {
    "SwiGLU or GELU": re.compile(r"silu|gelu|sigmoid|tanh|relu|erf"),
    "RoPE": re.compile(r"cat.*neg|neg.*(cat|slice)|complex|polar|rope"),
    "norm and residual": re.compile(r"norm|rsqrt|add"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel, with the tensors that it is called with."""

    kind: str  # triton, operator or collective
    name: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype
    bytes: int  # read and written in a call; of a collective: of the larger of input and output
    issued: float = 0.0  # instructions of all warps in a call
    optimizer: bool = False  # within a step of an optimizer
    collective: str = ""  # kind, as in the plan
    group: tuple[str, int] = ("", 1)  # description and number of ranks of a collective

    @property
    def is_matmul(self) -> bool:
        """Whether it multiplies matrices."""
        return self._is_library_call and not self.is_attention and bool(MATMUL.search(self.name))

    @property
    def is_attention(self) -> bool:
        """Whether it is fused attention."""
        return self._is_library_call and bool(ATTENTION.search(self.name))

    @property
    def _is_library_call(self) -> bool:
        return self.kind == "operator" or self.name.startswith("triton_tem_")


@dataclass(frozen=True)
class Parameters:
    """The trained parameters, whole and as this rank's shards."""

    vocab: int  # rows of the embedding or LM head
    sizes: list[int]  # numbers of elements
    head: list[int]  # of the embedding and the LM head


def class_of(kernel: Kernel, parameters: Parameters) -> str:
    """Returns the class of a kernel: the first one that fits."""
    name = kernel.name
    if name == CROSS_ENTROPY:
        return "cross-entropy"
    large = [(shape, dtype) for shape, dtype in kernel.tensors if math.prod(shape) > SMALL]
    sizes, dtypes = {math.prod(shape) for shape, _ in large}, {dtype for _, dtype in large}
    activation = next((each for each, pattern in ACTIVATION.items() if pattern.search(name)), "other")
    if any("complex" in dtype for dtype in dtypes):
        activation = "RoPE"
    if kernel.kind == "collective":
        return "collectives"
    if kernel.optimizer:
        return "optimizer"
    if kernel.is_matmul:
        return "matmul"
    if kernel.is_attention:
        return "attention"
    if re.search(r"all_gather_copy_in|split_with_sizes_copy|chunk_cat", name):
        return "FSDP copies"
    if re.search(r"_foreach_norm|linalg_vector_norm|_foreach_mul_", name):
        return "norm and clipping of gradients"
    if any("float8" in dtype for dtype in dtypes):
        return "casts to float8"
    if re.search(r"abs.*max|max.*abs", name):
        return "maxima for float8"
    if re.search(r"softmax|nll_loss|cross_entropy|exp.*log|log.*exp", name):
        return "cross-entropy"
    if sizes & set(parameters.head):
        return "head and embedding"
    if any(shape[-1] == parameters.vocab for shape, _ in large):
        return "cross-entropy"
    if (
        sizes
        and sizes <= set(parameters.sizes)
        and "float32" in dtypes
        and (activation == "other" or "norm" not in name)
    ):
        return "casts and sums of weights and gradients"
    return activation if large else "other"
