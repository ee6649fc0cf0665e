"""What the router and the experts of a block compute, keep and send, from formulas. Does not import torch.

Counted from `models/common/experts.py` and `parallelisms/expert.py`. Memory and traffic assume that all experts compute the same
number of tokens; time is of the rank whose experts have most.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from titanlike.config.sections import DTYPE_BYTES
from titanlike.models.common.config import TransformerConfig
from titanlike.models.moe.config import MoeConfig
from titanlike.tools.planning.collectives import FLOAT32, INT64, Totals
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.parameters import Stage
from titanlike.tools.planning.workload import Matmul

CAST_KERNELS = 3  # of a tensor to float8: its maximum, the scale, and the cast in both layouts


@dataclass(frozen=True)
class RoutedActivations:
    """Bytes for each token of a micro-batch, as in `activations.BlockActivations`."""

    kept: float  # without activation checkpointing
    selective: float  # with selective activation checkpointing, beside the results of matmuls
    forward: float
    early: float
    backward: float  # relative to what is kept, of which a part is freed


def routed_activations(job: Job, model: MoeConfig) -> RoutedActivations:
    """Returns the activations of a block's router and experts."""
    layout, number, mode = job.layout, model.experts_per_token, job.recipe.activation_checkpoint.mode
    element = DTYPE_BYTES[job.recipe.training.compute_dtype]
    exchanged = layout.expert > 1
    compiled = job.recipe.compile.mode != "none" and not exchanged
    rows = element * number * model.dim  # a copy of each token for each of its experts
    ffn = element * number * model.ffn_dim / layout.tensor
    # Scores in float32, indices and permutations in int64, and the weights of a token's experts.
    router = 4 * model.num_experts + number * (8 + 4 + element + 8 * (4 if exchanged else 2))
    router += 8 * number * model.expert_biases * (not exchanged)  # the expert of each row
    # The inputs of w1 and w3, their products, SiLU and the product with it, and the results, which the router's gradients read.
    # Compiled code computes SiLU again. A gate with bounds keeps no result of its function, but compiled code does.
    kept = 2 * rows + (4 if compiled == bool(model.swiglu_limit) else 3) * ffn + router
    # What all-to-alls return, and what the router passes on: indices, and the weights of a token's experts.
    selective = 2 * rows + number * (8 + element) if exchanged else 0.0
    held = 2 * rows if exchanged else 0.0  # by functions that wait for the experts: what is sent, and what is received
    computing = (2 * rows if exchanged else rows) if mode == "none" else max(rows + 3 * ffn, 2 * rows + ffn)
    # At first, all that is kept and the gradients of the results, or what the experts allocate while they are recomputed.
    early = rows * (2 if mode == "none" or not exchanged else 4 if mode == "selective" else 3)
    # At last, two input gradients and their sum instead of the results and of what w1, SiLU and w3 have returned.
    return RoutedActivations(kept, selective, held + computing, max(early, 2 * ffn), 2 * rows - 4 * ffn)


def routed_products(job: Job, model: MoeConfig) -> list[float]:
    """Returns the bytes for each token of the results of the router, in float32, and of w1, w3 and w2, in the order of the forward
    pass."""
    element = DTYPE_BYTES[job.recipe.training.compute_dtype] * model.experts_per_token
    ffn = element * model.ffn_dim / job.layout.tensor
    return [4.0 * model.num_experts, ffn, ffn, element * model.dim]


def largest_load(job: Job, variation: float, padded: bool) -> float:
    """Returns the rows of the rank that computes most, relative to the mean, if the tokens of experts vary by this standard
    deviation, relative to their mean. Without expert parallelism, each rank computes its own tokens, but for padding."""
    model = job.recipe.model
    if not isinstance(model, MoeConfig):
        return 1.0
    if padded:
        return 1.0 + variation * largest_of(model.num_experts)
    if job.layout.expert == 1:
        return 1.0
    return 1.0 + variation / math.sqrt(model.num_experts / job.layout.expert) * largest_of(job.layout.expert)


def largest_of(number: int) -> float:
    """Returns about the mean of the largest of some standard normal variables (Blom's approximation)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def routed_matmuls(job: Job, load: float = 1.0, index: int = -1) -> list[Matmul]:
    """Returns the matmuls of a router, of which each tensor-parallel rank computes all, and of its experts, in the order of the
    forward pass. Expert-parallel ranks have fewer experts, and each of these the tokens of more ranks.

    Args:
        load: of `largest_load`.
        index: of the block.
    """
    model, layout, tokens = job.recipe.model, job.layout, job.tokens
    if not isinstance(model, MoeConfig) or not model.has_experts(index):
        return []
    rows = tokens * model.experts_per_token * load
    number = min(model.num_experts / layout.expert, rows)
    hidden, float8 = model.ffn_dim // layout.tensor, float8_experts(job)
    gates = [Matmul(rows / number, hidden, model.dim, float8, count=number, grouped="m")] * 2
    return [
        Matmul(tokens, model.num_experts, model.dim),
        *gates,
        Matmul(rows / number, model.dim, hidden, float8, count=number, grouped="m"),
    ]


def float8_experts(job: Job) -> bool:
    """Whether experts multiply in float8."""
    return job.program.float8_experts and job.recipe.float8.scaling != "none"


def expert_launches(job: Job, casts: bool = True, index: int = -1) -> int:
    """Returns the kernels that the host launches for the experts of a rank in a pass, beyond one for each of their matmuls.

    Args:
        casts: Whether this pass casts two inputs, or the gradients of two outputs, if experts multiply in float8.
        index: of the block.
    """
    model = job.recipe.model
    if not isinstance(model, MoeConfig) or not model.has_experts(index):
        return 0
    number = model.num_experts // job.layout.expert if job.program.single_experts else 1
    return 3 * (number - 1) + 2 * CAST_KERNELS * number * (casts and float8_experts(job))


def bias_launches(job: Job, model: MoeConfig) -> tuple[int, int]:
    """Returns the kernels of the biases of a rank's experts and of their gate, beyond experts without biases, forward and
    backward. With expert parallelism, they are not compiled."""
    if not model.expert_biases:
        return 0, 0
    return (13, 31) if job.layout.expert > 1 or job.recipe.compile.mode == "none" else (0, 6)


def routing_bytes(job: Job, load: float = 1.0, index: int = -1) -> tuple[float, float]:
    """Returns the bytes of the router's scores, of the permutations of tokens, of the elementwise operations of the experts and of
    their casts, forward and backward. With expert parallelism, experts are not compiled, and permute twice as often if all-to-alls
    send a copy for each expert.

    Args:
        load: of `largest_load`.
        index: of the block.
    """
    model, layout, tokens = job.recipe.model, job.layout, job.tokens
    if not isinstance(model, MoeConfig) or not model.has_experts(index):
        return 0.0, 0.0
    element, exchanged = DTYPE_BYTES[job.recipe.training.compute_dtype], layout.expert > 1
    router_compiled = job.recipe.compile.mode != "none"
    compiled = router_compiled and (not exchanged or job.program.fused_experts)
    permutes_twice = exchanged and not job.program.ranks_per_token
    num_rows = tokens * model.experts_per_token * load
    rows, hidden = num_rows * model.dim, num_rows * model.ffn_dim / layout.tensor
    # A permutation 4; product with the router's weights and sum 2, or 6 in several kernels. Backward: of these 4 or 8; the sum of
    # the input gradients of two matmuls 6; the sum over the experts of a token 2.
    permutations = (16 if permutes_twice else 8) * rows
    forward = permutations + (2 if compiled else 6) * rows + 2 * tokens * model.dim + (6 if compiled else 10) * hidden
    backward = permutations + (4 if compiled else 8) * rows + 8 * rows + (10 if compiled else 18) * hidden
    backward += (6 + 2) * tokens * model.dim  # the router reads the same input as the experts
    if (
        model.expert_biases and not compiled
    ):  # a copy of the bias of each row, and each operation of the gate in a kernel
        forward, backward = forward + 8 * (2 * hidden + rows) + 22 * hidden, backward + 62 * hidden
    if float8_experts(job):  # as of other matrices: the inputs, and the gradients of the outputs
        forward += 5 * (rows + hidden) * job.program.cast_share
        backward += (3 * (rows + hidden) + 6 * (rows + 2 * hidden)) * job.program.cast_share
    scores = tokens * model.num_experts  # in float32
    router = (10 if router_compiled else 18 + 2 * model.experts_per_token) * scores
    if model.balance_loss:
        router += (4 if router_compiled or model.router_score == "softmax" else 16) * scores
    # Eight passes over keys and indices of 8 bytes, and the inverse of the permutation.
    sorts = (2 if permutes_twice else 1) * (256 + 24) * num_rows
    return forward * element / 2 + router + sorts, backward * element / 2 + 20.0 * scores


def exchanged_tokens(job: Job, recomputed: bool, needs_grad: bool, totals: Totals) -> None:
    """Adds the collectives of a block with expert parallelism: an all-to-all sends each token to the ranks of its experts, after
    their counts, and another one returns the results. The backward pass does the reverse."""
    model, layout, num = job.recipe.model, job.layout, job.num_microbatches
    if not isinstance(model, MoeConfig) or layout.expert == 1:
        return
    forward = num * (1 + recomputed + job.frozen_forwards)
    kept = num * (1 + job.frozen_forwards)
    totals.add("all-to-all", "expert", "expert counts", kept, model.num_experts * INT64)  # kept for the recomputation
    copies = job.program.ranks_per_token or model.experts_per_token
    size = round(job.tokens * copies * model.dim * DTYPE_BYTES[job.recipe.training.compute_dtype])
    totals.add("all-to-all", "expert", "routed tokens", 2 * (forward + num * needs_grad), size)


def has_balance_loss(model: TransformerConfig) -> bool:
    """Whether pipeline stages pass on, and the last one reads, what routers have counted."""
    return isinstance(model, MoeConfig) and model.balance_loss > 0


def counts_bytes(job: Job) -> int:
    """Returns the bytes of what routers count for the auxiliary loss in a micro-batch."""
    model = job.recipe.model
    return job.sequences * 2 * model.num_experts * FLOAT32 if isinstance(model, MoeConfig) else 0


def balancing(job: Job, stages: Mapping[int, Stage], axes: Sequence[str], totals: Totals) -> None:
    """Adds the sums of the counts. With context parallelism, the auxiliary loss reads those and the number of labels of the full
    sequence. The biases of a rank's routers are stepped by the sums over the ranks that hold them, on these axes."""
    model = job.recipe.model
    if not isinstance(model, MoeConfig):
        return
    if model.balance_loss and job.layout.context > 1 and len(job.split) - 1 in stages:
        size = job.sequences * (model.num_experts + 1) * FLOAT32
        totals.add("all-reduce", "context", "expert counts", job.num_microbatches, size)
    if model.balance_bias_rate and job.recipe.trains_all_weights:
        number = sum(model.has_experts(index) for stage in stages.values() for index in stage.blocks)
        size = number * model.num_experts * INT64
        for axis in axes:
            totals.add("all-reduce", axis, "expert counts", 1, size)


def ends_with_experts(model: TransformerConfig, index: int = -1) -> bool:
    """Whether the last matmul of a block is in routed experts, whose output the gradients of the router read."""
    return isinstance(model, MoeConfig) and model.has_experts(index) and not model.num_shared_experts
