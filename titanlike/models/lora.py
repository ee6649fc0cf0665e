"""LoRA: low-rank adapters beside the linear layers of a model whose own parameters are frozen."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.config.finetune import Lora

A, B = "lora_A", "lora_B"


def apply_lora(model: nn.Module, blocks: nn.ModuleDict, lora: Lora) -> None:
    """Freezes the parameters of a model, and adds two trainable matrices to each selected linear layer of the blocks, in place.

    Apply it before tensor parallelism and FSDP. The parameters of the model keep their names. Those of a linear layer also get
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
    cached_class: Any = cache(_lora_class)  # blocks of the same classes share one compiled forward
    for linear in selected:
        adapted: Any = linear
        options: Any = dict(device=linear.weight.device, dtype=linear.weight.dtype)
        adapted.register_parameter(A, nn.Parameter(torch.empty(lora.rank, linear.in_features, **options)))
        adapted.register_parameter(B, nn.Parameter(torch.empty(linear.out_features, lora.rank, **options)))
        adapted.lora_scale = lora.alpha / lora.rank
        adapted.__class__ = cached_class(type(linear))
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


def _lora_class(linear_class: Any) -> Any:
    """Returns a subclass of a linear layer that adds the product of the two matrices."""

    class LoraLinear(linear_class):  # type: ignore[misc]
        lora_scale: float

        def forward(self, x: Tensor) -> Tensor:
            # Under tensor parallelism, either A has a shard of the inputs and the sum over ranks follows, or B has a shard of
            # the outputs.
            return super().forward(x) + self.lora_scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    LoraLinear.__name__ = LoraLinear.__qualname__ = linear_class.__name__
    return LoraLinear
