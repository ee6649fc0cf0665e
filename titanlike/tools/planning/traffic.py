"""The collectives of a training step, from formulas. Does not import torch.

The formulas follow the code that issues the collectives: `parallelisms/fsdp.py`, `tensor.py`, `context.py`, `expert.py`,
`pipeline.py`, `losses/cross_entropy.py` and `float8/`. A test compares their calls and bytes with a step after the first.

With expert parallelism, the number of tokens that a rank receives depends on the routing. The formulas assume that all experts have
the same number of tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from titanlike.config.sections import DTYPE_BYTES
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import reference_of
from titanlike.tools.planning.architecture import latent_matrices
from titanlike.tools.planning.collectives import FLOAT32, FLOAT64, INT64, Collective, Totals
from titanlike.tools.planning.experts import balancing, counts_bytes, exchanged_tokens, has_balance_loss
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.muon import element_size, rounds
from titanlike.tools.planning.parameters import Parameter, Stage, Unit, fsdp_units, stage_of
from titanlike.tools.planning.schedules import Action, actions

ACTIVE_STAGES = 3  # of a rank, which torch's schedules with several stages per rank keep gathered


def traffic(job: Job, rank: int = 0) -> list[Collective]:
    """Returns the collectives of a pipeline rank in a step after the first. Where shards are uneven, it has the largest."""
    totals = Totals()
    stages = _passes(job, rank, totals)
    if job.second is not None:
        _passes(job.second, rank, totals)
    if job.layout.pipeline > 1:
        _pipeline(job, stages, totals)
    _scalars(job, stages, totals)
    _whole_matrices(job, list(stages), totals)
    collectives = totals.collectives()
    return _gathered_once(collectives) if job.program.gathers_once and job.layout.pipeline > 1 else collectives


def _passes(job: Job, rank: int, totals: Totals) -> dict[int, Stage]:
    """Adds the collectives of the forward and backward passes of a model, or of the forward passes alone. Returns its stages."""
    stages = {number: stage_of(job, number) for number in job.stages(rank)}
    _fsdp(job, rank, stages, totals)
    for number, stage in stages.items():
        if job.layout.tensor > 1:
            _ends(job, number, stage, totals)
            _replicated(job, stage, totals)
        if job.layout.context > 1 and job.recipe.data.masks_documents:
            gathered = job.tokens * job.layout.context * INT64
            # Of each mask, with a window and without, and of the documents of pairs.
            masks = len({job.recipe.model.is_local(index) for index in stage.blocks})
            number = masks * (1 + job.frozen_forwards) + (job.trains_on_pairs and not job.forward_only)
            totals.add("all-gather", "context", "document ids", number * job.num_microbatches, gathered)
        _weight_maxima(job, stage, totals)
        if job.recipe.float8.scaling == "tensorwise" and any(parameter.float8 for parameter in stage.last):
            _add_maxima(job, 2 - job.forward_only, totals)  # of the input and the gradient of the LM head
    for block in _blocks(job, stages):
        if job.layout.tensor > 1:
            _tensor(job, block, totals)
        if job.layout.context > 1:
            _context(job, block, totals)
        if block.has_experts:
            exchanged_tokens(job, block.recomputed, block.needs_grad or block.adapts_attention, totals)
        _activation_maxima(job, block, totals)
    return stages


def _gathered_once(collectives: Sequence[Collective]) -> list[Collective]:
    """Returns collectives that gather the weights as often as they reduce the gradients, which are as large."""
    others = [each for each in collectives if each.purpose != "weights"]
    gradients = [each for each in others if each.purpose == "gradients" and each.kind == "reduce-scatter"]
    return [*others, *(replace(each, kind="all-gather", purpose="weights") for each in gradients)]


def fsdp_axis(job: Job) -> str:
    """Returns the mesh axis over which FSDP shards: context-parallel ranks hold the same weights, and shard them, too."""
    return "shard" if job.layout.shard > 1 else "context"


def shards_of(job: Job, *, experts: bool) -> tuple[str, int]:
    """Returns the mesh axis over which FSDP shards parameters, and its size. With expert parallelism, experts have their own."""
    if experts and job.layout.expert > 1:
        return "expert_shard", job.num_expert_shards
    return fsdp_axis(job), job.num_shards


def _fsdp(job: Job, rank: int, stages: dict[int, Stage], totals: Totals) -> None:
    """FSDP gathers each unit for the forward pass and, if it has freed it, for the backward pass. It reduces gradients in each
    micro-batch or in the last one, over replicas in the last one."""
    layout, training = job.layout, job.recipe.training
    units = {number: fsdp_units(job, stage) for number, stage in stages.items()}
    gathers = num_gathers(job, rank, units)
    once = layout.pipeline > 1 or layout.gradient_sync == "last_microbatch"
    for unit, calls in (pair for n in stages for pair in zip(units[n], gathers[n], strict=True)):
        axis, num_shards = shards_of(job, experts=unit.experts)
        if num_shards > 1:
            sizes = {
                parameter.name: parameter.padded(num_shards)
                * (1 if parameter.float8 and job.recipe.float8.all_gather else DTYPE_BYTES[training.compute_dtype])
                for parameter in unit.parameters
            }
            # What has not been freed after the forward pass of the reference is read by the next one.
            once_more = job.num_microbatches * unit.reshards if job.frozen_forwards else 0
            totals.add("all-gather", axis, "weights", calls + once_more, sum(sizes.values()))
        trainable = [parameter for parameter in unit.parameters if parameter.trainable]
        size = DTYPE_BYTES[training.reduce_dtype] * sum(parameter.padded(num_shards) for parameter in trainable)
        if trainable and num_shards > 1:
            totals.add("reduce-scatter", axis, "gradients", 1 if once else job.num_microbatches, size)
        if trainable and layout.replicate > 1:
            totals.add("all-reduce", "replicate", "gradients", 1, size // num_shards)


@dataclass(frozen=True)
class BlockCollectives:
    """What the collectives of a block depend on."""

    layers: list["Layer"]  # attention and feed-forward, in the order of the forward pass
    recomputed: bool  # the forward pass runs again in the backward pass, with its collectives
    needs_grad: bool  # with LoRA, the blocks before the first one that has its matrices have no backward pass
    float8: frozenset[str]  # linear layers that multiply in float8
    adapted: frozenset[str]  # linear layers with LoRA's matrices
    reads_output: bool  # whether the backward pass reads the output of the last layer, which a norm or dropout follows
    tokens: int  # in a micro-batch of a rank

    @property
    def has_experts(self) -> bool:
        """Whether the block has a mixture of experts."""
        return any(layer.experts for layer in self.layers)

    @property
    def adapts_attention(self) -> bool:
        """Whether the input of the feed-forward layer has a gradient for LoRA's sake."""
        return any(name.startswith("attention") for name in self.adapted)


@dataclass(frozen=True)
class Layer:
    """The linear layers of a block that share one input, and the one that follows them."""

    colwise: frozenset[str]
    rowwise: frozenset[str]
    experts: bool = False  # a mixture of experts: the linear layers belong to its shared experts, if it has any
    gathers: bool = True  # its input, which is sharded along the sequence with tensor parallelism


def _blocks(job: Job, stages: dict[int, Stage]) -> Iterator[BlockCollectives]:
    """Yields the blocks of a pipeline rank."""
    model, checkpointing = job.recipe.model, job.recipe.activation_checkpoint
    rowwise_matrices = model.rowwise_matrices
    for number, stage in stages.items():
        needs_grad = (number > 0 or job.recipe.trains_all_weights) and not job.forward_only
        for index, parameters in stage.blocks.items():
            experts = model.has_experts(index)
            named = {parameter.name: parameter for parameter in parameters}
            layers = []
            for owner, names in groupby(model.block_matrices(index), lambda name: name.partition(".")[0]):
                linears = frozenset(names)
                rowwise = linears.intersection(rowwise_matrices)
                has_experts = experts and owner == "feed_forward"
                layers.append(
                    Layer(
                        linears - rowwise,
                        rowwise,
                        has_experts,
                        gathers=owner in ("attention", "cross_attention", "feed_forward"),
                    )
                )
            if experts and not any(layer.experts for layer in layers):
                layers.append(Layer(frozenset(), frozenset(), experts=True))
            adapted = frozenset(name.removesuffix(".lora_A") for name in named if name.endswith(".lora_A"))
            yield BlockCollectives(
                layers,
                checkpointing.mode == "full",
                needs_grad,
                frozenset(name.removesuffix(".weight") for name, parameter in named.items() if parameter.float8),
                adapted,
                job.reads_last_product or index >= model.num_layers,
                job.tokens_of(index),
            )
            needs_grad = needs_grad or bool(adapted)


def _tensor(job: Job, block: BlockCollectives, totals: Totals) -> None:
    """Each layer gathers its input, which is sharded along the sequence, and scatters its output; the backward pass does the
    reverse. A gather that only float8 matmuls read sends float8."""
    recipe, num = job.recipe, job.num_microbatches
    elements = block.tokens * recipe.model.dim
    element = DTYPE_BYTES[recipe.training.compute_dtype]
    float8 = block.float8 if recipe.float8.scaling == "tensorwise" else frozenset()
    needs_grad = block.needs_grad
    forward = 1 + block.recomputed + job.frozen_forwards
    for name, spec in recipe.model.block_parameters().items():
        if spec.style == "colwise_norm":  # a mean square of each token, and its gradient
            trains = needs_grad or bool(block.adapted & {name.replace("_norm.weight", "").replace(".", ".w")})
            totals.add("all-reduce", "tensor", "activations", num * (forward + trains), block.tokens * FLOAT32)
    layers = [layer for layer in block.layers if layer.gathers]
    for layer in layers:
        # The router and the experts read the input, too, and not in float8.
        gather = elements * (1 if layer.colwise <= float8 and not layer.experts else element)
        totals.add("all-gather", "tensor", "activations", forward * num, gather)
        # Recomputation ends with the last tensor that the backward pass reads: after the last layer, of dropout or a post-norm.
        is_last = layer is layers[-1] and not block.reads_output
        scatters = 1 + job.frozen_forwards if is_last else forward
        totals.add("reduce-scatter", "tensor", "activations", scatters * num, elements * element)
        both = layer.experts and bool(layer.rowwise)  # the shared experts compute last
        totals.add("reduce-scatter", "tensor", "activations", both * forward * num, elements * element)
        if needs_grad:
            totals.add("reduce-scatter", "tensor", "activations", num, elements * element)
        needs_grad = needs_grad or bool(block.adapted & (layer.colwise | layer.rowwise))
        if needs_grad:
            gather = elements * (1 if layer.rowwise and layer.rowwise <= float8 else element)
            totals.add("all-gather", "tensor", "activations", num, gather)
            totals.add("all-gather", "tensor", "activations", both * num, elements * element)


def _ends(job: Job, number: int, stage: Stage, totals: Totals) -> None:
    """The embedding scatters its output. The LM head gathers its input, and the softmax reduces three values of each token."""
    recipe, num = job.recipe, job.num_microbatches
    element = DTYPE_BYTES[recipe.training.compute_dtype]
    elements = job.num_predicted * job.decoder_tokens * recipe.model.dim
    if recipe.model.is_encoder_decoder:  # the embedding of the encoder, and its output
        encoder_size = job.tokens * recipe.model.dim * element
        totals.add("reduce-scatter", "tensor", "activations", 2 * num, encoder_size)
        totals.add("all-gather", "tensor", "activations", 2 * num, encoder_size)
    if number == 0:
        totals.add("reduce-scatter", "tensor", "activations", num * (1 + job.frozen_forwards), elements * element)
        trains = any(parameter.trainable for parameter in stage.first)
        totals.add("all-gather", "tensor", "activations", num * trains, elements * element)
    if number < len(job.split) - 1:
        return
    converted = any(parameter.float8 for parameter in stage.last)
    sends_float8 = converted and recipe.float8.scaling == "tensorwise"
    forwards = num * (1 + job.frozen_forwards)
    totals.add("all-gather", "tensor", "activations", forwards, elements * (1 if sends_float8 else element))
    totals.add("reduce-scatter", "tensor", "activations", num * (not job.forward_only), elements * element)
    # The backward pass of pairs computes the logits again.
    softmaxes = forwards + num * (job.trains_on_pairs and not job.forward_only)
    parts = [job.decoder_tokens, (job.num_predicted - 1) * job.tokens]  # the next token, and further ones
    chunk = 0 if converted else recipe.training.loss_chunk
    chunk = chunk or max(parts)
    for rows, calls in (pair for part in parts for pair in ((chunk, part // chunk), (part % chunk, 1))):
        softened = isinstance(recipe, DistillRecipe) and recipe.distillation.temperature != 1.0
        if (
            rows and job.distills
        ):  # two maxima, three sums or two if the temperature is 1, and two more, in the student's loss
            values: tuple[int, ...] = (2, 2 + softened, 2) if not job.forward_only else ()
            values = (1, 1, 1, job.top_k, 1, 1) if job.top_k else values
            for number in values:
                totals.add("all-reduce", "tensor", "loss", num * calls, rows * number * FLOAT32)
        elif rows:
            largest = FLOAT32 if recipe.model.logit_soft_cap else element  # soft-capped logits are in float32
            totals.add("all-reduce", "tensor", "loss", softmaxes * calls, rows * largest)
            totals.add("all-reduce", "tensor", "loss", softmaxes * calls * 2, rows * FLOAT32)  # two sums


def _replicated(job: Job, stage: Stage, totals: Totals) -> None:
    """Each tensor-parallel rank computes the gradients of replicated parameters from a part of the tokens."""
    element = DTYPE_BYTES[job.recipe.training.compute_dtype]
    for parameter in stage.parameters:
        if parameter.trainable and not parameter.sharded:
            totals.add("all-reduce", "tensor", "replicated gradients", job.num_microbatches, parameter.size * element)


def _context(job: Job, block: BlockCollectives, totals: Totals) -> None:
    """Attention gathers the keys and values of the full sequence. The backward pass scatters their gradients."""
    model = job.recipe.model
    elements = job.tokens * job.layout.context * (model.num_kv_heads // job.layout.tensor)
    forwards = 1 + block.recomputed + job.frozen_forwards
    for name, width in (("attention.wk", model.head_dim), ("attention.wv", model.v_head_dim)):
        size = elements * width * DTYPE_BYTES[job.recipe.training.compute_dtype]
        totals.add("all-gather", "context", "keys and values", job.num_microbatches * forwards, size)
        trains_latent = latent_matrices(model) and {"attention.wkv_a", "attention.wkv_b"} & block.adapted
        if name == "attention.wk" and clips(job):
            totals.add("all-gather", "context", "keys and values", job.num_microbatches * (1 + block.recomputed), size)
        if block.needs_grad or name in block.adapted or trains_latent:
            totals.add("reduce-scatter", "context", "keys and values", job.num_microbatches, size)


def _weight_maxima(job: Job, stage: Stage, totals: Totals) -> None:
    """Maxima of all sharded weights of a stage are reduced together, once per step."""
    float8, layout = job.recipe.float8, job.layout
    sharded = [parameter.sharded for parameter in stage.parameters if parameter.float8]
    number = len(sharded)
    if float8.scaling != "tensorwise" or not number or not (float8.all_gather or layout.tensor > 1):
        return
    # Without float8 all-gather, the forward pass starts with it, and several stages of a rank have been gathered before.
    gathered = not float8.all_gather and job.schedule.stages_per_rank > 1 and layout.pipeline > 1
    if job.num_shards > 1 and not gathered:
        # Apart, of the weights that tensor-parallel ranks shard and replicate.
        for count in (sharded.count(True), sharded.count(False)) if layout.tensor > 1 else (number,):
            totals.add("all-reduce", fsdp_axis(job), "float8 maxima", count > 0, count * FLOAT32)
    if layout.tensor > 1:
        totals.add("all-reduce", "tensor", "float8 maxima", 1, sum(sharded) * FLOAT32)


def _activation_maxima(job: Job, block: BlockCollectives, totals: Totals) -> None:
    """Maxima of the inputs and the gradients of float8 matmuls are reduced over the ranks that share a micro-batch."""
    if job.recipe.float8.scaling != "tensorwise":
        return
    inputs, latent = 0, frozenset(latent_matrices(job.recipe.model))
    for layer in block.layers:
        one_gather = job.layout.tensor > 1 and layer.gathers and not layer.experts
        shares_input = one_gather and layer.colwise <= block.float8  # cast once, before it is gathered
        others = layer.rowwise | latent & layer.colwise
        inputs += (1 if shares_input else len((layer.colwise - latent) & block.float8)) + len(others & block.float8)
    calls = inputs * (1 + block.recomputed + job.frozen_forwards) + len(block.float8) * (not job.forward_only)
    _add_maxima(job, calls, totals)


def _add_maxima(job: Job, calls: int, totals: Totals) -> None:
    for axis, size in (("tensor", job.layout.tensor), ("context", job.layout.context)):
        if size > 1:
            element = DTYPE_BYTES[job.recipe.training.compute_dtype]
            totals.add("all-reduce", axis, "float8 maxima", calls * job.num_microbatches, element)


def _pipeline(job: Job, stages: dict[int, Stage], totals: Totals) -> None:
    """Stages send activations forward and gradients backward, unless the neighbour is on the same rank. The ends of a pipeline
    exchange the gradients of tied weights."""
    model, training = job.recipe.model, job.recipe.training
    last = len(job.split) - 1
    size = job.tokens * model.dim * DTYPE_BYTES[training.compute_dtype] // job.layout.tensor
    for number in stages:
        neighbours = {number - 1, number + 1} & set(range(last + 1)) - stages.keys()
        calls = job.num_microbatches * len(neighbours)
        for kind in ("send", "receive"):
            totals.add(kind, "pipeline", "activations", calls, size)
            totals.add(kind, "pipeline", "expert counts", calls * has_balance_loss(model), counts_bytes(job))
    if model.tied_head and job.recipe.trains_all_weights and len({0, last} & stages.keys()) == 1:
        rows = -(-model.vocab_size // job.layout.tensor // job.num_shards)
        size = rows * model.dim * DTYPE_BYTES[training.master_dtype]
        totals.add("send", "pipeline", "tied gradients", 1, size)
        totals.add("receive", "pipeline", "tied gradients", 1, size)


def clips(job: Job) -> bool:
    """Whether QK-clip reads the largest attention logits."""
    return bool(getattr(job.recipe.optimizer, "muon_qk_clip", 0.0)) and not job.forward_only


def _scalars(job: Job, stages: dict[int, Stage], totals: Totals) -> None:
    """The number of tokens and the loss are summed over the batch, requests of a shutdown over all ranks, and the squares of
    gradients over the ranks that shard them, apart for each set of these ranks, and over stages."""
    layout = job.layout
    batch = [axis for axis, size in (("replicate", layout.replicate), (fsdp_axis(job), job.num_shards)) if size > 1]
    # The loss or, of pairs, the loss with seven metrics, in float64.
    loss = 3 * FLOAT32 if job.distills else FLOAT32  # with the KL divergence and the cross-entropy
    if job.trains_on_pairs:
        loss = (8 if reference_of(job.recipe) != "none" else 7) * FLOAT64
        if (
            layout.context > 1
        ):  # log-probabilities and numbers of tokens, of as many documents as a sequence has tokens at most
            length = job.recipe.training.seq_len
            size = 2 * job.sequences * (length + length % 2) * FLOAT64
            forwards = 1 + (reference_of(job.recipe) in ("adapter_off", "model"))
            totals.add("all-reduce", "context", "loss", job.num_microbatches * forwards, size)
    for axis in batch:
        totals.add("all-reduce", axis, "scalars", 1, INT64)
        totals.add("all-reduce", axis, "scalars", 1, loss)
    number = sum(len(stage.blocks) for stage in stages.values())
    for axis in [*batch, *["tensor"] * (layout.tensor > 1)] if clips(job) and number else []:
        totals.add("all-reduce", axis, "attention logits", 1, number * job.recipe.model.num_heads * FLOAT32)
    for axis in [*["pipeline"] * (layout.pipeline > 1), *batch, *["tensor"] * (layout.tensor > 1)][:1]:
        totals.add(
            "all-reduce", axis, "scalars", 1, FLOAT32
        )  # requests, over all ranks: attributed to the outermost axis
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters if parameter.trainable]
    for axes in sorted({_axes(job, parameter) for parameter in parameters}):
        for axis in axes:
            totals.add("all-reduce", axis, "scalars", 1, FLOAT32)
    if layout.pipeline > 1:
        totals.add("all-reduce", "pipeline", "scalars", 2, FLOAT32)
    balancing(job, stages, [*batch, *["tensor"] * (layout.tensor > 1)], totals)


def _axes(job: Job, parameter: Parameter) -> tuple[str, ...]:
    """Returns the mesh axes over which a parameter is sharded."""
    layout = job.layout
    axis, num_shards = shards_of(job, experts=parameter.expert)
    sizes = {axis: num_shards, "expert": layout.expert if parameter.expert else 1}
    sizes["tensor"] = layout.tensor if parameter.sharded else 1
    return tuple(axis for axis, size in sizes.items() if size > 1)


def _whole_matrices(job: Job, stages: list[int], totals: Totals) -> None:
    """In each round, ranks send their shards of a matrix to the rank that owns it, and get back shards of the result. Replicas
    gather each other's results."""
    size = job.num_shards * job.layout.tensor
    for matrices in rounds(job, stages):
        shards = [matrix.shard(job) for matrix in matrices]
        if size > 1:  # the first rank owns the first matrix
            exchanged = max(sum(shards[:size]), matrices[0].received(job)) * element_size(job)
            axis = fsdp_axis(job) if job.num_shards > 1 else "tensor"
            totals.add("all-to-all", axis, "whole matrices", 2, exchanged)
        if job.layout.replicate > 1:
            replica_sizes = [sum(shards[start : start + size]) for start in range(0, len(shards), size)]
            gathered = max(replica_sizes) * job.layout.replicate * element_size(job)
            totals.add("all-gather", "replicate", "whole matrices", 1, gathered)


def num_gathers(job: Job, rank: int, stages: Mapping[int, Sequence[Unit]]) -> dict[int, list[int]]:
    """Returns how often a pipeline rank gathers each FSDP unit of its stages."""
    resharded = any(unit.reshards for units in stages.values() for unit in units)
    if job.forward_only:
        return {stage: [job.num_microbatches * unit.reshards for unit in units] for stage, units in stages.items()}
    if job.layout.pipeline == 1:
        return {
            stage: [job.num_microbatches * (1 + (unit.reshards and unit.in_backward)) for unit in units]
            for stage, units in stages.items()
        }
    if not resharded and len(stages) <= ACTIVE_STAGES:  # kept for all micro-batches
        return {stage: [1] * len(units) for stage, units in stages.items()}
    counts = {stage: [0] * len(units) for stage, units in stages.items()}
    gathered = {stage: [False] * len(units) for stage, units in stages.items()}
    active: set[int] = set()
    order = actions(job)[rank]
    for action, next_stages in zip(order, _next_stages(order), strict=True):
        fetched: set[int] = set()
        if job.schedule.stages_per_rank > 1:  # the schedule gathers and frees whole stages
            fetched = next_stages - active
            for stage in active - next_stages:
                gathered[stage] = [False] * len(stages[stage])
            active = next_stages
        reads_weights = {action.stage} if action.kind != "backward_weight" else set()
        for stage in fetched | reads_weights:
            backward = stage not in fetched and action.kind != "forward"
            for index, unit in enumerate(stages[stage]):
                if not gathered[stage][index] and (unit.in_backward or not backward):
                    gathered[stage][index] = True
                    counts[stage][index] += 1
        if action.kind == "forward":
            gathered[action.stage] = [not unit.reshards for unit in stages[action.stage]]
    return counts


def _next_stages(order: Sequence[Action]) -> Iterator[set[int]]:
    """Yields the stages that a rank computes next, from each action on: the first few different ones."""
    recent: list[int] = []
    found = []
    for action in reversed(order):
        recent = [action.stage, *(stage for stage in recent if stage != action.stage)][:ACTIVE_STAGES]
        found.append(set(recent))
    yield from reversed(found)
