"""A plain cross entropy, and the errors of the chunked one against it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.losses.own import OwnLoss


def reference(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (x.double() @ weight.double().t()).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(x: Tensor, weight: Tensor | None, labels: Tensor, **options: Any) -> Tensor:
    """Options are those of `Logits`, of the loss, and `auxiliary`; with a `function`, it is that of an `OwnLoss`."""
    logits = Logits(x, weight, options.pop("bias", None), options.pop("soft_cap", 0.0))
    others = {name: options.pop(name) for name in ("auxiliary",) if name in options}
    function = options.pop("function", None)
    loss = CrossEntropy(**options) if function is None else OwnLoss(function, **options)
    return loss(logits, labels, **others)


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
