"""A plain cross entropy, and the errors of the chunked one against it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.losses.own import LossFunction, OwnLoss


def reference(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (x.double() @ weight.double().t()).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    soft_cap: float = 0.0,
    auxiliary: tuple[int, float] | None = None,
    function: LossFunction | None = None,
    **options: Any,
) -> Tensor:
    loss = CrossEntropy(**options) if function is None else OwnLoss(function, **options)
    others: dict[str, Any] = {} if auxiliary is None else {"auxiliary": auxiliary}
    return loss(Logits(x, weight, bias, soft_cap), labels, **others)


def weight_gradient_errors(chunks: Sequence[int], tokens: int = 2048, device: str = "cpu") -> list[float]:
    """Returns the relative error of the weight's gradient in bfloat16 for each chunk size, against float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator).to(device, torch.bfloat16)
    weight = (0.1 * torch.randn(256, 64, generator=generator)).to(device, torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 256, (tokens,), generator=generator).to(device)
    exact = torch.autograd.grad(reference(x[None], weight, labels), weight)[0].double()
    errors = []
    for chunk in chunks:
        (found,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels, chunk=chunk) / 7, weight)
        assert found.dtype == torch.bfloat16
        errors.append(((7 * found.double() - exact).norm() / exact.norm()).item())
    return errors
