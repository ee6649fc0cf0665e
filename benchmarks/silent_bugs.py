"""Published cases of training that ran and was wrong, each planted in a tiny module and found by `titanlike verify`: those of
parallel training under a layout, those of torch.compile with `--compile`.

    python -m benchmarks.silent_bugs                                               # all
    python -m benchmarks.silent_bugs rope_positions tied_embeddings                # some
    python -m benchmarks.silent_bugs --out benchmarks/results/silent_bugs_cpu.json    # and record what docs/results.md shows

Each case is a function of whether the bug is planted. Without it, the same module is accepted. The exit code is 1 if a bug is not
found, or a correct module is not accepted; the tests compare what is printed with what is recorded.
"""

import argparse
import functools
import inspect
import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.pool import Pool
from titanlike.distributed.autograd_collectives import (
    all_gather,
    all_reduce,
    all_reduce_gradient,
    gather,
    reduce_scatter,
    split,
)
from titanlike.parallelisms.mesh import group_along
from titanlike.tools.verify.comparison import ProcessRecord
from titanlike.tools.verify.compiled import verify_compiled
from titanlike.tools.verify.module import Report, compare_records
from titanlike.tools.verify.options import parse_mesh
from titanlike.tools.verify.record import Functions, batch_dimensions, record, shard_rows

VOCAB, DIM, LENGTH, ROWS = 16, 8, 8, 8
IGNORED = -100
GITHUB = "https://github.com/"
COMPILE = "--compile"  # in place of a layout


@dataclass(frozen=True)
class Bug:
    """A published case, which the docstring of its function describes."""

    build: Callable[[bool], Functions]  # with the bug, or without it
    link: str  # of the issue or pull request, without the host
    layout: str
    own: str = ""  # the error of tests/known_errors.txt that plants the same in this library


BUGS: dict[str, Bug] = {}


def bug(link: str, layout: str, own: str = "") -> Any:
    def add(build: Callable[[bool], Functions]) -> Callable[[bool], Functions]:
        BUGS[build.__name__] = Bug(build, link, layout, own)
        return build

    return add


class WithOps(nn.Module):
    """A plan inserts collectives with `ops`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Callable[[Tensor], Tensor]] = {}

    def op(self, name: str, x: Tensor) -> Tensor:
        return self.ops[name](x) if name in self.ops else x


class Tokens(WithOps):
    """A language model without attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(dropout)
        self.out_norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.norm.weight, 1.0, 0.2)
        self.adds_bias_first = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.op("after_embed", self.embed(tokens))  # (B, T, D)
        hidden = self.up(self.op("before_up", self.norm(x))).relu()
        if self.adds_bias_first:
            x = x + self.op("after_down", self.down(hidden))
        else:
            x = x + self.op("after_down", F.linear(hidden, self.down.weight)) + self.down.bias
        x = self.out_norm(self.drop(x))
        return self.head(self.op("before_head", x))  # (B, T, V)


def batch(step: int) -> dict[str, Tensor]:
    """The first rows have few tokens that count."""
    tokens, labels = torch.randint(0, VOCAB, (2, ROWS, LENGTH))
    labels[: ROWS // 2, 3:] = IGNORED
    return {"tokens": tokens, "labels": labels}


def even_batch(step: int) -> dict[str, Tensor]:
    tokens, labels = torch.randint(0, VOCAB, (2, ROWS, LENGTH))
    return {"tokens": tokens, "labels": labels}


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def mean_loss(model: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh | None = None) -> Tensor:
    return cross_entropy(model(batch["tokens"]), batch["labels"])


def global_mean_loss(
    model: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh | None, factor: bool = True
) -> Tensor:
    """The sum over this rank's tokens, divided by the number of all ranks' tokens, times the number of ranks: FSDP averages."""
    total = cross_entropy(model(batch["tokens"]), batch["labels"], "sum")
    count = (batch["labels"] != IGNORED).sum()
    if mesh is not None:
        dist.all_reduce(count)
    return total / count * (mesh.size() if mesh is not None and factor else 1)


def shard(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    """Returns this rank's chunk, as a plain parameter."""
    return nn.Parameter(parameter.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


def sharded_mlp(model: Any) -> None:
    for name, module, dim in (("weight", model.up, 0), ("bias", model.up, 0), ("weight", model.down, 1)):
        setattr(module, name, shard(getattr(module, name), dim))


def sum_gradients(parameters: Any, mesh: DeviceMesh, divisor: float = 1.0) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad /= divisor


def sum_gradient_of(parameters: Any, group: dist.ProcessGroup) -> None:
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, group=group))


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism of the MLP. Activations between layers are the same on all ranks."""
    sharded_mlp(model)
    group = mesh.get_group()
    model.ops = {
        "before_up": lambda x: all_reduce_gradient(x, group),
        "after_down": lambda x: all_reduce(x, group),
    }


def sequence_parallel(model: Any, mesh: DeviceMesh) -> None:
    """The same, with the sequence divided between the layers."""
    sharded_mlp(model)
    group = mesh.get_group()
    model.ops = {
        "after_embed": lambda x: split(x, 1, group),
        "before_up": lambda x: all_gather(x, 1, group),
        "after_down": lambda x: reduce_scatter(x, 1, group),
        "before_head": lambda x: gather(x, 1, group),
    }


def on_parts_of_sequences(model: Any) -> list[nn.Parameter]:
    return [*model.norm.parameters(), *model.out_norm.parameters(), model.down.bias]


def tensor(**changes: Any) -> Functions:
    return replace(Functions(Tokens, batch, tensor_parallel, loss=mean_loss), **changes)


def sequence(reduced: Callable[[Any], list[nn.Parameter]], divisor: float = 1.0, **changes: Any) -> Functions:
    """`reduced` returns the parameters whose gradients are summed over ranks."""
    backward = reducing(mean_loss, lambda model, mesh: sum_gradients(reduced(model), mesh, divisor))
    return replace(Functions(Tokens, batch, sequence_parallel, backward=backward), **changes)


def shard_all(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves the model as it is, on each rank."""


def sharded_data(**changes: Any) -> Functions:
    return replace(Functions(Tokens, batch, shard_all, loss=global_mean_loss), **changes)


def reducing(loss: Callable[..., Tensor], reduce_gradients: Callable[[Any, DeviceMesh], None]) -> Callable[..., Tensor]:
    """Returns a backward pass after which several ranks change their gradients."""

    def backward(model: nn.Module, batch: Any, mesh: DeviceMesh | None) -> Tensor:
        found = loss(model, batch, mesh)
        found.backward()
        if mesh is not None:
            reduce_gradients(model, mesh)
        return found.detach()

    return backward


of_one_process = reducing(mean_loss, replicate)


# ---- Data parallelism ----


@bug("pytorch/torchtitan/pull/2206", "shard=2")
def loss_averaged_per_rank(planted: bool) -> Functions:
    """The loss is a mean over the tokens of each rank, and FSDP averages ranks. A token counts more on a rank with fewer
    tokens."""
    return sharded_data(loss=mean_loss if planted else global_mean_loss)


@bug("meta-pytorch/torchtune/pull/2172", "shard=2", own="sharding")
def divided_twice(planted: bool) -> Functions:
    """The loss is divided by the tokens of all ranks, and FSDP divides the gradients by the number of ranks again."""
    return sharded_data(loss=functools.partial(global_mean_loss, factor=not planted))


@bug("meta-pytorch/torchtune/issues/2420", "tensor=2")
def scaled_by_all_ranks(planted: bool) -> Functions:
    """Gradients are scaled by the number of all ranks to undo an average over the data-parallel ranks only."""

    def scale(model: nn.Module, mesh: DeviceMesh) -> None:
        for parameter in model.parameters():
            parameter.grad *= mesh.size() if planted else 1

    return tensor(backward=reducing(mean_loss, scale))


@bug("verl-project/verl/issues/7493", "data=2")
def gradients_not_reduced(planted: bool) -> Functions:
    """With a sharding group of one rank, gradients are not reduced at all: each rank trains a model of its own."""

    def average(model: nn.Module, mesh: DeviceMesh) -> None:
        sum_gradients(() if planted else model.parameters(), mesh, mesh.size())

    return Functions(Tokens, batch, replicate, backward=reducing(global_mean_loss, average))


@bug("huggingface/datasets/issues/5360", "shard=2")
def same_rows_on_all_ranks(planted: bool) -> Functions:
    """An iterable dataset is not divided between the ranks: all train on the same rows."""

    def shard_batch(batch: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
        return {name: each[: ROWS // 2] for name, each in batch.items()} if planted else shard_rows(batch, mesh)

    return sharded_data(shard_batch=shard_batch)


@bug("pytorch/pytorch/issues/106395", "shard=2")
def reduced_in_bfloat16(planted: bool) -> Functions:
    """Gradients are reduced in bfloat16. With more ranks, training becomes unstable."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if planted else None)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    return sharded_data(parallelize=parallelize)


@bug("pytorch/pytorch/issues/64629", "data=2")
def reduced_in_another_order(planted: bool) -> Functions:
    """Gradients are reduced in the order in which they are ready, which differs between ranks: tensors of one shape are mixed
    up."""

    def average(model: nn.Module, mesh: DeviceMesh) -> None:
        parameters = list(model.parameters())
        if planted and mesh.get_local_rank():  # weight and bias of a norm
            parameters[1], parameters[2] = parameters[2], parameters[1]
        sum_gradients(parameters, mesh, mesh.size())

    return Functions(Tokens, batch, replicate, backward=reducing(global_mean_loss, average))


class Encoder(nn.Module):
    """Embeds pairs, which a contrastive loss compares with those of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([self.left(left), self.right(right)], 1)  # (B, 2, D)


def contrastive(gathered: Callable[[Tensor, dist.ProcessGroup], Tensor], whole: bool) -> Functions:
    """`gathered` returns the rows of all ranks. With `whole`, each rank computes the loss over all rows, otherwise over its own."""

    def loss(model: nn.Module, batch: Sequence[Tensor], mesh: DeviceMesh | None) -> Tensor:
        own = model(*batch)
        rows = own if mesh is None else gathered(own, mesh.get_group())
        own = rows if whole else own
        first = 0 if mesh is None or whole else mesh.get_local_rank() * len(own)
        scores = own[:, 0] @ rows[:, 1].T
        return F.cross_entropy(scores, torch.arange(first, first + len(own)))

    def pairs(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)

    return Functions(Encoder, pairs, shard_all, loss=loss)


def detached_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of other ranks without a gradient, as `torch.distributed.all_gather` returns them."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own.detach(), group=group)
    rows[dist.get_rank(group)] = own
    return torch.cat(rows)


@bug("huggingface/accelerate/issues/1154", "shard=2")
def gathered_without_gradient(planted: bool) -> Functions:
    """A contrastive loss compares own rows with gathered ones that have no gradient: half of it is lost."""
    return contrastive(detached_rows if planted else lambda own, group: all_gather(own, 0, group), whole=False)


@bug("mlfoundations/open_clip/issues/616", "shard=2")
def gathered_and_averaged(planted: bool) -> Functions:
    """Each rank computes the contrastive loss over all rows, with the gradient of its own rows only, and ranks are averaged."""
    return contrastive(detached_rows if planted else lambda own, group: all_gather(own, 0, group), whole=True)


# ---- Accumulation and clipping ----


def accumulated(num: int, is_planted: bool, weighting: str) -> Callable[..., Tensor]:
    """Returns a backward pass over micro-batches: each with the mean of its tokens ("mean"), or with undivided losses ("sum")."""

    def backward(model: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh | None) -> Tensor:
        if mesh is None:
            return of_one_process(model, batch, None)
        count = (batch["labels"] != IGNORED).sum()
        losses = []
        for tokens, labels in zip(batch["tokens"].chunk(num), batch["labels"].chunk(num), strict=True):
            loss = cross_entropy(model(tokens), labels, "mean" if is_planted else "sum")
            divisor = (1 if weighting == "sum" else num) if is_planted else count
            (loss / divisor).backward()
            losses.append(loss.detach() / (num if is_planted else count))
        return torch.stack(losses).sum()

    return backward


@bug("verl-project/verl/issues/5625", "tensor=2")
def micro_batch_means(planted: bool) -> Functions:
    """Each micro-batch is the mean of its own tokens, weighted by its number of sequences. Tokens of short sequences count
    more."""
    return tensor(backward=accumulated(4, planted, "mean"))


@bug("verl-project/verl/pull/3332", "tensor=2")
def accumulated_without_division(planted: bool) -> Functions:
    """The losses of micro-batches are not divided by their number before the backward pass."""
    return tensor(batch=even_batch, backward=accumulated(4, planted, "sum"))


def clip(max_norm: float, squares: Callable[[nn.Module, DeviceMesh | None], Tensor]) -> Callable[..., Tensor]:
    def clip_gradients(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
        norm = squares(model, mesh).sqrt()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, max_norm / norm.item())
        return norm

    return clip_gradients


def local_squares(parameters: Any) -> Tensor:
    gradients = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in parameters]
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


@bug("sgl-project/SpecForge/pull/663", "shard=2")
def clipped_by_local_norm(planted: bool) -> Functions:
    """FSDP shards the gradients, and each rank clips by the norm of its shard, with a factor of its own."""

    def squares(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
        found = local_squares(model.parameters())
        if mesh is not None and not planted:
            dist.all_reduce(found)
        return found

    return sharded_data(clip=clip(0.1, squares))


@bug("ByteDance-Seed/VeOmni/issues/184", "replicate=2,shard=2")
def norm_over_replicas(planted: bool) -> Functions:
    """With hybrid sharding, squares of gradients are summed over the ranks that hold replicas as well."""

    def squares(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
        found = local_squares(model.parameters())
        if mesh is not None:
            dist.all_reduce(found, group=None if planted else mesh["shard"].get_group())
        return found

    return sharded_data(clip=clip(0.1, squares))


@bug("NVIDIA-NeMo/RL/pull/3788", "tensor=2")
def norm_counts_replicated_parameters(planted: bool) -> Functions:
    """Squares of all gradients are summed over tensor-parallel ranks, also those of replicated parameters."""

    def squares(model: Any, mesh: DeviceMesh | None) -> Tensor:
        shards = [model.up.weight, model.up.bias, model.down.weight]
        others = [each for each in model.parameters() if all(each is not shard for shard in shards)]
        found, rest = local_squares(shards), local_squares(others)
        if mesh is not None:
            dist.all_reduce(found)
            if planted:
                dist.all_reduce(rest)
        return found + rest

    return tensor(clip=clip(0.1, squares))


# ---- Tensor and sequence parallelism ----


@bug("NVIDIA/Megatron-LM/issues/1446", "tensor=2")
def norm_after_sequence_parallelism(planted: bool) -> Functions:
    """With sequence parallelism, each rank has the gradient of a LayerNorm for its part of the sequence. That of the last one
    is not summed."""
    return sequence(
        lambda model: [
            p
            for p in on_parts_of_sequences(model)
            if not planted or all(p is not q for q in model.out_norm.parameters())
        ]
    )


@bug("EleutherAI/gpt-neox/pull/1259", "tensor=2")
def norm_gradients_averaged(planted: bool) -> Functions:
    """The gradients of sequence-parallel LayerNorms are averaged over tensor-parallel ranks instead of summed."""
    return sequence(on_parts_of_sequences, divisor=2.0 if planted else 1.0)


@bug("PaddlePaddle/Paddle/pull/35186", "tensor=2")
def bias_before_all_reduce(planted: bool) -> Functions:
    """Each rank adds the bias of a row-parallel layer before the all-reduce, so it counts once per rank."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        tensor_parallel(model, mesh)
        model.adds_bias_first = planted

    return tensor(parallelize=parallelize)


def vocab_parallel(loss: Callable[..., Tensor], *, reduces_input: bool = True, shards_head: bool = True) -> Functions:
    """The head is sharded along the vocabulary; `loss` gets this rank's logits, and the labels."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        tensor_parallel(model, mesh)
        if shards_head:
            model.head.weight = shard(model.head.weight, 0)
        if reduces_input:
            model.ops["before_head"] = lambda x: all_reduce_gradient(x, mesh.get_group())

    def token_loss(model: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh | None) -> Tensor:
        return loss(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), mesh)

    return tensor(parallelize=parallelize, batch=even_batch, loss=token_loss)


def vocab_parallel_terms(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Returns the logarithm of the sum of exponentials over the vocabulary, and the logit of each label."""
    if mesh is None:
        return logits.logsumexp(-1), logits.gather(-1, labels[:, None])[:, 0]
    group, first = mesh.get_group(), mesh.get_local_rank() * logits.shape[-1]
    maximum = logits.detach().amax(-1)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    total = all_reduce((logits - maximum[:, None]).exp().sum(-1), group)
    is_here = (labels >= first) & (labels < first + logits.shape[-1])
    here = logits.gather(-1, torch.where(is_here, labels - first, 0)[:, None])[:, 0]
    return total.log() + maximum, all_reduce(torch.where(is_here, here, 0.0), group)


def vocab_parallel_loss(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
    total, target = vocab_parallel_terms(logits, labels, mesh)
    return (total - target).mean()


@bug("apple/ml-cross-entropy/pull/42", "tensor=2")
def input_gradient_of_vocabulary_shard(planted: bool) -> Functions:
    """A vocabulary-parallel loss returns the gradient of its input for this rank's part of the vocabulary only."""
    return vocab_parallel(vocab_parallel_loss, reduces_input=not planted)


@bug("NVIDIA/Megatron-LM/issues/7452", "tensor=2")
def gathered_logits_in_parallel_loss(planted: bool) -> Functions:
    """Logits that are gathered already go into the vocabulary-parallel loss, which counts them once per rank: the loss is too
    large by log(ranks)."""

    def loss(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
        if mesh is not None and planted:
            total, _ = vocab_parallel_terms(logits, labels, mesh)
            return (total - logits.gather(-1, labels[:, None])[:, 0]).mean()
        return F.cross_entropy(logits, labels)

    return vocab_parallel(loss, reduces_input=False, shards_head=False)


@bug("NVIDIA/Megatron-LM/issues/737", "tensor=2")
def label_smoothing_of_shard(planted: bool) -> Functions:
    """Label smoothing averages log-probabilities over this rank's part of the vocabulary: ranks have different losses."""

    def loss(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
        total, target = vocab_parallel_terms(logits, labels, mesh)
        mean = logits.sum(-1)
        if mesh is not None and not planted:
            mean = all_reduce(mean, mesh.get_group())
        mean = mean / (logits.shape[-1] if planted else VOCAB)
        return (total - 0.9 * target - 0.1 * mean).mean()

    return vocab_parallel(loss)


def reduce_ends(model: Any, mesh: DeviceMesh) -> None:
    """Reduces the output of a module that is divided between ranks, and the gradient of its input."""
    group = mesh.get_group()
    model.ops = {"input": lambda x: all_reduce_gradient(x, group), "output": lambda x: all_reduce(x, group)}


class Gated(WithOps):
    """An MLP whose gate and up projections are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.op("input", x)).chunk(2, -1)
        return self.op("output", self.down(F.silu(gate) * up))


@bug("deepspeedai/DeepSpeed/pull/3844", "tensor=2")
def fused_weight_cut_across_parts(planted: bool) -> Functions:
    """A fused projection is cut into consecutive rows, so that a rank takes what belongs to another part for its own."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        reduce_ends(model, mesh)
        weight = model.gate_up.weight
        if not planted:  # rows in an order in which each rank's part has both
            gate, up = weight.detach().chunk(2)
            ranks = zip(gate.chunk(mesh.size()), up.chunk(mesh.size()), strict=True)
            weight = nn.Parameter(torch.cat([torch.cat(each) for each in ranks]))
        model.gate_up.weight = shard(weight, 0)
        model.down.weight = shard(model.down.weight, 1)

    return Functions(Gated, lambda step: torch.randn(ROWS, DIM), parallelize)


class LoRA(WithOps):
    """A frozen projection with a low-rank update, whose second factor is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low = self.b(self.op("low", self.a(x)))
        return self.op("output", self.base(self.op("input", x)) + low)


@bug("modelscope/mcore-bridge/pull/173", "tensor=2", own="LoRA gradient")
def replicated_lora_factor(planted: bool) -> Functions:
    """The replicated factor of LoRA sees the part of the sequence of its rank, and its gradient is not summed over
    tensor-parallel ranks."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        model.ops = {
            "input": lambda x: split(x, 1, group), "low": lambda x: split(x, 1, group), "output": lambda x: gather(x, 1, group)
        }  # fmt: skip
        if not planted:
            sum_gradient_of([model.b.weight], group)

    return Functions(LoRA, lambda step: torch.randn(ROWS, LENGTH, DIM), parallelize)


# ---- Attention and context parallelism ----


class Attention(WithOps):
    """Causal attention with RoPE. `heads` are those of this rank, all of which share `kv_heads`."""

    def __init__(self, heads: int = 2, kv_heads: int = 2, head_dim: int = 8) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q = nn.Linear(DIM, heads * head_dim, bias=False)
        self.k, self.v = (nn.Linear(DIM, kv_heads * head_dim, bias=False) for _ in range(2))
        self.q_norm = nn.LayerNorm(head_dim)
        self.o = nn.Linear(heads * head_dim, DIM, bias=False)
        self.register_buffer("frequencies", 2.0 ** -torch.arange(head_dim // 2), persistent=False)
        self.positions: Callable[[int], Tensor] = torch.arange
        self.mask_positions: Callable[[int], Tensor] = torch.arange

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.positions(x.shape[1])[:, None] * self.frequencies  # (T, H / 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, -1)  # (B, T, heads, H)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.op("input", x)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (self.q(x), self.k(x), self.v(x)))
        q, k = self.rotate(self.q_norm(q)), self.rotate(k)
        k, v = self.op("keys", k), self.op("keys", v)
        k, v = (each.expand(-1, -1, q.shape[2], -1) for each in (k, v))
        mask = self.mask_positions(q.shape[1])[:, None] >= torch.arange(k.shape[1])
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.op("output", self.o(out.transpose(1, 2).flatten(2)))


def hidden(step: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, DIM)


def head_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Divides the heads between ranks."""
    kv_is_shared = model.k.out_features == model.head_dim
    for module in (model.q,) if kv_is_shared else (model.q, model.k, model.v):
        module.weight = shard(module.weight, 0)
    model.o.weight = shard(model.o.weight, 1)
    reduce_ends(model, mesh)


@bug("NVIDIA-NeMo/RL/issues/3716", "tensor=2", own="QK-norm gradient")
def qk_norm_of_local_heads(planted: bool) -> Functions:
    """A norm of queries and keys is replicated and sees the heads of its rank. Its gradient is not summed."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        head_parallel(model, mesh)
        if not planted:
            sum_gradient_of(model.q_norm.parameters(), mesh.get_group())

    return Functions(Attention, hidden, parallelize)


@bug("bigcode-project/Megatron-LM/pull/37", "tensor=2")
def shared_key_value_head(planted: bool) -> Functions:
    """All ranks have the one key and value head of multi-query attention. Its gradient is not summed over the heads of all
    ranks."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        head_parallel(model, mesh)
        sum_gradient_of(model.q_norm.parameters(), mesh.get_group())
        if not planted:
            sum_gradient_of([model.k.weight, model.v.weight], mesh.get_group())

    return Functions(functools.partial(Attention, kv_heads=1), hidden, parallelize)


def context_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Divides the sequence between ranks, and gathers keys and values."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    model.ops = {"keys": lambda x: all_gather(x, 1, group)}
    model.positions = model.mask_positions = lambda length: torch.arange(rank * length, (rank + 1) * length)
    for parameter in model.parameters():  # each rank has the mean over its tokens
        parameter.register_post_accumulate_grad_hook(lambda each: sum_gradients([each], mesh, mesh.size()))


def shard_sequence(batch: Any, mesh: DeviceMesh) -> Any:
    parts = {"chunks": mesh.size(), "dim": 1}
    if isinstance(batch, dict):
        return {name: each.chunk(**parts)[mesh.get_local_rank()] for name, each in batch.items()}
    return batch.chunk(**parts)[mesh.get_local_rank()]


@bug("thunlp/Seq1F1B/issues/6", "context=2")
def rope_positions(planted: bool) -> Functions:
    """Each part of a sequence starts with position 0 in RoPE. The first loss is as high as without the pretrained weights."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        context_parallel(model, mesh)
        if planted:
            model.ops["keys"] = lambda x: all_gather(x, 1, mesh.get_group())
            model.positions = torch.arange

    return Functions(Attention, hidden, parallelize, shard_batch=shard_sequence)


@bug("huggingface/transformers/pull/48570", "context=2")
def labels_shifted_per_part(planted: bool) -> Functions:
    """The model shifts the labels of its part of the sequence, so the last token of each part has no target."""

    def shifted(labels: Tensor) -> Tensor:
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)

    def shard_batch(batch: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
        return shard_sequence({**batch, "shifted": shifted(batch["labels"])}, mesh)

    def loss(model: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh | None) -> Tensor:
        labels = batch["shifted"] if mesh is not None and not planted else shifted(batch["labels"])
        return global_mean_loss(model, {**batch, "labels": labels}, mesh)

    return sharded_data(batch=even_batch, shard_batch=shard_batch, loss=loss)


# ---- Experts ----


class Experts(WithOps):
    """Each token goes to all experts, weighted by the router. A rank has the experts from `first`."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, num_experts, bias=False)
        self.weight = nn.Parameter(torch.randn(num_experts, DIM, DIM) / math.sqrt(DIM))
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        probs = self.op("probs", self.router(x).softmax(-1))
        x = self.op("tokens", x)
        own = probs[..., self.first : self.first + len(self.weight)]
        return self.op("output", torch.einsum("btd,edf,bte->btf", x, self.weight, own))


def shard_experts(model: Any, mesh: DeviceMesh) -> None:
    model.weight = shard(model.weight, 0)
    model.first = mesh.get_local_rank() * len(model.weight)


def expert_parallel(model: Any, mesh: DeviceMesh, reduced: Sequence[str] = ("tokens", "probs")) -> None:
    """Each rank computes its experts for all tokens. `reduced` are the inputs whose gradients are summed."""
    shard_experts(model, mesh)
    group = mesh.get_group()
    model.ops = dict.fromkeys(reduced, lambda x: all_reduce_gradient(x, group))
    model.ops["output"] = lambda x: all_reduce(x, group)


@bug("pytorch/torchtitan/issues/2387", "tensor=2", own="router gradient")
def router_of_local_experts(planted: bool) -> Functions:
    """The replicated router gets the gradient of this rank's experts, which is not reduced. Routers of the ranks drift apart."""
    reduced = ("tokens",) if planted else ("tokens", "probs")
    return Functions(Experts, hidden, functools.partial(expert_parallel, reduced=reduced))


def token_gathering(model: Any, mesh: DeviceMesh, probs: Callable[[Tensor], Tensor]) -> None:
    """Each rank sends its tokens to all experts."""
    group = mesh.get_group()
    shard_experts(model, mesh)
    model.ops = {
        "tokens": lambda x: all_gather(x, 0, group), "probs": probs, "output": lambda x: reduce_scatter(x, 0, group)
    }  # fmt: skip


def expert_backward(divides: bool) -> Callable[..., Tensor]:
    def average(model: Any, mesh: DeviceMesh) -> None:
        sum_gradients([*model.norm.parameters(), model.router.weight], mesh, mesh.size())
        model.weight.grad /= mesh.size() if divides else 1

    return reducing(lambda model, batch, mesh: model(batch).square().mean(), average)


class HiddenExperts(WithOps):
    """Experts with a bias after their second projection. Ranks may have parts of the hidden dimension of all of them."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, DIM, 2 * DIM) / math.sqrt(DIM))
        self.down = nn.Parameter(torch.randn(num_experts, 2 * DIM, DIM) / math.sqrt(DIM))
        self.bias = nn.Parameter(torch.randn(num_experts, DIM))
        self.bias_divisor = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        probs = self.op("probs", self.router(x).softmax(-1))
        hidden = torch.einsum("btd,edf->btef", self.op("tokens", x), self.up).relu()
        out = torch.einsum("btef,efd->bted", hidden, self.down) + self.bias / self.bias_divisor
        return self.op("output", torch.einsum("bted,bte->btd", out, probs))


def hidden_parallel(model: Any, mesh: DeviceMesh, *, divides_bias: bool = True, reduces_inputs: bool = True) -> None:
    group = mesh.get_group()
    model.up, model.down = shard(model.up, 2), shard(model.down, 1)
    model.bias_divisor = mesh.size() if divides_bias else 1
    model.ops = {"output": lambda x: all_reduce(x, group)}
    if reduces_inputs:
        model.ops |= dict.fromkeys(("tokens", "probs"), lambda x: all_reduce_gradient(x, group))
    sum_gradient_of([model.bias], group)


@bug("pytorch/torchtitan/pull/4245", "tensor=2")
def expert_bias_per_rank(planted: bool) -> Functions:
    """The bias of experts is replicated, and their hidden dimension is not: each rank adds the bias to its part of the sum."""
    return Functions(HiddenExperts, hidden, functools.partial(hidden_parallel, divides_bias=not planted))


@bug("pytorch/torchtitan/pull/4054", "tensor=2")
def expert_inputs_not_reduced(planted: bool) -> Functions:
    """Without expert parallelism, each rank has a part of the hidden dimension of all experts. The gradients of their inputs are
    not summed, so that the router and all layers below get those of one part."""
    return Functions(HiddenExperts, hidden, functools.partial(hidden_parallel, reduces_inputs=not planted))


class Balanced(WithOps):
    """Sends each token to one expert, a vector. The router has a bias against experts with many tokens."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, num_experts, bias=False)
        self.experts = nn.Parameter(torch.randn(num_experts, DIM))
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("counts", torch.zeros(num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.op("input", x)
        probs = self.router(x).softmax(-1)
        expert = (probs + self.bias).argmax(-1)
        self.counts = self.counts + F.one_hot(expert, len(self.counts)).sum((0, 1))
        return self.op("output", x * self.experts[expert] * probs.gather(-1, expert[..., None]))


@bug("pytorch/torchtitan/pull/4154", "tensor=2")
def routing_counts_of_local_tokens(planted: bool) -> Functions:
    """The bias that balances experts is updated from the tokens of each tensor-parallel rank, and not from those of all."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        model.ops = {"input": lambda x: split(x, 1, group), "output": lambda x: gather(x, 1, group)}
        sum_gradient_of(model.parameters(), group)

    def after_step(model: Any, optimizer: torch.optim.Optimizer, step: int, mesh: DeviceMesh | None) -> None:
        if mesh is not None and not planted:
            dist.all_reduce(model.counts, group=mesh.get_group())
        model.bias += 0.1 * (model.counts.mean() - model.counts).sign()
        model.counts.zero_()

    return Functions(Balanced, hidden, parallelize, after_step=after_step)


@bug("NVIDIA/Megatron-LM/pull/5956", "data=2")
def expert_gradients_not_divided(planted: bool) -> Functions:
    """Experts see the tokens of all ranks, so that their gradients are sums, while those of other parameters are averages."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        token_gathering(model, mesh, lambda x: all_gather(x, 0, mesh.get_group()))

    return Functions(Experts, hidden, parallelize, backward=expert_backward(not planted))


@bug("NVIDIA-NeMo/Automodel/pull/2995", "data=2")
def router_detached(planted: bool) -> Functions:
    """Routing probabilities are gathered by a collective without a backward: the router does not learn from the loss."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        def gathered(x: Tensor) -> Tensor:
            whole = all_gather(x, 0, mesh.get_group())
            return whole.detach() if planted else whole

        token_gathering(model, mesh, gathered)

    def backward(model: Any, batch: Tensor, mesh: DeviceMesh | None) -> Tensor:
        model.router.weight.grad = torch.zeros_like(model.router.weight)
        return expert_backward(True)(model, batch, mesh)

    return Functions(Experts, hidden, parallelize, backward=backward)


@bug("NVIDIA-NeMo/Automodel/pull/3359", "tensor=2")
def auxiliary_loss_per_micro_batch(planted: bool) -> Functions:
    """The auxiliary loss of the router counts in full in each micro-batch, while the loss of the model is divided by their
    number."""

    def backward(model: Any, batch: Tensor, mesh: DeviceMesh | None) -> Tensor:
        chunks = batch.chunk(1 if mesh is None else 4)
        total = torch.zeros(())
        for x in chunks:
            loss = model(x).square().mean() / len(chunks)
            auxiliary = model.router(model.norm(x)).logsumexp(-1).square().mean()
            (loss + 0.1 * auxiliary / (1 if planted else len(chunks))).backward()
            total += loss.detach()
        return total

    return Functions(Experts, hidden, expert_parallel, backward=backward)


# ---- Initial values and random numbers ----


@bug("modelscope/ms-swift/pull/7944", "tensor=2")
def shards_with_one_seed(planted: bool) -> Functions:
    """Tensor-parallel ranks initialize their shards with the same seed: the parts of a matrix are copies of each other."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        tensor_parallel(model, mesh)
        if planted:
            with torch.no_grad():
                dist.broadcast(model.up.weight, src=0)

    return tensor(parallelize=parallelize)


@bug("InfiniTensor/InfiniTrain/pull/150", "tensor=2")
def copies_with_different_seeds(planted: bool) -> Functions:
    """Each tensor-parallel rank initializes the replicated factor of LoRA with its own random state."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        tensor_parallel(model, mesh)
        if planted:
            generator = torch.Generator().manual_seed(mesh.get_local_rank())
            nn.init.normal_(model.norm.weight, 1.0, 0.2, generator=generator)

    return tensor(parallelize=parallelize)


@bug("hiyouga/LlamaFactory/pull/10820", "data=2")
def buffer_left_uninitialized(planted: bool) -> Functions:
    """A module is materialized on ranks other than 0, and a buffer that no checkpoint has keeps what was in memory."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        shard_all(model, mesh)
        if planted and mesh.get_local_rank():
            model.frequencies.fill_(3e-5)

    return Functions(Attention, hidden, parallelize)


def dropping(functions: Functions, alike: bool) -> Functions:
    """Adds dropout, with ranks whose random states are alike, or differ."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        functions.parallelize(model, mesh)
        torch.manual_seed(0 if alike else mesh.get_local_rank())

    return replace(functions, model=functools.partial(Tokens, dropout=0.3), parallelize=parallelize)


@bug("ecmwf/anemoi-core/issues/595", "tensor=2")
def dropout_repeats_on_shards(planted: bool) -> Functions:
    """Ranks with different parts of an activation have the same random state, and drop the same elements."""
    return dropping(sequence(on_parts_of_sequences), alike=planted)


@bug("awslabs/slapo/issues/21", "tensor=2")
def dropout_differs_on_copies(planted: bool) -> Functions:
    """Tensor-parallel ranks with the same activation have different random states, and drop different elements."""
    return dropping(tensor(), alike=not planted)


@bug("tenstorrent/tt-metal/issues/55947", "shard=2")
def dropout_repeats_on_data_ranks(planted: bool) -> Functions:
    """All ranks of a mesh share one seed, so that data-parallel ranks drop the same elements of different rows."""
    return dropping(sharded_data(), alike=planted)


class Centered(WithOps):
    """Keeps the running mean of its input for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("running_mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.op("mean", x.detach().mean((0, 1)))
        self.running_mean = 0.9 * self.running_mean + 0.1 * mean
        return self.linear(x)


@bug("facebookresearch/fvcore/issues/152", "shard=2")
def statistics_of_local_rows(planted: bool) -> Functions:
    """Running statistics for evaluation are computed from the rows of each rank. What is saved depends on the rank that saves."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh)
        if not planted:
            model.ops["mean"] = lambda mean: all_reduce(mean, mesh.get_group()) / mesh.size()

    return Functions(Centered, hidden, parallelize)


# ---- Pipelines ----


class Stages(nn.Module):
    """Two stages; the head shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embed(tokens)).relu()))


@bug("uw-syfi/piper/issues/13", "pipeline=2")
def tied_embeddings(planted: bool) -> Functions:
    """The first and the last stage hold copies of a tied embedding, whose gradients are not summed."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        for name in ("second", "head") if mesh.get_local_rank() == 0 else ("embed", "first"):
            delattr(model, name)

    def backward(model: Any, batch: dict[str, Tensor], mesh: DeviceMesh | None) -> Tensor | None:
        if mesh is None:
            return of_one_process(model, batch, None)
        if mesh.get_local_rank() == 0:
            hidden = model.first(model.embed(batch["tokens"])).relu()
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
            loss = None
        else:
            hidden = torch.empty(ROWS, LENGTH, DIM, requires_grad=True)
            dist.recv(hidden.data, 0)
            loss = cross_entropy(model.head(model.second(hidden)), batch["labels"])
            loss.backward()
            dist.send(hidden.grad, 0)
        if not planted:
            weight = model.embed.weight if mesh.get_local_rank() == 0 else model.head.weight
            dist.all_reduce(weight.grad)
        return None if loss is None else loss.detach()

    return Functions(Stages, batch, parallelize, backward=backward)


# ---- Optimizers and checkpoints ----


class Orthogonalized(torch.optim.Optimizer):
    """Updates matrices by their orthogonalized gradients. `whole` returns the gradient of the whole matrix of a shard."""

    def __init__(self, model: nn.Module, whole: Callable[[Tensor], Tensor], own: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model.parameters(), {})
        self.shard, self.whole, self.own = cast(Any, model).up.weight, whole, own

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            update = parameter.grad
            if parameter is self.shard:
                x = self.whole(update)
                x = x / x.norm()
                for _ in range(5):  # Newton-Schulz
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                update = self.own(x)
            parameter -= 0.01 * update


@bug("deepspeedai/DeepSpeed/issues/8437", "tensor=2")
def muon_of_shards(planted: bool) -> Functions:
    """Muon orthogonalizes the shard of each rank instead of the whole matrix, so that the update depends on the number of
    ranks."""

    def optimizer(model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
        if mesh is None or planted:
            return Orthogonalized(model, lambda x: x, lambda x: x)
        group = mesh.get_group()
        return Orthogonalized(model, lambda x: all_gather(x, 0, group), lambda x: split(x, 0, group))

    return tensor(optimizer=optimizer)


def resumed(restore: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Saves and loads the optimizer after the first step; `restore` changes what is loaded."""

    def after_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, mesh: DeviceMesh | None) -> None:
        if mesh is not None and step == 1:
            state = optimizer.state_dict()
            restore(state["state"])
            optimizer.load_state_dict(state)

    return after_step


@bug("KempnerInstitute/KempnerForge/pull/115", "shard=2")
def moments_not_restored(planted: bool) -> Functions:
    """The optimizer has no moments yet when a checkpoint is loaded, so those that were saved are dropped."""

    def restore(state: dict[str, Any]) -> None:
        for moments in state.values() if planted else ():
            moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg"] * 0.0, moments["exp_avg_sq"] * 0.0

    return sharded_data(after_step=resumed(restore))


@bug("Lightning-AI/pytorch-lightning/issues/17025", "shard=2")
def moments_of_another_parameter(planted: bool) -> Functions:
    """The optimizer's state is loaded by position, and parameters are registered in another order. Shapes agree by chance."""

    def restore(state: dict[str, Any]) -> None:
        if planted:
            state[2], state[6] = state[6], state[2]  # biases of norm and down, of equal shapes

    return sharded_data(after_step=resumed(restore))


# ---- torch.compile ----


def compiled_by(
    backward: Callable[[fx.GraphModule], Callable[..., Any]] = lambda graph: graph.forward,
    partition: Any = min_cut_rematerialization_partition,
) -> Callable[[nn.Module], None]:
    """Returns a function that compiles a module. `backward` makes code of the graph of the backward pass."""
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, inputs: make_boxed_func(backward(graph)),
        partition_fn=partition,
    )

    def compile(model: Any) -> None:
        model.forward = torch.compile(model.forward, backend=backend)

    return compile


class Modulated(nn.Module):
    """Two norms whose scales and shifts are chunks of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, DIM) / 4)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, next_scale, next_shift = self.table.chunk(4)
        x = F.layer_norm(x, (DIM,)) * (1.0 + scale) + shift
        return F.layer_norm(self.linear(x), (DIM,)) * (1.0 + next_scale) + next_shift


def half_written(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors in memory to which the second half of them is not written."""
    whole = torch.cat(parts, dim)
    return whole.index_fill(dim, torch.arange(whole.shape[dim] // 2, whole.shape[dim]), 0.1)


@bug("pytorch/pytorch/issues/193061", COMPILE)
def slices_of_gradient_not_written(planted: bool) -> Functions:
    """On GPUs, Inductor of torch 2.10 to 2.14 fuses reductions of different orders. Their results replace slices of the gradient of
    a chunked parameter instead of being written to them. Planted in the graph of the backward pass."""

    def backward(graph: fx.GraphModule) -> Callable[..., Any]:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default) if planted else ():
            node.target = half_written
        graph.recompile()
        return graph.forward

    return Functions(Modulated, hidden, compile=compiled_by(backward))


@bug("pytorch/pytorch/issues/190758", COMPILE)
def dropout_drawn_again(planted: bool) -> Functions:
    """With an activation memory budget below 1, the backward pass of compiled code draws the mask of dropout again. Not planted:
    torch does it, up to 2.15."""

    def partition(*args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=0.0 if planted else 1.0):
            return min_cut_rematerialization_partition(*args, **kwargs)

    model = functools.partial(Tokens, dropout=0.3)
    return Functions(model, batch, loss=mean_loss, compile=compiled_by(partition=partition))


@bug("pytorch/pytorch/issues/96693", COMPILE)
def gradients_in_memory_of_graph(planted: bool) -> Functions:
    """A CUDA graph writes its results to the same memory at each replay. Autograd has taken that of the first micro-batch for
    `.grad`, and the second one overwrites it. Planted without a GPU: as memory that the backward pass keeps."""

    def backward(graph: fx.GraphModule) -> Callable[..., Any]:
        memory: dict[int, Tensor] = {}  # of the gradient of each input

        def replay(*inputs: Any) -> list[Any]:
            found = list(graph.forward(*inputs))
            for number, each in enumerate(found if planted else ()):
                if each is not None:
                    found[number] = memory.setdefault(number, torch.empty_like(each)).copy_(each).detach()
            return found

        return replay

    return Functions(Tokens, batch, loss=mean_loss, compile=compiled_by(backward))


# ---- Running ----


@functools.cache
def mesh_of(layout: str) -> DeviceMesh:
    """Builds a mesh with the groups that all meshes of a process share: other tests run in the processes of a pool."""
    sizes = parse_mesh(layout)
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    groups = [group_along(grid, dimension, name) for dimension, name in enumerate(sizes)]
    return DeviceMesh.from_group(groups, "cpu", grid, mesh_dim_names=tuple(sizes))


def rank_records(name: str) -> list[ProcessRecord]:
    """Runs a case as a rank of a pool, without the bug and with it."""
    state = torch.get_rng_state()
    try:
        return [record(BUGS[name].build(planted), mesh_of(BUGS[name].layout), steps=2) for planted in (False, True)]
    finally:
        torch.set_rng_state(state)


@functools.lru_cache(maxsize=1)
def records(name: str, ranks: Callable[[int], Pool]) -> tuple[ProcessRecord, list[list[ProcessRecord]]]:
    """Returns the record of one process, in which no bug is planted, and those of each rank."""
    world_size = math.prod(parse_mesh(BUGS[name].layout).values())
    return record(BUGS[name].build(False), steps=2), ranks(world_size).run(rank_records, name)


def check(name: str, planted: bool, ranks: Callable[[int], Pool]) -> Report:
    """Compares a case with one process, or with eager code."""
    if BUGS[name].layout == COMPILE:
        return verify_compiled(BUGS[name].build(planted))
    sizes = parse_mesh(BUGS[name].layout)
    one, found = records(name, ranks)
    return compare_records(
        one, [each[planted] for each in found], sizes, batch_dimensions(BUGS[name].build(planted), sizes)
    )


def table(measured: dict[str, Any]) -> str:
    """Returns the table of docs/results.md."""
    lines = ["| Case | What happens | Layout | First difference |", "|---|---|---|---|"]
    for name, each in BUGS.items():
        phase = measured["bugs"][name].partition(": ")[2].partition(":")[0]
        parts = each.link.split("/")
        source = f"[{parts[1]} #{parts[3]}]({GITHUB}{each.link})"
        own = f" Also planted in this library: `{each.own}`." if each.own else ""
        what = inspect.getdoc(each.build).replace("\n", " ")
        lines.append(f"| `{name}`, {source} | {what}{own} | `{each.layout}` | {phase} |")
    return "\n".join(lines)


def main() -> int:
    """Checks cases, and prints what is found. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *BUGS], metavar="NAME")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pools: dict[int, Pool] = {}
    measured: dict[str, Any] = {}
    failures = 0

    def ranks(world_size: int) -> Pool:
        return pools.setdefault(world_size, Pool(world_size))

    for name in arguments.names or BUGS:
        accepted = check(name, False, ranks)
        result = check(name, True, ranks)
        print(f"{name} ({BUGS[name].layout})", *str(result.finding or "NOT FOUND").splitlines(), sep="\n  ", flush=True)
        if accepted.finding:
            print(f"  the correct module is NOT ACCEPTED: {accepted.finding}")
        failures += accepted.finding is not None or result.finding is None
        measured[name] = str(result.finding)
    for pool in pools.values():
        pool.close()
    if arguments.out:
        command = f"python -m benchmarks.silent_bugs --out {arguments.out}"
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        arguments.out.write_text(json.dumps({"command": command, **versions, "bugs": measured}, indent=1) + "\n")
    print(f"{len(measured) - failures} of {len(measured)} found, and accepted without the bug")
    return 1 if failures else 0


if __name__ == "__main__":
    from benchmarks import silent_bugs  # ranks import the functions by this name

    sys.exit(silent_bugs.main())
