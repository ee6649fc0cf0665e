"""The operators of a training step on one rank: matmuls, attention, bytes of elementwise kernels. Does not import torch.

Counted from `models/llama/model.py`, `models/gpt/model.py`, `models/common/experts.py`, `losses/cross_entropy.py` and
`float8/linear.py`. Bytes are of bfloat16 activations; `Counts.work` scales them to float32.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from titanlike.config.sections import DTYPE_BYTES
from titanlike.float8.selection import HEAD, float8_layers, float8_names
from titanlike.models.moe.config import MoeConfig
from titanlike.tools.planning.activations import CROSS_MATRICES, ordered_matrices
from titanlike.tools.planning.architecture import has_post_norms, has_qk_norm, latent_matrices
from titanlike.tools.planning.experts import (
    bias_launches,
    ends_with_experts,
    expert_launches,
    largest_load,
    routed_matmuls,
    routing_bytes,
)
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.workload import Matmul, Passes, Workload

EAGER_CASTS = 4.6  # bytes of a cast to float8 in eager code, relative to compiled code: 23 to 5


@dataclass(frozen=True)
class Counts:
    """Counts the operators of a job for one micro-batch of one rank."""

    job: Job

    @cached_property
    def element(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.job.recipe.training.compute_dtype]

    @cached_property
    def compiled(self) -> bool:
        """Whether elementwise operations are fused."""
        return self.job.recipe.compile.mode != "none"

    @cached_property
    def local_tokens(self) -> float:
        """Tokens outside of attention and feed-forward: sequence parallelism shards them over tensor-parallel ranks."""
        return self.job.tokens / (self.job.layout.tensor if self.job.program.sequence_parallel else 1)

    @cached_property
    def float8_names(self) -> frozenset[str]:
        """Linear layers that multiply in float8, by their full names."""
        return float8_names(self.job.recipe.float8, self.job.recipe.model)

    @cached_property
    def load(self) -> float:
        """Rows that the experts of the slowest rank compute, relative to the mean of ranks."""
        return largest_load(self.job, self.job.program.load_variation, self.job.program.padded_experts)

    def float8_layers(self, index: int) -> frozenset[str]:
        """Returns the float8 layers of a block, by their names in it."""
        return float8_layers(self.job.recipe.float8, self.job.recipe.model, index)

    def block(self, float8: frozenset[str], local: bool = False, index: int = -1) -> Passes:
        """Returns the work of a block with these float8 layers, with sliding-window attention (`local`) or without, and with the
        parameters of the block `index`."""
        recipe, model = self.job.recipe, self.job.recipe.model
        forward, inputs, weights = [], [], []
        num_attention = 0  # products of attention, before the experts'
        for name, (outputs, width) in ordered_matrices(model, index, self.job.layout.tensor).items():
            tokens = self.job.tokens if name in CROSS_MATRICES else self.job.tokens_of(index)
            in_float8 = name in float8
            forward.append(Matmul(tokens, outputs, width, in_float8))
            inputs.append(Matmul(tokens, width, outputs, in_float8))
            in_float8 = in_float8 and recipe.float8.scaling != "rowwise_with_gw_hp"
            if recipe.trains_all_weights:
                weights.append(Matmul(outputs, width, tokens, in_float8))
            elif self.job.lora.selects(f"layers.0.{name}"):
                rank = self.job.lora.rank
                low = (Matmul(tokens, rank, width), Matmul(tokens, outputs, rank))
                forward += low
                inputs += low
                weights += [Matmul(rank, width, tokens), Matmul(outputs, rank, tokens)]
            if name.startswith("attention"):
                num_attention = len(forward)
        routed = routed_matmuls(self.job, self.load, index)
        forward[num_attention:num_attention] = routed
        inputs += [replace(each, n=each.k, k=each.n) for each in routed]
        if recipe.trains_all_weights:
            weights += [
                replace(each, m=each.n, n=each.k, k=each.m, grouped="k" if each.grouped else "") for each in routed
            ]
        attention = self._attention_flops(local, index)
        elementwise_forward, elementwise_backward = self._elementwise_bytes(index)
        casts_forward, casts_backward = self._cast_bytes(float8, index)
        routing_forward, routing_backward = routing_bytes(self.job, self.load, index)
        launches = self._launches(len(forward), len(inputs), len(float8), index)
        full = Workload(
            tuple(forward), attention, 0.0, elementwise_forward + casts_forward + routing_forward, launches[0]
        )
        recomputed = self._recomputed(forward, full, index)
        clip = self._largest_logits(local)
        full += clip
        recomputed += clip.times(recipe.activation_checkpoint.mode in ("full", "selective"))
        # The outputs of rowwise and the inputs of other matmuls are summed or kept by the elementwise kernels.
        return Passes(
            full,
            recomputed,
            Workload(
                tuple(inputs),
                0.0,
                2.5 * attention,
                elementwise_backward + casts_backward + routing_backward,
                launches[1],
            ),
            Workload(tuple(weights), 0.0, 0.0, 0.0, len(weights) + expert_launches(self.job, False, index)),
        )

    def _launches(self, forward: int, backward: int, float8: int, index: int) -> tuple[int, int]:
        """Kernels that the host launches for a block, forward and backward without the gradients of weights, given its products.
        Constants are from steps of the shipped recipes on null GPUs (`tests/planning/test_planning_null_gpu.py`)."""
        job, model = self.job, self.job.recipe.model
        qk_norm, post_norms = int(has_qk_norm(model)), int(has_post_norms(model))
        latents = len(model.block_matrices(index).keys() & set(latent_matrices(model)))
        if latents:  # norms, RoPE of some channels, and concatenations
            scale = 1 if self.compiled else 3
            forward, backward = forward + scale * (3 + latents), backward + scale * (4 + 2 * latents)
        if self.compiled:
            forward += 8 + 2 * qk_norm + 5 * post_norms
            backward += 14 + 3 * qk_norm + 10 * post_norms
        else:
            forward += 19 + 2 * qk_norm + 2 * post_norms
            backward += 44 + 4 * qk_norm + 4 * post_norms
        forward, backward = forward + 3 * float8, backward + 5 * float8  # maxima and casts
        if not job.uses_fsdp():  # each weight is cast; matmuls write its gradient in float32
            forward += len(model.block_matrices(index))
        if isinstance(model, MoeConfig) and model.has_experts(index):
            extra = (20 if self.compiled else 36) + (25 if job.layout.expert > 1 else 0) + expert_launches(job)
            groups = 20 * (model.groups_per_token < model.num_expert_groups)
            biases = bias_launches(job, model)
            forward, backward = forward + extra + groups + biases[0], backward + extra + biases[1]
        if model.has_sinks:  # what FlexAttention computes of its statistics, and biases of all projections
            forward, backward = forward + 5, backward + 29
        return forward, backward

    def _recomputed(self, matmuls: list[Matmul], forward: Workload, index: int) -> Workload:
        """The backward pass recomputes what it reads. The output of the last matmul is read by dropout and by post-norms, and the
        output of experts by the gradients of the router."""
        recipe = self.job.recipe
        mode = recipe.activation_checkpoint.mode
        final_residual = 6 * self.local_tokens * recipe.model.dim * self.element / 2
        is_read = self.job.reads_last_product or ends_with_experts(recipe.model, index)
        read = matmuls if is_read else matmuls[:-1]
        elementwise = Workload(bytes=forward.bytes - final_residual, kernels=forward.kernels)
        full = replace(elementwise, matmuls=tuple(read), attention_forward=forward.attention_forward)
        if mode == "selective":  # keeps attention and the first of every two matmuls
            return replace(elementwise, matmuls=tuple(read[1::2]))
        checkpointing = recipe.activation_checkpoint
        share = {"full": 1.0, "memory_budget": 1 - checkpointing.memory_budget}
        return full.times(share[mode]) if mode in share else Workload()

    def _attention_flops(self, local: bool, index: int) -> float:
        """Two matmuls over the keys of each token: of causal attention those before it, half of the sequence on average, or of a
        window that slides over it. Context-parallel ranks have equal shares. Documents are assumed to be as long as sequences."""
        model, length = self.job.recipe.model, self.job.recipe.training.seq_len
        if model.is_encoder_decoder:  # with a mask, no kernel leaves out what is masked
            keys = self.job.tokens_of(index) / self.job.sequences
            keys += length * self.job.has_cross_attention(index)
        elif model.causal:
            window = min(model.sliding_window, length) if local else length
            keys = window - window**2 / (2 * length)  # the first tokens have less than a window before them
        else:
            half = min(model.sliding_window // 2, length - 1) if local else length - 1
            keys = 2 * half + 1 - half * (half + 1) / length  # and the tokens at both ends less than half of one
        width = model.num_heads * (model.head_dim + model.v_head_dim) // self.job.layout.tensor
        return 2.0 * self.job.tokens_of(index) * keys * width

    def _largest_logits(self, local: bool) -> Workload:
        """Returns the work of QK-clip, which computes the logits again: a product, and kernels that write, mask and read them.
        Without a dense mask or context parallelism, half of the logits are computed."""
        recipe, model = self.job.recipe, self.job.recipe.model
        if not getattr(recipe.optimizer, "muon_qk_clip", 0.0) or self.job.forward_only:
            return Workload()
        is_full = bool(recipe.data.masks_documents) or local or self.job.layout.context > 1
        keys = recipe.training.seq_len // (1 if is_full else 2)
        heads = model.num_heads // self.job.layout.tensor
        product = Matmul(self.job.tokens, keys, model.head_dim, count=heads)
        return Workload((product,), bytes=4.0 * self.element * self.job.tokens * keys * heads, kernels=6)

    def _elementwise_bytes(self, index: int) -> tuple[float, float]:
        """Bytes of the norms, rotary embeddings, activation function and residuals of a block, forward and backward."""
        model, tensor, tokens = self.job.recipe.model, self.job.layout.tensor, self.job.tokens_of(index)
        head_dim = model.head_dim
        queries = tokens * model.num_heads * head_dim // tensor
        keys = tokens * model.num_kv_heads * head_dim // tensor
        ffn = [size for name, size in model.block_matrices(index).items() if not name.startswith("attention")]
        hidden = tokens * sum(inputs for outputs, inputs in ffn if outputs == model.dim) // tensor
        local, gathered = self.local_tokens * model.dim, tokens * model.dim
        rotated = queries + keys if hasattr(model, "rope_theta") else 0
        normed = queries + keys if has_qk_norm(model) else 0
        gated = len(ffn) > 2
        post_norms = 2 if has_post_norms(model) else 0
        if self.compiled:
            # norm 4; residual and norm 8; residual 6. Backward: twice norm and residual 8; sums of input gradients, 2 and 3 terms.
            # RoPE 4, and 2 more if it reads the statistics of QK-norm first, or in the backward pass its input.
            forward = (18 + 4 * post_norms) * local + 4 * rotated + 2 * normed + (6 if gated else 4) * hidden
            backward = (
                (16 + 8 * post_norms) * local
                + (6 * gated + 8) * gathered
                + 4 * rotated
                + 2 * normed
                + (10 if gated else 6) * hidden
            )
        else:
            norm, norm_backward = self.job.program.norm_bytes
            forward = (
                ((2 + post_norms) * norm + 12) * local
                + self.job.program.rope_bytes * rotated
                + (10 if gated else 4) * hidden
            )
            forward += norm * normed
            backward = ((2 + post_norms) * norm_backward + 12) * local + (6 * gated + 12) * gathered
            backward += self.job.program.rope_bytes * rotated + (18 if gated else 6) * hidden + norm_backward * normed
        context = self.job.layout.context
        if context > 1:  # gathered keys and values are put in order: a copy of each
            forward, backward = (size + 8 * keys * context for size in (forward, backward))
        return forward * self.element / 2, backward * self.element / 2

    def _cast_bytes(self, float8: frozenset[str], index: int) -> tuple[float, float]:
        """Bytes of the casts to float8 of a block, forward and backward: a pass for the maximum, one that casts."""
        recipe, tensor, tokens = self.job.recipe, self.job.layout.tensor, self.job.tokens
        matrices, rowwise = recipe.model.block_matrices(index, tensor), recipe.model.rowwise_matrices
        forward = backward = 0.0
        own_input = (*rowwise, *latent_matrices(recipe.model))
        for layer in {name.rpartition(".")[0] for name in float8}:  # its other matrices share an input
            colwise = {name for name in matrices if name.rpartition(".")[0] == layer and name not in own_input}
            # Tensor-parallel ranks cast their shard before the gather, if only float8 matmuls read it.
            # The router and the experts read the input of the shared experts, too, and not in float8.
            shared = tensor > 1 and colwise <= float8 and recipe.float8.scaling == "tensorwise"
            shared = shared and not layer.endswith(".shared")
            if colwise & float8:
                # Maximum 2, cast 3. For the weight gradient again, transposed: from the input, or from the gathered float8.
                inputs = tokens * recipe.model.dim
                forward += 5 * inputs / tensor if shared else 5 * inputs
                backward += 2 * inputs if shared else 3 * inputs
        for name in float8:
            outputs, inputs = matrices[name]
            if name in own_input:
                forward += 5 * tokens * inputs
                backward += 3 * tokens * inputs
            if name in rowwise:
                # Maximum 2, cast 4 in both layouts; a shard of the gradient is cast before it is gathered, then transposed.
                shard = tensor > 1 and recipe.float8.scaling == "tensorwise"
                backward += tokens * outputs * (5 / tensor + 2 if shard else 6)
            else:
                backward += 6 * tokens * outputs
            if not recipe.float8.all_gather:  # which casts shards, once per step; otherwise each pass casts the weights
                forward += 5 * outputs * inputs
                backward += 3 * outputs * inputs
        # Eager code computes the maximum and the cast in several kernels, in float32.
        share = self.job.program.cast_share if self.compiled else EAGER_CASTS
        return forward * share, backward * share

    def embedding(self) -> Passes:
        """Returns the work of the token embedding."""
        model = self.job.recipe.model
        tokens = self.job.num_predicted * self.job.tokens + self.job.decoder_tokens * model.is_encoder_decoder
        size = tokens * model.dim * self.element
        gradient = model.vocab_size // self.job.layout.tensor * model.dim * self.element
        return Passes(
            forward=Workload(bytes=2.0 * size, kernels=4),
            backward_weight=Workload(bytes=3.0 * size + gradient, kernels=6),
        )

    def loss(self) -> Passes:
        """Returns the work of the final norm, the LM head and the loss, whose gradients the forward pass computes, too. Gradients
        of preference pairs are computed in the backward pass, from the logits that it computes again."""
        recipe, tokens = self.job.recipe, self.job.decoder_tokens * self.job.num_predicted
        vocab, dim = recipe.model.vocab_size, recipe.model.dim
        if not self.job.program.whole_logits:
            vocab //= self.job.layout.tensor
        in_float8 = HEAD in self.float8_names
        chunk = (
            tokens if in_float8 or self.job.program.eager_loss else min(recipe.training.loss_chunk or tokens, tokens)
        )
        chunks = tokens / chunk
        products = (
            Matmul(chunk, vocab, dim, in_float8, chunks),
            Matmul(chunk, dim, vocab, in_float8, chunks),
            Matmul(vocab, dim, chunk, in_float8, chunks),
        )
        # Compiled: three passes read the logits, and one writes them. Eager: a float32 copy, and each operation by itself.
        fused = recipe.compile.mode == "block" and not self.job.program.eager_loss
        logits = (8 if fused else 42) * self.element / 2 * tokens * vocab
        norm = 14 * self.local_tokens * dim * self.element / 2
        if self.job.distills and self.job.forward_only:  # the loss of the student reads its logits
            return Passes(Workload(products[:1], bytes=norm, kernels=chunks + 2))
        gradients = products if recipe.trains_all_weights else products[:2]
        if self.job.distills:  # four passes read the logits of both models, and one writes the logits of one
            logits = (18 if fused else 150) * self.element / 2 * tokens * vocab
            return Passes(Workload(gradients, bytes=logits + norm, kernels=(8 if fused else 60) * chunks + 12))
        if self.job.trains_on_pairs:
            kernels = (6 if fused else 14) * chunks + 10
            return Passes(
                forward=Workload(products[:1], bytes=logits + norm, kernels=kernels),
                backward_input=Workload(gradients, bytes=logits, kernels=kernels),
            )
        rows, transform = int(self.local_tokens), recipe.model.num_head_parameters() - recipe.model.vocab_size * dim
        # What transforms the input of the LM head of an encoder is not compiled: a matrix, an activation and a norm.
        width = transform // dim
        other = (Matmul(rows, width, dim),) if transform else ()
        return Passes(
            Workload(
                (*other, *gradients),
                bytes=logits + norm * (1 + bool(other)),
                kernels=(6 if fused else 14) * chunks + 10,
            ),
            backward_input=Workload(other, bytes=norm * bool(other), kernels=8 * len(other)),
            backward_weight=Workload(
                tuple(replace(each, m=each.n, n=each.k, k=each.m) for each in other), kernels=2 * len(other)
            ),
        )

    def optimizer_bytes(self, parameters: float) -> float:
        """Returns the bytes of the gradient norm, clipping and AdamW for a number of local parameters."""
        recipe = self.job.recipe
        master = DTYPE_BYTES[recipe.training.master_dtype]
        state = {"full": 2 * master, "bfloat16": 4, "8bit": 2}[recipe.optimizer.state_dtype]
        # Norm: reads gradients. Clipping: reads and writes them. AdamW: reads all, writes weights and moments.
        return parameters * (master + 2 * master + 3 * master + 2 * state)
