"""What a block keeps for its backward pass, from formulas. Does not import torch.

Sizes are bytes for each token of a rank. Tensor parallelism shards the width of what matmuls and attention produce, and the
sequence of what lies between blocks; the inputs of its matmuls are gathered, and full. All experts are assumed to compute the same
number of tokens.
"""

import math
from dataclasses import dataclass

from titanlike.config.sections import DTYPE_BYTES
from titanlike.float8.selection import float8_layers
from titanlike.models.common.config import TransformerConfig
from titanlike.models.moe.config import MoeConfig
from titanlike.tools.planning.architecture import (
    has_norms_after_layers,
    has_post_norms,
    has_qk_norm,
    has_unit_offset_norm,
    latent_matrices,
    router_parameters,
)
from titanlike.tools.planning.experts import routed_activations, routed_products
from titanlike.tools.planning.job import Job

CROSS_MATRICES = ("cross_attention.wk", "cross_attention.wv")  # which read the tokens of the encoder


@dataclass(frozen=True)
class BlockActivations:
    """Bytes for each token of a micro-batch."""

    saved: float  # from the forward to the backward pass
    kept: float  # the same without activation checkpointing; the difference is recomputed
    input: float  # the input of the block, the least that can be saved
    forward: float  # allocated and freed within the forward pass
    backward: float  # within the backward pass, without what is recomputed
    hidden: float  # one tensor of the model dimension, sharded along the sequence
    early: float = 0.0  # as `backward`, before experts have gradients of other weights than w2


def block_activations(job: Job, index: int = -1) -> BlockActivations:
    """Returns the activations of a block under the recipe's compilation, activation checkpointing and layout."""
    model, layout, mode = job.recipe.model, job.layout, job.recipe.activation_checkpoint.mode
    element = DTYPE_BYTES[job.recipe.training.compute_dtype]
    tensor = layout.tensor
    matrices = model.block_matrices(index)
    hidden = element * model.dim
    queries, keys = (element * number * model.head_dim / tensor for number in (model.num_heads, model.num_kv_heads))
    out = element * model.num_heads * model.v_head_dim / tensor
    values = element * model.num_kv_heads * model.v_head_dim / tensor
    ffn = element * matrices.get("feed_forward.w2", matrices.get("feed_forward.shared.w2", (0, 0)))[1] / tensor
    is_gated = "feed_forward.w3" in matrices or "feed_forward.shared.w3" in matrices
    stream = hidden / tensor  # the residual stream
    attention = out + 4 * model.num_heads / tensor  # the output and the log-sum-exp of the scores
    gathered = 2 * hidden if tensor > 1 else 0.0  # the inputs of attention and feed-forward
    # Context parallelism gathers keys and values of the full sequence, and computes attention in two parts.
    sequence = (keys + values) * (layout.context - 1)
    is_padded = layout.context > 1 and model.v_head_dim < model.head_dim
    if (
        is_padded
    ):  # Its kernel takes heads of one size: the values up to the last query of a part are padded, as is its output.
        sequence += keys * (layout.context + 0.5) - values * layout.context
        attention += queries - out
    compiled = job.recipe.compile.mode != "none"
    norms = gathered or 2 * hidden
    # Both parts of the output, and their concatenation; the output before it is scaled.
    copies = out * ((layout.context > 1) + model.has_sinks)
    if compiled:
        # What the compiler's partitioner keeps, counted in compiled blocks: it recomputes the product of a gated feed-forward.
        intermediates = (3 if is_gated else 2) * ffn
        recomputed_norms, recomputed_products = _recomputed_by_casts(job, index)
        norms -= hidden * recomputed_norms
        intermediates -= ffn * recomputed_products
    else:
        intermediates = (4 if is_gated else 2) * ffn
    # QK-norm reads its inputs and their root mean squares in the backward pass.
    qk_norm = queries + keys + 4 * (model.num_heads + model.num_kv_heads) / tensor if has_qk_norm(model) else 0.0
    norm_input = stream
    if has_unit_offset_norm(model) and not compiled:  # in float32
        norm_input = 4 * model.dim / tensor
        qk_norm *= 4 / element
    # The inputs of attention and feed-forward, and what they compute.
    kept = 2 * norm_input + norms + queries + keys + values + attention + intermediates + sequence + copies + qk_norm
    if latent_matrices(model):
        # The latent vectors, with the channels of keys that all heads share, and the norms of them; and the keys without positions,
        # which are copied to keys of all channels, unless only those are gathered.
        kept += element * (2 * sum(matrices[name][1] for name in latent_matrices(model)) + model.rotary_dim)
        kept += 0.0 if is_padded else element * matrices["attention.wkv_b"][0] / tensor - values
    if has_post_norms(model):
        # Their inputs. From the first, the partitioner computes the sum after attention again.
        kept += (1 if compiled and mode in ("none", "memory_budget") else 2) * norm_input
    selective = stream + attention + _every_second_product(job, index)
    if job.has_cross_attention(index):
        # Its keys and values come from the tokens of the encoder.
        kept += norm_input + norms / 2 + queries + attention + (keys + values) * job.tokens / job.decoder_tokens
        selective += attention
        gathered *= 1.5
    recomputed = 0.0
    if layout.context > 1:
        # Keeps the collectives' results, and puts them in order again: both are there in the backward pass. Compiled code does that
        # after the backward pass of the feed-forward, which is the larger moment.
        selective += (keys + values) * layout.context
        recomputed = (keys + values) * layout.context if mode == "selective" and not compiled else 0.0
    if tensor > 1:  # compiled code keeps no sum of the residual stream that no norm reads
        selective += gathered + (stream if compiled and not _norm_reads_sums(model) else 2 * stream)
    forward = 4 * ffn if mode != "none" or job.forward_only else 4 * stream
    backward, early = 2 * ffn, 0.0
    if compiled:  # with a gate, the gradients of three products, or of the two inputs with what these are computed from
        backward = max(3 * ffn, 2 * hidden + ffn) if is_gated else ffn
    if compiled and has_post_norms(model):  # recomputes the products, which their gradients then overwrite
        backward = ffn
    if model.is_encoder_decoder:
        # Gradients of the biases, for each sequence by itself, and of queries, keys and values, after the feed-forward.
        biases = element * model.num_heads / tensor * job.tokens_of(index) / job.sequences
        backward = max(backward, biases + queries + keys + values - intermediates)
    if isinstance(model, MoeConfig) and model.has_experts(index):
        routed = routed_activations(job, model)
        kept += routed.kept
        selective += routed.selective
        if layout.expert > 1:
            # Attention, the second norm, and the router and experts are recomputed one by one, from what each reads: `gathered`
            # inputs count above. With these, compiled code does not keep what they are gathered from.
            selective += (3 if tensor == 1 else 1 if compiled else 2) * stream
        if tensor > 1 and model.num_shared_experts and not compiled:
            selective += stream  # the shared experts' own reduce-scatter
        forward = max(forward, routed.forward)
        backward = max(backward, routed.backward) if model.num_shared_experts else routed.backward
        early = routed.early
        if model.num_shared_experts:  # their output waits for the others'
            forward, early = forward + stream, early + stream
    budget = job.recipe.activation_checkpoint
    saved = {
        "none": kept,
        "selective": selective,
        "full": stream,
        "memory_budget": stream + budget.memory_budget * max(0.0, kept - stream),
    }[mode]
    return BlockActivations(saved, kept + recomputed, stream, forward, backward, stream, early)


def _recomputed_by_casts(job: Job, index: int) -> tuple[float, float]:
    """Returns how many outputs of norms and products of the feed-forward compiled code does not keep because of float8: the
    backward pass casts the inputs of weight gradients again, and computes them again if nothing else reads them."""
    section = job.recipe.float8
    converted = float8_layers(section, job.recipe.model, index)
    if not converted or section.scaling == "rowwise_with_gw_hp" or job.layout.tensor > 1:
        return 0.0, 0.0
    model = job.recipe.model
    readers: dict[str, list[bool]] = {}  # of each norm, whether they are in float8
    for name in model.block_matrices(index):
        if name not in (*model.rowwise_matrices, *latent_matrices(model)):
            layer = name.rpartition(".")[0]
            # The router and the experts read the input of the shared experts, too, and not in float8.
            readers.setdefault(layer, [False] if layer.endswith(".shared") else []).append(name in converted)
    # The cast of what other matrices read, too, is kept beside it.
    norms = sum(1.0 if all(each) else -0.5 if any(each) else 0.0 for each in readers.values())
    return norms, float("feed_forward.w2" in converted)


def weight_copies(job: Job, index: int) -> tuple[float, float]:
    """Returns the bytes of the weights of a block that are cast to the compute dtype where FSDP does not gather them, and of the
    copies that are kept for the backward pass. Compiled code casts a weight to float8 in each pass, and keeps no copy; in eager
    code, tensorwise matmuls keep none."""
    model, training, checkpointing = job.recipe.model, job.recipe.training, job.recipe.activation_checkpoint
    compute = DTYPE_BYTES[training.compute_dtype]
    if job.uses_fsdp() or compute == job.weight_bytes:
        return 0.0, 0.0
    matrices: dict[str, tuple[int, ...]] = dict(model.block_matrices(index, job.layout.tensor))
    if model.has_experts(index):
        matrices |= router_parameters(model) | model.expert_parameters()
    float8, compiled = job.recipe.float8, job.recipe.compile.mode != "none"
    others = {name: size for name, size in matrices.items() if name not in float8_layers(float8, model, index)}
    cast = compute * float(sum(map(math.prod, (others if compiled else matrices).values())))
    kept = compute * float(sum(map(math.prod, others.values()))) if float8.scaling == "tensorwise" else cast
    return cast, kept * {"none": 1.0, "memory_budget": checkpointing.memory_budget}.get(checkpointing.mode, 0.0)


def ordered_matrices(model: TransformerConfig, index: int, tensor: int) -> dict[str, tuple[int, int]]:
    """Returns the linear layers of a block in the order of the forward pass: of each module of the block, the rowwise matrix comes
    last."""
    matrices, rowwise = model.block_matrices(index, tensor), model.rowwise_matrices
    owners = list(dict.fromkeys(name.partition(".")[0] for name in matrices))
    names = sorted(matrices, key=lambda name: (owners.index(name.partition(".")[0]), name in rowwise))
    return {name: matrices[name] for name in names}


def _norm_reads_sums(model: TransformerConfig) -> bool:
    """Whether a norm follows what attention and feed-forward return, or the sum of it and their input."""
    return has_post_norms(model) or has_norms_after_layers(model)


def _every_second_product(job: Job, index: int) -> float:
    """Returns the bytes that selective checkpointing keeps of the results of matmuls, in the order of the forward pass."""
    recipe, model, tensor, lora = job.recipe, job.recipe.model, job.layout.tensor, job.lora
    element = DTYPE_BYTES[recipe.training.compute_dtype]
    # Compiled code keeps no result that no gradient depends on: sums of the residual stream, unless a norm reads them, and what
    # only a collective reads, whose result is kept.
    unread: set[str] = set()
    if recipe.compile.mode != "none":
        if not _norm_reads_sums(model):
            unread |= {"feed_forward.w2", "feed_forward.shared.w2"}
        if tensor > 1:
            unread |= set(model.rowwise_matrices)
        if job.layout.context > 1:
            unread |= {"attention.wv", "attention.wkv_b"}
    parts: dict[str, list[float]] = {}
    exchanged = isinstance(model, MoeConfig) and model.has_experts(index) and job.layout.expert > 1
    for name, (width, _) in ordered_matrices(model, index, tensor).items():
        size = element * (job.tokens / job.decoder_tokens if name in CROSS_MATRICES else 1.0)
        products = [size * width * (name not in unread)]
        if lora.selects(f"layers.0.{name}"):
            products = [*products, size * lora.rank, *products]  # the result, and the one that is added to it
        parts.setdefault(name.rpartition(".")[0] if exchanged else "", []).extend(products)
    if isinstance(model, MoeConfig) and model.has_experts(index):
        router, *experts = routed_products(job, model)
        if exchanged:  # the experts' results are received, and kept
            return sum(sum(each[::2]) for each in (*parts.values(), [router], experts[1:]))
        parts[""] += [router, *experts]
    return sum(sum(each[::2]) for each in parts.values())
