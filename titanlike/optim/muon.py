"""Muon: momentum whose matrices are orthogonalized, for the matrices of the blocks.

The update is computed from the whole matrix under any layout: `whole_matrices` assembles each on one rank. The arithmetic equals
`torch.optim.Muon`, which takes matrices that are not sharded. A stack of matrices (experts, outputs, inputs) may be sharded along
its first dimension: each rank orthogonalizes those that it has.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from titanlike.config import UserError
from titanlike.config.optimizer import MUON_STEPS
from titanlike.optim.qk_clip import QKClip
from titanlike.optim.whole_matrices import WholeMatrices
from titanlike.utils.dtensor import local_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration: its slope at 0 is as large as possible, so that few steps suffice."""
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Args:
        parameters: Matrices, stacks of matrices, or groups of them.
        lr: Learning rate.
        weight_decay: Decoupled weight decay coefficient.
        momentum: Decay rate of the momentum.
        num_steps: Newton-Schulz steps.
        lr_scaling: How the size of the update depends on the shape of the matrix. "rms": its root mean square is about 0.2,
            as in AdamW, so that both can share a learning rate. "spectral": its spectral norm is sqrt(outputs / inputs),
            at least 1.
        dtype: Of the orthogonalization and of what ranks exchange for it. None: bfloat16 on GPUs, float32 on CPUs.
        qk_clip: Clips attention logits after each step. None: they are not clipped.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        num_steps: int = MUON_STEPS,
        lr_scaling: Literal["rms", "spectral"] = "rms",
        dtype: torch.dtype | None = None,
        qk_clip: QKClip | None = None,
    ) -> None:
        super().__init__(parameters, dict(lr=lr, weight_decay=weight_decay))
        self.momentum, self.num_steps, self.lr_scaling, self.dtype = momentum, num_steps, lr_scaling, dtype
        self.qk_clip = qk_clip
        # All ranks take part in an exchange with gradients: one for each group, made now.
        self.exchanges = [WholeMatrices([p for p in group["params"] if p.dim() == 2]) for group in self.param_groups]
        for stack in (p for group in self.param_groups for p in group["params"] if p.dim() == 3):
            if local_tensor(stack).shape[1:] != stack.shape[1:]:
                raise UserError(
                    f"Muon takes stacks of matrices that are sharded along their first dimension, but a stack of shape "
                    f"{tuple(stack.shape)} is sharded along another; use AdamW for it"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step. Returns the result of `closure`, which is called first."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, exchange in zip(self.param_groups, self.exchanges, strict=True):
            whole = [parameter for parameter in group["params"] if parameter.dim() == 2]
            for matrices in exchange.rounds:
                parameters = [whole[index] for index in matrices.indices]
                directions = [self._direction(parameter) for parameter in parameters]
                updates = exchange.apply(matrices, directions, partial(orthogonalize, num_steps=self.num_steps))
                for parameter, update in zip(parameters, updates, strict=True):
                    self._update(parameter, update, group)
            for stack in (parameter for parameter in group["params"] if parameter.dim() == 3):
                self._update(stack, orthogonalize(self._direction(stack), self.num_steps), group)
        if self.qk_clip:
            self.qk_clip.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, and the attention logits of the step."""
        super().zero_grad(set_to_none)
        if self.qk_clip:
            self.qk_clip.reset()

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What to record of each step: the largest attention logit, if they are clipped."""
        return {"max_attention_logit": self.qk_clip.max_logit} if self.qk_clip else {}

    def _update(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        weight, lr = local_tensor(parameter), group["lr"]
        weight.mul_(1.0 - lr * group["weight_decay"])
        weight.add_(update, alpha=-lr * update_scale(parameter.shape, self.lr_scaling))

    def _direction(self, parameter: Tensor) -> Tensor:
        """Updates the momentum of this rank's shard. Returns its Nesterov momentum."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = local_tensor(cast(Tensor, parameter.grad))
        buffer = local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1.0 - self.momentum)
        dtype = self.dtype or (torch.bfloat16 if gradient.is_cuda else torch.float32)
        return gradient.lerp(buffer, self.momentum).to(dtype)


def orthogonalize(matrix: Tensor, num_steps: int = MUON_STEPS) -> Tensor:
    """Returns about U V^T of a matrix U S V^T, or of each matrix of a stack, with singular values between 0.5 and 1.5, by
    Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)  # no singular value above 1
    if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2]:
        x = _steps_of_gram(x @ x.mT, num_steps) @ x
    else:
        for _ in range(num_steps):
            gram = x @ x.mT
            x = _add_product(x, _add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _steps_of_gram(gram: Tensor, num_steps: int) -> Tensor:
    """Returns the matrix that multiplies `x` in all steps, from X X^T: a quarter less work for a matrix that is twice as wide as
    high. In bfloat16, rounding errors would grow with the steps."""
    a, b, c = COEFFICIENTS
    product = gram
    for step in range(num_steps):
        factor = _add_product(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor @ product if step else factor
        if step < num_steps - 1:
            gram = factor @ gram @ factor
    return product


def _add_product(matrix: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    add = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    return add(matrix, left, right, beta=beta, alpha=alpha)


def update_scale(shape: torch.Size, scaling: str) -> float:
    """Returns the factor of the learning rate for a matrix of this shape."""
    outputs, inputs = shape[-2:]
    return 0.2 * math.sqrt(max(outputs, inputs)) if scaling == "rms" else math.sqrt(max(1.0, outputs / inputs))
