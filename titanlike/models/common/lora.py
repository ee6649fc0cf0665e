"""LoRA: low-rank adapters beside the linear layers of a model whose own parameters are frozen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.config.finetune import Lora
from titanlike.utils.modules import rebuild, replace_modules, without_owner

A, B = "lora_A", "lora_B"


def apply_lora(model: nn.Module, blocks: nn.ModuleDict, lora: Lora) -> None:
    """Freezes the parameters of a model, and adds two trainable matrices to each selected linear layer of the blocks, in place.

    Apply it before tensor parallelism and FSDP. The parameters of the model keep their names. Each selected layer also gets
    `lora_A` (rank, inputs) and `lora_B` (outputs, rank), which `model.init_parameter` then initializes: B to 0, so that the model
    starts with the results that it had.
    """
    model.requires_grad_(False)
    names = {module: name for name, module in model.named_modules()}
    linears = {names[module]: module for module in blocks.modules() if isinstance(module, nn.Linear)}
    selected = [linear for name, linear in linears.items() if lora.selects(name)]
    if not selected:
        raise UserError(
            f"lora.layers = {list(lora.layers)} selects no linear layer of {type(model).__name__}; its blocks have "
            f"{', '.join(list(linears)[:7])}"
        )
    replace_modules(model, {linear: LoRALinear.of(linear, lora.rank, lora.alpha / lora.rank) for linear in selected})
    init_parameter: Any = getattr(model, "init_parameter", None)

    @torch.no_grad()
    def init_with_lora(name: str, value: Tensor, generator: torch.Generator) -> None:
        if name.endswith(f".{A}"):
            value.uniform_(-1.0, 1.0, generator=generator).mul_(value.shape[1] ** -0.5)
        elif name.endswith(f".{B}"):
            value.zero_()
        else:
            init_parameter(name, value, generator)

    model.init_parameter = init_with_lora  # type: ignore[assignment]


@contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """Computes without the adapters in this context: as the model that they were added to."""
    layers = [layer for layer in map(without_owner, model.modules()) if isinstance(layer, LoRALinear)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


class LoRALinear(nn.Linear):
    """A linear layer that adds the product of two matrices of a low rank. It multiplies by its weight as the layer that it
    replaces: with `F.linear`, or in float8."""

    casts_parameters = True
    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    adapts = True

    @classmethod
    def of(cls, linear: nn.Linear, rank: int, scale: float) -> "LoRALinear":
        """Returns a layer with the parameters of `linear`, and two more."""
        new = rebuild(linear, cls, matmul=getattr(linear, "matmul", F.linear), lora_scale=scale)
        options: Any = dict(device=linear.weight.device, dtype=linear.weight.dtype)
        new.register_parameter(A, nn.Parameter(torch.empty(rank, linear.in_features, **options)))
        new.register_parameter(B, nn.Parameter(torch.empty(linear.out_features, rank, **options)))
        return new

    def forward(self, x: Tensor) -> Tensor:
        # Under tensor parallelism, either A has a shard of the inputs and the sum over ranks follows, or B has a shard of the
        # outputs.
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = self.matmul(x, self.weight.to(x.dtype), bias)
        if not self.adapts:
            return out
        return out + self.lora_scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, scale={self.lora_scale:g}, matmul={getattr(self.matmul, '__name__', self.matmul)}"
        )
