"""A mixture of experts in place of a feed-forward layer: a router selects for each token the experts that compute it.

No token is dropped: the experts compute as many tokens as the router sends to each, in one grouped matmul per matrix.

The load of the experts can be balanced in two ways. `balance_loss` is an auxiliary loss of each sequence, as in DeepSeek-V3: it
does not depend on how sequences are distributed over micro-batches and ranks. `balance_bias_rate` adds a bias to the scores for the
selection. What the backward pass accumulates in the gradient of that bias is the number of tokens of each expert above the average,
so that the transforms sum it over micro-batches and ranks like any gradient. `optim/balance.py` steps by its sign.

Shapes: B sequences, T tokens, D model dimension, F hidden dimension of an expert, E experts, A experts of a token, M = B * T * A.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.model_configs import MoeConfig
from titanlike.models.grouped_matmul import grouped_matmul

EXPERT_BIAS = "expert_bias"  # name of the parameter whose gradient is a load


class Router(nn.Module):
    """Selects the experts of each token by the scores of a linear layer."""

    num_replicas = 1
    """Number of ranks that route the same tokens and sum their gradients: tensor-parallel ranks."""
    loss_scale: Tensor | float = 1.0
    """Factor of the auxiliary loss, which is summed over tokens like the loss that the model returns."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        has_bias = config.balance_bias_rate > 0
        self.expert_bias = nn.Parameter(torch.empty(config.num_experts)) if has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weights and the indices of the experts (B, T, A) of x (B, T, D), and the tokens of each expert (B, E)."""
        config = self.config
        logits = F.linear(x, self.weight).float()  # (B, T, E)
        scores = logits.softmax(-1) if config.router_score == "softmax" else logits.sigmoid()
        bias = self.expert_bias
        ranking = scores.detach() if bias is None else scores.detach() + bias.detach().float()
        indices = ranking.topk(config.experts_per_token, dim=-1).indices  # (B, T, A)
        experts = torch.arange(config.num_experts, device=x.device)
        load = (indices[..., None] == experts).sum(dim=(1, 2))  # (B, E)
        if torch.is_grad_enabled() and config.balance_loss:
            of_sequence = self.sum_over_sequence(load).float()
            fractions = of_sequence * (config.num_experts / of_sequence.sum(-1, keepdim=True))  # (B, E), 1 on average
            shares = scores / scores.sum(-1, keepdim=True)  # as softmax scores are already
            scale = self.loss_scale * (config.balance_loss / self.num_replicas)
            scores = _WithLoss.apply(scores, (shares * fractions[:, None]).sum() * scale)
        if torch.is_grad_enabled() and bias is not None:
            excess = load.sum(0) - load.sum() / config.num_experts  # (E,)
            scores = _WithLoad.apply(scores, bias, excess)
        weights = scores.gather(-1, indices)
        if config.normalize_router:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights * config.router_scale).to(x.dtype), indices, load

    @staticmethod
    def sum_over_sequence(load: Tensor) -> Tensor:
        """Sums over the ranks that share each sequence. Context parallelism replaces it."""
        return load


class Experts(nn.Module):
    """Feed-forward layers with a SiLU gate, whose matrices are stacked."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        shapes = {name.rpartition(".")[2]: shape for name, shape in config.expert_parameters().items()}
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(shapes[name])) for name in ("w1", "w2", "w3"))

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor, load: Tensor) -> Tensor:
        """Returns the weighted sum of the results of each token's experts (B, T, D), for what a router returns for x (B, T, D)."""
        num_experts = indices.shape[-1]
        order = indices.flatten().argsort(stable=True)  # (M,): rows by expert
        inverse = order.argsort()
        rows = permute_rows(x.flatten(0, 1), order, inverse, num_experts)  # (M, D)
        rows = self.compute(rows, load.sum(0))
        rows = permute_rows(rows, inverse, order).unflatten(0, indices.shape)  # (B, T, A, D)
        return (rows * weights[..., None]).sum(-2)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the results (M, D) for rows (M, D) that are sorted by expert, of which each expert has a count (E,)."""
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(grouped_matmul(rows, self.w1, ends)) * grouped_matmul(rows, self.w3, ends)  # (M, F)
        return grouped_matmul(hidden, self.w2, ends)


class MixtureOfExperts(nn.Module):
    """A router and its experts and, optionally, a feed-forward layer that computes every token."""

    def __init__(self, config: MoeConfig, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        # The experts last, so that their backward pass is the first: if a block is recomputed, FSDP has gathered them by then.
        shared = None if self.shared is None else self.shared(x)
        out = self.call_experts(self.experts, x, *self.router(x))
        return out if shared is None else out + shared

    @staticmethod
    def call_experts(experts: nn.Module, *inputs: Tensor) -> Tensor:
        """Calls the experts. Expert parallelism replaces it by a call that is not compiled."""
        return experts(*inputs)


def routers(model: nn.Module) -> Iterator[Router]:
    """Yields the routers of a model."""
    return (module for module in model.modules() if isinstance(module, Router))


def scale_balance_loss(model: nn.Module, scale: Tensor) -> None:
    """Sets the factor of the auxiliary losses to that of the loss: 1 / the number of tokens of the global batch."""
    for router in routers(model):
        router.loss_scale = scale


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


class _WithLoss(torch.autograd.Function):
    """Returns x. The backward pass computes the gradients of a loss (), too, which is not part of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class _WithLoad(torch.autograd.Function):
    """Returns the scores. The gradient of the bias is the number of tokens of each expert above the average."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, excess: Tensor) -> Tensor:
        ctx.save_for_backward(excess)
        ctx.dtype = bias.dtype
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.saved_tensors[0].to(ctx.dtype), None
