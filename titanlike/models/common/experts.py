"""A mixture of experts in place of a feed-forward layer: a router selects for each token the experts that compute it.

No token is dropped: the experts compute as many tokens as the router sends to each, in one grouped matmul per matrix.

The load of the experts can be balanced in two ways. `balance_loss` is the coefficient of an auxiliary loss of each sequence: it
does not depend on how sequences are distributed over micro-batches and ranks. `balance_bias_rate` adds a bias to the scores for the
selection, by which `optim/balance.py` steps according to the number of tokens of each expert. Both, and the metrics, read what each
router has counted, which blocks return to the model: a block that activation checkpointing computes twice counts once.

Shapes: B sequences, T tokens, D model dimension, F hidden dimension of an expert, E experts, A experts of a token, M = B * T * A.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.losses import IGNORE
from titanlike.losses.terms import BALANCE_LOSS, LossTerms
from titanlike.models.common.clamped_swiglu import clamped_swiglu
from titanlike.models.common.grouped_matmul import add_bias_of_group, grouped_matmul
from titanlike.models.moe.config import MoeConfig
from titanlike.utils.modules import without_owner


class Routes(NamedTuple):
    """What a router returns."""

    weights: Tensor  # of each token's experts (B, T, A)
    indices: Tensor  # of each token's experts (B, T, A)
    load: Tensor  # tokens of each expert (B, E), in int64
    counts: Tensor | None
    """In training, the load (B, 1, E) or, for `balance_loss`, with the sum of the probabilities of each expert (B, 2, E)."""


class Router(nn.Module):
    """Selects the experts of each token by the scores of a linear layer."""

    casts_parameters = True
    float32_parameters = ("expert_bias",)  # whose steps a bfloat16 would round away, and with it the order of experts
    counts_load = False
    """Whether to return counts in training also where nothing balances the load."""
    load: Tensor | None = None
    """Tokens of each expert (E,) on this rank since the last step of the optimizer, in int64."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        bias = torch.empty(config.num_experts) if config.has_expert_bias else None
        self.expert_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Routes:
        """Selects the experts of x (B, T, D)."""
        config = self.config
        # In float32, of factors in the compute dtype: a token must not get other experts because scores are rounded.
        logits: Tensor = _Float32Linear.apply(x.flatten(0, -2), self.weight.to(x.dtype))
        if self.bias is not None:
            logits = logits + self.bias.to(x.dtype).float()
        logits = logits.view(*x.shape[:-1], config.num_experts)  # (B, T, E)
        scores = logits.softmax(-1) if config.router_score == "softmax" else logits.sigmoid()
        ranking = scores.detach()
        if self.expert_bias is not None:  # in host memory with `cpu_offload`
            ranking = ranking + self.expert_bias.to(x.device, non_blocking=True)
        if config.groups_per_token < config.num_expert_groups:
            ranking = limit_to_groups(ranking, config)
        indices = ranking.topk(config.experts_per_token, dim=-1).indices  # (B, T, A)
        experts = torch.arange(config.num_experts, device=x.device)
        load = (indices[..., None] == experts).sum(dim=(1, 2))  # (B, E)
        counts = None
        if torch.is_grad_enabled() and config.balance_loss:
            probs = scores if config.router_score == "softmax" else scores / scores.sum(-1, keepdim=True)
            counts = torch.stack((load.float(), probs.sum(1)), 1)  # (B, 2, E); a float32 counts to 16 million exactly
        elif torch.is_grad_enabled() and (self.counts_load or config.balance_bias_rate):
            counts = load[:, None]  # (B, 1, E)
        weights = scores.gather(-1, indices)
        if config.normalize_router:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes((weights * config.router_scale).to(x.dtype), indices, load, counts)

    @torch.no_grad()
    def add_load(self, counts: Tensor) -> None:
        """Adds the load of a micro-batch, in int64: a sum over ranks must not depend on how it is rounded."""
        load = counts[:, 0].sum(0, dtype=torch.int64)  # (E,)
        self.load = load if self.load is None else self.load + load

    def reset_load(self) -> None:
        """Forgets the load, after a step of the optimizer."""
        self.load = None


class _Float32Linear(torch.autograd.Function):
    """A linear layer whose output is in float32. It keeps and differentiates its input (M, D) and its weight (E, D) in their own
    dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()  # only CUDA has this matmul; float32 has all products of two bfloat16

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), (needs_x, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        gradient = gradient.to(x.dtype)
        return gradient @ weight if needs_x else None, gradient.t() @ x if needs_weight else None


class BalanceLoss(nn.Module):
    """The auxiliary loss that balances the load of the experts, as `load_balancing_loss_func` of transformers and its coefficient
    `router_aux_loss_coef`: the number of experts x the sum over the experts of the fraction of tokens x the mean probability, both
    over the tokens of all blocks. It is computed per sequence, with the weight of the sequence's valid labels."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.num_replicas = 1  # ranks that compute the same tokens and sum their gradients: tensor-parallel ranks
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _unchanged  # over ranks that share each sequence
        self.terms: LossTerms | None = None

    def forward(self, loss: Tensor, counts: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, whose gradient now contains the auxiliary loss's.

        Args:
            loss: summed over the valid labels (B, T).
            counts: what the routers return (B, 2, E), summed over blocks.
        """
        config = self.config
        load, probs = counts.unbind(1)
        num_valid = (labels != IGNORE).sum(1, keepdim=True).float()
        num_own = num_valid  # of this rank's part of the sequence
        sums = torch.cat((load.detach(), num_valid), 1)  # (B, E + 1)
        sums = self.sum_over_sequence(sums)
        load, num_valid = sums[:, :-1], sums[:, -1]
        num_routed = load.sum(1, keepdim=True) / config.experts_per_token  # (B, 1): tokens x blocks
        auxiliary = config.num_experts * (load / num_routed * probs / num_routed).sum(1) * num_valid  # (B,)
        auxiliary = auxiliary.sum()
        if self.terms is not None:
            self.terms.add(BALANCE_LOSS, auxiliary, num_own.sum())
        weighted = auxiliary * (config.balance_loss / self.num_replicas)
        return loss + (weighted - weighted.detach())


def _unchanged(values: Tensor) -> Tensor:
    return values


class Experts(nn.Module):
    """Feed-forward layers with a gate, whose matrices are stacked, as are their biases, if they have some."""

    casts_parameters = True

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        shapes = {name.rpartition(".")[2]: shape for name, shape in config.expert_parameters().items()}
        self.limit, self.has_biases = config.swiglu_limit, config.expert_biases
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(shapes[name])) for name in ("w1", "w2", "w3"))
        self.w1_bias, self.w2_bias, self.w3_bias = (
            nn.Parameter(torch.empty(shapes[name][:2])) if self.has_biases else None for name in ("w1", "w2", "w3")
        )

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor, load: Tensor) -> Tensor:
        """Returns the weighted sum of the results of each token's experts (B, T, D), for what a router returns for x (B, T, D)."""
        order = indices.flatten().argsort(stable=True)  # (M,): rows by expert
        inverse = inverse_of(order)
        rows = permute_rows(x.flatten(0, 1), order, inverse, repeats=indices.shape[-1])  # (M, D)
        rows = self.compute(rows, load.sum(0))
        rows = permute_rows(rows, inverse, order).unflatten(0, indices.shape)  # (B, T, A, D)
        return (rows * weights[..., None]).sum(-2)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the results (M, D) for rows (M, D) that are sorted by expert, of which each expert has a count (E,)."""
        ends = counts.cumsum(0).to(torch.int32)
        experts = ends
        if self.has_biases:  # the expert of each row (M,)
            experts = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = grouped_matmul(x, weight.to(x.dtype), ends)
            return out if bias is None else add_bias_of_group(out, bias.to(x.dtype), experts, ends)

        def hidden() -> Tensor:  # (M, F); nested, so that no product lives longer than it is read
            if self.limit:
                gate, x = linear(rows, self.w1, self.w1_bias), linear(rows, self.w3, self.w3_bias)
                return clamped_swiglu(gate, x, self.limit)
            return F.silu(linear(rows, self.w1, self.w1_bias)) * linear(rows, self.w3, self.w3_bias)

        return linear(hidden(), self.w2, self.w2_bias)


class MixtureOfExperts(nn.Module):
    """A router and its experts and, optionally, a feed-forward layer that computes every token."""

    def __init__(self, config: MoeConfig, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the results and, in training, if the load is balanced or counted, the counts of the router."""
        # The experts last, so that their backward pass is the first: if a block is recomputed, FSDP has gathered them by then.
        shared = None if self.shared is None else self.shared(x)
        *routes, counts = self.router(x)
        out = self.call_experts(self.experts, x, *routes)
        out = out if shared is None else out + shared
        return out if counts is None else (out, counts)

    @staticmethod
    def call_experts(experts: nn.Module, *inputs: Tensor) -> Tensor:
        """Calls the experts."""
        return cast(Tensor, experts(*inputs))


def routers(model: nn.Module) -> Iterator[Router]:
    """Yields the routers of a model."""
    return (cast(Router, module) for module in model.modules() if isinstance(without_owner(module), Router))


def load_of(model_routers: Sequence[Router]) -> Tensor | None:
    """Returns the load of routers (routers, E) on this rank, in int64, or None if no forward pass has counted tokens."""
    loads = [router.load for router in model_routers if router.load is not None]
    return torch.stack(loads) if loads and len(loads) == len(model_routers) else None


def limit_to_groups(ranking: Tensor, config: MoeConfig) -> Tensor:
    """Returns scores for the selection (B, T, E), without the experts outside of the best groups of each token. The score of a
    group is the sum of its best experts."""
    grouped = ranking.unflatten(-1, (config.num_expert_groups, -1))  # (B, T, G, E / G)
    best = (
        grouped.topk(config.experts_of_group_score, dim=-1).values.sum(-1).topk(config.groups_per_token, dim=-1).indices
    )
    groups = torch.arange(config.num_expert_groups, device=ranking.device)
    is_best = (best[..., None] == groups).any(-2)  # (B, T, G)
    return grouped.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)


def inverse_of(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation (M,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor, repeats: int = 1) -> Tensor:
    """Returns the rows of x, each `repeats` times, in another order, of which `inverse` is the inverse. The backward pass permutes
    back, without the atomic additions of the gradient of indexing."""
    return _Permute.apply(x, order, inverse, repeats)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.repeats = repeats
        return x[order // repeats if repeats > 1 else order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        gradient = gradient[inverse]
        return gradient.unflatten(0, (-1, ctx.repeats)).sum(1) if ctx.repeats > 1 else gradient, None, None, None
