"""Memory of a GPU over a training step, by category, from formulas. Does not import torch."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from titanlike.config.layout import blocks_of
from titanlike.config.sections import DTYPE_BYTES
from titanlike.models.common.config import TransformerConfig
from titanlike.tools.planning.activations import BlockActivations, block_activations, weight_copies
from titanlike.tools.planning.architecture import router_parameters
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.muon import matrices as matrices_of_muon

# Reserved over allocated memory of CUDA's caching allocator. Weights that FSDP gathers, and what is recomputed beside them, are
# freed in another order than they are allocated in, which leaves gaps.
FRAGMENTATION, LOW_FRAGMENTATION = 1.055, 1.02
WORKSPACES = 2 * 32 * 2**20  # of cuBLAS on a Hopper GPU, in the threads of the forward and of the backward pass
STATE_BYTES = {"bfloat16": 4.0, "8bit": 2.0 + 2 * 4 / 64}  # of Adam's moments; quantized blocks of 64 share a scale
RESIDENT_BLOCKS = 2  # whose activations are on the GPU with offload: that which computes, and that which is copied
LOGIT_BYTES = {"eager": 4, "compiled": 0}  # for each logit, beside those in the compute dtype
TOP_K_LOGIT_BYTES = {"eager": 26, "compiled": 13}  # where it reads the likeliest tokens of a teacher
# Where it reads the logits of a teacher, too. Compiled: the gradient, before it replaces the logits.
TEACHER_LOGIT_BYTES = {"eager": 17, "compiled": 2}


@dataclass(frozen=True)
class Usage:
    """Bytes in use at one moment, by category."""

    parameters: int = 0  # shards of the master weights
    gradients: int = 0  # shards, and what accumulates over micro-batches before it is reduced
    optimizer: int = 0
    gathered: int = 0  # weights that FSDP has all-gathered, and buffers of its collectives
    activations: int = 0  # saved for the backward pass
    loss: int = 0  # logits and the buffers of the loss
    temporary: int = 0  # what operators allocate and free, and gradients of blocks or stages before they are reduced
    workspaces: int = 0  # of cuBLAS

    @property
    def total(self) -> int:
        """Sum over all categories."""
        held = self.parameters + self.gradients + self.optimizer + self.gathered + self.workspaces
        return held + self.activations + self.loss + self.temporary


@dataclass(frozen=True)
class Moment:
    """The largest usage during one phase of a step, such as the backward pass of a block."""

    label: str
    usage: Usage


@dataclass(frozen=True)
class Memory:
    """Memory of the ranks that hold one pipeline rank's stages, over one step after the first."""

    moments: tuple[Moment, ...]
    fragmentation: float  # reserved over allocated bytes
    scattered: float = 0.0  # bytes that are reserved beside

    @property
    def peak(self) -> Moment:
        """The moment with the largest usage."""
        return max(self.moments, key=lambda moment: moment.usage.total)

    @property
    def allocated(self) -> int:
        """Bytes that `torch.cuda.max_memory_allocated` reports."""
        return self.peak.usage.total

    @property
    def reserved(self) -> int:
        """Bytes that `torch.cuda.max_memory_reserved` reports: with the fragmentation of the caching allocator.

        Gradients that are allocated after the peak lie between activations that are freed later, and keep their space from being
        used as a whole. Published runs of one model on 8 and on 128 GPUs differ by 16 bytes for each parameter, not by 12.
        Gradients that replace what has accumulated before the reduction find its space.
        """
        gradients = max(moment.usage.gradients for moment in self.moments) - self.peak.usage.gradients
        return round((self.allocated + gradients) * self.fragmentation + self.scattered)


def memory(job: Job, rank: int = 0, *, every_block: bool = True) -> Memory:
    """Returns the memory of a pipeline rank. Without `every_block`, the moments without a pipeline are in the first and last
    two blocks, between which usage is linear: the peak is the same, and is found as fast for any number of blocks."""
    sizes = _Sizes.of(job, rank)
    if job.layout.pipeline > 1:
        return Memory(tuple(_pipeline_moments(job, rank, sizes)), fragmentation(job), scattered(job))
    blocks = range(job.split[0])
    ends = blocks if every_block else sorted({*blocks[:2], *blocks[-2:]})
    return Memory(tuple(_moments(job, sizes, ends)), fragmentation(job), scattered(job))


def with_program_loss(job: Job, planned: Memory) -> Memory:
    """Returns the memory with what the loss of the job's program needs beyond the one here."""
    # A float32 copy of the logits is counted in eager code.
    more = job.program.logit_bytes - (4 if job.recipe.compile.mode == "none" else 0)
    size = max(0, round(more * job.tokens * job.recipe.model.vocab_size / job.layout.tensor))
    moments = tuple(
        replace(moment, usage=replace(moment.usage, loss=moment.usage.loss + size)) if moment.usage.loss else moment
        for moment in planned.moments
    )
    return replace(planned, moments=moments)


def scattered(job: Job) -> float:
    """Returns the bytes that offloaded activations leave free in pieces, into which the logits do not fit: of two blocks.
    With full checkpointing, a block has one piece."""
    checkpointing = job.recipe.activation_checkpoint
    if not checkpointing.offload or checkpointing.mode == "full":
        return 0.0
    return 2.0 * block_activations(job).kept * job.tokens


def states(job: Job, rank: int) -> Usage:
    """Returns the parameters, gradients and states of the optimizer of a pipeline rank."""
    return _Sizes.of(job, rank).states


def fragmentation(job: Job) -> float:
    """Returns reserved over allocated bytes of a job."""
    recomputes = job.recipe.activation_checkpoint.mode != "none"
    return FRAGMENTATION if recomputes and job.uses_fsdp() and not scattered(job) else LOW_FRAGMENTATION


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one rank."""

    num_parameters: float  # of its stages
    block: float  # the weights of a block in the compute dtype, as FSDP gathers them
    experts: float  # of these, in the experts
    full_block: float  # the same as `block` without float8 all-gather
    whole_block: float  # the same with the experts of all expert-parallel ranks
    head: float  # of the norm and the LM head, 0 if the rank has none
    embedding: float
    reduced: float  # bytes of a gradient in the dtype of the reduction, per byte of a weight in the compute dtype
    states: Usage  # parameters, gradients and optimizer state of all stages of the rank
    trained: float  # fraction of the weights that have gradients
    activations: BlockActivations
    tokens: int
    loss: float  # buffers of the loss
    loss_kept: float  # of these, what the backward pass reads

    @classmethod
    def of(cls, job: Job, rank: int) -> "_Sizes":
        """Returns the sizes of a pipeline rank."""
        recipe, layout, model = job.recipe, job.layout, job.recipe.model
        training = recipe.training
        stages = job.stages(rank)
        compute, master = DTYPE_BYTES[training.compute_dtype], DTYPE_BYTES[training.master_dtype]
        blocks = [index for stage in stages for index in blocks_of(stage, job.split)]
        matrices, experts = _block_size(model, layout.tensor, min(max(blocks), model.num_layers - 1))
        kinds = Counter(map(model.kind_of_block, blocks))
        block_parameters = sum(number * sum(_block_size(model, layout.tensor, kind)) for kind, number in kinds.items())
        vocabulary = model.vocab_size * model.dim / layout.tensor
        has_embedding, has_head = 0 in stages, len(job.split) - 1 in stages
        ends = (has_embedding + (has_head and not (model.tied_head and has_embedding))) * vocabulary
        num_parameters = block_parameters + ends
        trained = 1.0
        if job.lora.rank:
            selected = [
                shape for name, shape in model.matrices().items() if job.lora.selects(name) and "layers" in name
            ]
            trained = job.lora.rank * sum(map(sum, selected)) / model.num_parameters()
        shard = master / job.num_shards
        weights = shard if not job.lora.rank else job.weight_bytes / job.num_shards + shard * trained
        state = STATE_BYTES.get(recipe.optimizer.state_dtype, 2.0 * master) / master
        # Muon has one moment, in the dtype of the weights.
        muon = matrices_of_muon(job, stages)
        orthogonalized = sum(matrix.received(job) for group in muon.values() for matrix in group) / layout.tensor
        second = cls.of(job.second, rank) if job.second else None
        frozen = second.num_parameters * DTYPE_BYTES[job.frozen_dtype] / job.num_shards if second else 0.0
        states = Usage(workspaces=WORKSPACES)
        if not layout.cpu_offload:  # otherwise the host has them
            states = Usage(
                parameters=round(num_parameters * weights + frozen),
                gradients=round(num_parameters * shard * trained),
                optimizer=round((num_parameters * state * trained - orthogonalized * (state - 1.0)) * shard),
                workspaces=WORKSPACES,
            )
        element = 1.0 if recipe.float8.all_gather else compute
        tokens = job.decoder_tokens
        chunk = min(training.loss_chunk or tokens, tokens)
        several = chunk < tokens or job.num_predicted > 1
        hidden = job.num_predicted * tokens * model.dim * compute
        logits = loss_logits(job)
        weight_gradient = vocabulary * (4 if several else compute if job.uses_fsdp() else master)
        weight_gradient *= job.lora.rank == 0  # a frozen head has none
        if job.adds_head_gradient():
            weight_gradient = 0.0
        cast = 0.0 if job.uses_fsdp() or job.weight_bytes == compute else vocabulary * compute
        kept = hidden + weight_gradient
        gathered = hidden if layout.tensor > 1 else 0.0
        loss, loss_kept = kept + logits + gathered + cast, kept
        if job.trains_on_pairs:  # the gradients are computed in the backward pass, from what the forward pass has read
            loss, loss_kept = (
                logits + gathered + cast,
                kept + logits + gathered + cast - min(logits, head_gradient(job)),
            )
        if job.distills:
            loss_kept = kept
            loss = kept + logits + gathered + cast
        return cls(
            num_parameters=num_parameters,
            block=matrices * element + experts / layout.expert * compute,
            experts=experts / layout.expert * compute,
            full_block=(matrices + experts / layout.expert) * compute,
            whole_block=(matrices + experts) * compute,
            head=vocabulary * compute * has_head,
            embedding=vocabulary * compute * has_embedding,
            reduced=DTYPE_BYTES[training.reduce_dtype] / compute,
            states=states,
            trained=trained,
            activations=block_activations(job),
            tokens=job.tokens,
            loss=loss * has_head,
            loss_kept=loss_kept * has_head,
        )


def _block_size(model: TransformerConfig, tensor: int, index: int) -> tuple[float, float]:
    """Returns the sizes of the matrices of a block on a tensor-parallel rank: of those without experts, and of the experts."""
    matrices = float(sum(map(math.prod, model.block_matrices(index, tensor).values())))
    if not model.has_experts(index):
        return matrices, 0.0
    matrices += sum(map(math.prod, router_parameters(model).values()))
    return matrices, sum(map(math.prod, model.expert_parameters().values())) / tensor


def _moments(job: Job, sizes: _Sizes, blocks: Sequence[int]) -> list[Moment]:
    """Returns the moments of the last micro-batch of a step without a pipeline, in the passes of these blocks."""
    layout, fsdp, act, n = job.layout, job.uses_fsdp(), sizes.activations, job.decoder_tokens
    num_blocks = job.split[0]
    block = sizes.block if fsdp else 0.0
    head, embedding = (sizes.head, sizes.embedding) if fsdp else (0.0, 0.0)
    compute = DTYPE_BYTES[job.recipe.training.compute_dtype]
    full_block = sizes.full_block
    reduction = full_block * sizes.reduced if fsdp else 0.0
    never = layout.reshard_after_forward == "never"
    tied = job.recipe.model.tied_head
    # FSDP's root keeps an embedding that is used twice gathered until the end of the backward pass.
    root = head if tied else embedding if job.recipe.model.is_encoder_decoder else 0.0
    # What is kept until the last micro-batch: gradients that are not reduced at all, or not over the replicas.
    unreduced = 0.0
    if job.num_microbatches > 1 and fsdp:
        total = num_blocks * full_block + head + embedding
        if layout.gradient_sync == "last_microbatch":
            unreduced = total * sizes.reduced * sizes.trained
        elif layout.replicate > 1:
            total = num_blocks * sizes.whole_block + head + embedding
            unreduced = total * sizes.reduced * sizes.trained / job.num_shards
    first_gradients = 1.0 if job.num_microbatches > 1 and not unreduced else 0.0
    # Without FSDP, each linear layer casts its weight, and keeps the copy for the backward pass unless it is recomputed.
    casts, kept_casts = weight_copies(job, min(max(blocks), job.recipe.model.num_layers - 1))
    kind = job.recipe.model.kind_of_block
    passes = {
        first: (block_activations(job, first), job.tokens_of(first)) for first, _ in job.recipe.model.kinds_of_blocks()
    }
    # Without recomputation, they share one in all micro-batches of a step.
    compiled = job.recipe.compile.mode != "none"
    copies = num_blocks * kept_casts if compiled and kept_casts == casts and not sizes.experts else 0.0
    kept_casts = 0.0 if copies else kept_casts
    stacks = [found.saved * tokens + kept_casts for found, tokens in (passes[kind(i)] for i in range(num_blocks))]
    shared = _read_by_all_blocks(job)
    # The last block's output and the norm of it, or also what transforms it for the head of an encoder.
    final = (2 if job.recipe.model.causal else 5) * act.hidden * n
    # Of each further token: its embedding, what the projection reads, the output, and the norm of that. Fitted to simulated steps.
    final += (0.5 if job.recipe.activation_checkpoint.mode == "full" else 4) * (job.num_predicted - 1) * act.hidden * n

    def moment(
        label: str, saved: float, done: float, gathered: float, loss: float = 0.0, temporary: float = 0.0
    ) -> Moment:
        """`saved` blocks have saved activations, and the gradients of `done` blocks have been reduced."""
        share = max(first_gradients, done / (num_blocks + (sizes.head + sizes.embedding) / max(sizes.whole_block, 1)))
        share = min(1.0, share)
        gradients = round(sizes.states.gradients * share + unreduced * (1.0 - share))
        if job.recipe.activation_checkpoint.offload:
            saved = min(saved, 1 if loss else RESIDENT_BLOCKS)  # the last block is not offloaded
        stack = sum(stacks[: round(saved)]) + shared * (saved > 0)
        usage = replace(
            sizes.states,
            gradients=gradients,
            gathered=round(gathered + root + (copies if label != "optimizer" else 0.0)),
            activations=round(stack + (final if loss else 0)),
            loss=round(loss),
            temporary=round(temporary),
        )
        return Moment(label, usage)

    # Experts of expert-parallel ranks are gathered by themselves, while their block computes.
    ahead = block - sizes.experts if layout.expert > 1 else block
    gathering = 2 * block - (sizes.experts if layout.expert > 1 and job.num_expert_shards == 1 else 0.0)
    kept_gathered = (num_blocks * block + embedding) if never else 0.0
    moments = []
    teacher_head = teacher_states = 0.0  # from its forward pass until the loss
    if job.second:
        second = _Sizes.of(job.second, 0)
        gathered = max(2 * second.block + second.head, 3 * second.block) if fsdp else 0.0
        temporary = (second.activations.forward + 3 * second.activations.hidden) * n
        moments.append(moment(job.second_name, 0, 0, gathered - root, temporary=temporary))
        if job.distills:
            teacher_head = second.head * fsdp
            teacher_states = job.second.recipe.model.dim * compute * n
    for i in blocks:
        act, n = passes[kind(i)]
        so_far = (i * block + embedding) if never else 0.0
        following = block if i < num_blocks - 1 else head
        if layout.expert > 1 and i < num_blocks - 1:
            following = 0.0
        moments.append(
            moment(
                f"forward, block {i}",
                i + 1,
                0,
                so_far + gathering + following + teacher_head,
                temporary=act.forward * n + teacher_states,
            )
        )
    # The LM head is gathered by itself, unless it is tied: then the last block's weights and the buffer of its gather remain.
    at_loss = 2 * block if tied else 2 * head
    # It is kept after the forward pass of the reference, and gathered with the norm before blocks of multi-token prediction.
    if (job.frozen_forwards or job.num_predicted > 1) and not tied:
        at_loss = head + block
    at_loss += teacher_head
    moments.append(moment("loss", num_blocks, 0, kept_gathered + at_loss, loss=sizes.loss + teacher_states))
    head_gradients = head_gradient(job)
    moments.append(
        moment(
            "backward, loss",
            num_blocks,
            0,
            kept_gathered + head * (not tied) + block,
            loss=sizes.loss_kept,
            temporary=head_gradients,
        )
    )
    head_blocks = sizes.head / max(sizes.whole_block, 1)
    # The gradient of a tied head is not reduced before the embedding's is added to it.
    unreduced_head = sizes.head if fsdp and tied else 0.0
    weight_gradients = full_block if fsdp else full_block / compute * DTYPE_BYTES[job.recipe.training.master_dtype]
    for i in reversed(blocks):
        act, n = passes[kind(i)]
        recomputed = (act.kept - act.saved) * n + (0.0 if copies else casts - kept_casts)
        temporary = act.backward * n + recomputed + (weight_gradients if fsdp else 0)
        early = act.early * n + recomputed + sizes.experts / 3
        is_last = i == num_blocks - 1
        previous = reduction
        if is_last:
            previous = 0.0 if tied else head_gradients * sizes.reduced
        weights = kept_gathered + (0 if never else block + (ahead if i else 0))
        done = num_blocks - 1 - i + head_blocks + (0 if fsdp else 1)
        peak = temporary
        if act.early and (is_last or early > temporary + previous):
            # What another block has reduced is freed before the experts have gradients, but not what the LM head has.
            previous, peak = (previous, max(temporary, early)) if is_last else (0.0, early)
        moments.append(moment(f"backward, block {i}", i + 1, done, weights + previous, temporary=peak + unreduced_head))
    full = num_blocks + head_blocks + sizes.embedding / max(sizes.whole_block, 1)
    moments.append(moment("optimizer", 0, full, 0))
    return moments


def _read_by_all_blocks(job: Job) -> float:
    """Returns the bytes of what an encoder-decoder computes once for its blocks: the biases of positions of both stacks, and the
    output of the encoder, its norm, and what tensor-parallel ranks gather of it."""
    model, tensor, sequences = job.recipe.model, job.layout.tensor, job.sequences
    if not model.is_encoder_decoder:
        return 0.0
    element = DTYPE_BYTES[job.recipe.training.compute_dtype]
    lengths = (job.tokens / sequences) ** 2 + (job.decoder_tokens / sequences) ** 2
    biases = model.num_heads / tensor * lengths * (sequences if job.recipe.data.prompt_field else 1)
    output = job.tokens * model.dim * (2 / tensor + (tensor > 1))
    return element * (biases + output)


def _pipeline_moments(job: Job, rank: int, sizes: _Sizes) -> list[Moment]:
    """Returns the moments of a pipeline rank's actions: activations of several micro-batches are in flight."""
    from titanlike.tools.planning.schedules import actions

    act, n, model = sizes.activations, sizes.tokens, job.recipe.model
    stages = job.stages(rank)
    blocks = {stage: job.split[stage] for stage in stages}
    saved_by = {first: block_activations(job, first).saved * n for first, _ in model.kinds_of_blocks()}
    saved_of = {
        stage: [saved_by[model.kind_of_block(index)] for index in blocks_of(stage, job.split)] for stage in stages
    }
    last = len(job.split) - 1
    full_block = sizes.full_block
    # With several stages per rank, torch's schedules keep the weights of three of them.
    weights = sum(sorted(blocks.values())[-3:]) * sizes.block + sizes.head + sizes.embedding
    full_weights = sum(blocks.values()) * full_block + sizes.head + sizes.embedding
    gathered = weights if job.uses_fsdp() else 0.0
    # Schedules reduce gradients after the last micro-batch.
    unreduced = full_weights * sizes.trained * (sizes.reduced if job.uses_fsdp() else 0.0)
    hidden = act.hidden * n
    buffers = job.num_microbatches * receive_buffers(job, rank)
    stack = {stage: sum(saved_of[stage]) + hidden for stage in stages}
    if last in stages:
        stack[last] += sizes.loss_kept + hidden
    saved = 0.0
    if job.recipe.activation_checkpoint.offload:  # of all blocks but the last one of the rank
        saved = RESIDENT_BLOCKS * act.saved * n
        for stage in stages:
            stack[stage] -= sum(saved_of[stage][: -1 if stage == max(stages) else None])
    moments = []
    usages: dict[tuple[str, int, float], Usage] = {}  # a full pipeline repeats the same few
    for action in actions(job)[rank]:
        forward = action.kind == "forward"
        saved += stack[action.stage] if forward else 0.0
        key = action.kind, action.stage, saved
        if key not in usages:
            loss = sizes.loss - sizes.loss_kept if action.stage == last and forward else 0.0
            temporary = act.backward * n + (act.kept - act.saved) * n + full_block
            if act.early:
                temporary = max(temporary, (act.early + act.kept - act.saved) * n + sizes.experts / 3)
            if forward:
                temporary = 0.0 if loss > act.forward * n else act.forward * n
            usages[key] = replace(
                sizes.states,
                gradients=0 if job.uses_fsdp() else sizes.states.gradients,
                gathered=round(gathered + buffers),
                activations=round(saved),
                loss=round(0.0 if temporary else loss),
                temporary=round(temporary + unreduced),
            )
        label = f"{action.kind}, stage {action.stage}, micro-batch {action.microbatch}"
        moments.append(Moment(label, usages[key]))
        if action.kind in ("backward", "backward_weight"):
            saved -= stack[action.stage]
    optimizer = replace(sizes.states, gathered=round(gathered))
    return [*moments, Moment("optimizer", optimizer)]


def head_gradient(job: Job) -> float:
    """Returns the bytes of the LM head's gradient in the compute dtype, which FSDP reduces. Where the backward pass computes the
    logits, it is there after them; a frozen head has none."""
    model, element = job.recipe.model, DTYPE_BYTES[job.recipe.training.compute_dtype]
    exists = job.uses_fsdp() and not job.lora.rank
    return model.vocab_size * model.dim / job.layout.tensor * element if exists else 0.0


def loss_logits(job: Job) -> int:
    """Returns the bytes of the logits of one chunk of the loss, and of what it computes from them."""
    training = job.recipe.training
    chunk = min(training.loss_chunk or job.decoder_tokens, job.decoder_tokens)
    mode = "eager" if job.recipe.compile.mode == "none" else "compiled"
    beside, models = (TEACHER_LOGIT_BYTES[mode], 2) if job.distills else (LOGIT_BYTES[mode], 1)
    if job.top_k:
        beside, models = TOP_K_LOGIT_BYTES[mode], 1
    logits = chunk * job.recipe.model.vocab_size // job.layout.tensor
    return logits * (models * DTYPE_BYTES[training.compute_dtype] + beside)


def receive_buffers(job: Job, rank: int) -> int:
    """Returns the bytes in which the stages of a pipeline rank receive activations and gradients of one micro-batch."""
    stages, last = job.stages(rank), len(job.split) - 1
    neighbours = [n for stage in stages for n in (stage - 1, stage + 1) if 0 <= n <= last and n not in stages]
    element = DTYPE_BYTES[job.recipe.training.compute_dtype]
    return len(neighbours) * job.tokens * job.recipe.model.dim * element // job.layout.tensor
