"""Memory-efficient AdamW: moments in bfloat16 or 8 bits, and bfloat16 weights updated with stochastic rounding.

Rounding changes the two moments independently: `exp_avg_sq` can become too small for its `exp_avg`, and the update, which divides
by its root, too large by orders of magnitude. Two rules prevent this: a positive `exp_avg_sq` is never rounded to 0, and
`exp_avg_sq` is never less than what any sequence of gradients with this `exp_avg` has.

Its state is sharded like the weights, and random bits depend on an element's position in the full weight. A resume on another
layout therefore reads the same values and rounds alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlike.config.layout import BLOCK
from titanlike.utils.compat import local_shape_and_offset
from titanlike.utils.counter_rng import derive_seed, hash_u32
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.suppress_warnings import suppress_import_warnings

CHUNK = 1 << 22  # elements updated at once: temporaries take many times the memory of the state
MOMENTS = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with float32 arithmetic and low-precision state."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: Literal["full", "bfloat16", "8bit"],
        seeds: Mapping[Tensor, int],
    ) -> None:
        """`seeds` maps each bfloat16 weight that uses stochastic rounding to its seed."""
        super().__init__(parameters, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.state_dtype = state_dtype
        self.seeds = seeds
        self._factor: Tensor | None = None

    def scale_in_step(self, factor: Tensor) -> set[Tensor]:
        """Multiplies gradients by `factor` in the next step, if all are on GPUs, where that is free. Returns their parameters."""
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        on_gpu = all(parameter.is_cuda for parameter in parameters)
        self._factor = factor if on_gpu else None
        return parameters if on_gpu else set()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step. Returns the result of `closure`, which is called first."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        self._factor = None
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state without `torch.optim.Optimizer`'s cast to the weight's dtype."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            self.state[parameter] = dict(state_dict["state"].get(index, {}))

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        step, lr, eps, (beta1, beta2) = state["step"].item(), group["lr"], group["eps"], group["betas"]
        decay, corrections = 1.0 - lr * group["weight_decay"], (1.0 - beta1**step, 1.0 - beta2**step)
        # Tensors: a compiled function recompiles for every new Python number.
        numbers = [lr, decay, *corrections, _least_square(beta1, beta2, step)]
        scalars = torch.tensor(numbers, dtype=torch.float32).unbind()
        weight = _as_blocks(local_tensor(parameter))
        gradient = _as_blocks(local_tensor(cast(Tensor, parameter.grad)).contiguous())
        moments = {name: _as_blocks(local_tensor(value), name) for name, value in state.items() if name != "step"}
        codebooks = {name: _codebook(name, weight.device) for name in MOMENTS if self.state_dtype == "8bit"}
        seed = self.seeds.get(parameter)
        update = _compiled_update() if weight.is_cuda else _update
        num_rows = max(1, CHUNK // weight.shape[1])
        for first in range(0, weight.shape[0], num_rows):
            rows = slice(first, first + num_rows)
            bits = None
            if seed is not None:
                step_seed, offset = derive_seed(seed, f"step {step:.0f}"), first * weight.shape[1]
                bits = _random_bits(parameter, step_seed, offset, weight[rows].numel()).view_as(weight[rows])
            chunk = {name: value[rows] for name, value in moments.items()}
            rest = (chunk, scalars, self._factor, bits, codebooks)
            update(weight[rows], gradient[rows], *rest, beta1=beta1, beta2=beta2, eps=eps)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = {"step": torch.tensor(0.0)}
        if self.state_dtype == "8bit" and parameter.dim() >= 2 and parameter.shape[-1] % BLOCK == 0:
            codes = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in MOMENTS}
            return step | codes | {f"{name}_scale": _block_scales(parameter) for name in MOMENTS}
        # In 8-bit mode, norms, biases and matrices that do not divide into blocks have float32 moments.
        dtype = {"full": parameter.dtype, "bfloat16": torch.bfloat16, "8bit": torch.float32}[self.state_dtype]
        return step | {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}


def _update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    scalars: Sequence[Tensor],
    factor: Tensor | None,
    bits: Tensor | None,
    codebooks: dict[str, Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    lr, decay, correction1, correction2, least_square = scalars
    gradient = gradient.float() if factor is None else gradient.float() * factor
    mean = _dequantize(state, "exp_avg", codebooks).lerp(gradient, 1.0 - beta1)
    square = _dequantize(state, "exp_avg_sq", codebooks).lerp(gradient.square(), 1.0 - beta2)
    square = square.maximum(mean.square() * least_square)
    new = weight.float() * decay - lr * ((mean / correction1) / ((square / correction2).sqrt() + eps))
    if bits is not None:
        # Add 16 random bits below bfloat16's mantissa, then truncate: rounds up with the probability of the fraction.
        new = ((new.view(torch.int32) + bits) & -65536).view(torch.float32)
    weight.copy_(new)
    _quantize(state, "exp_avg", mean, codebooks)
    _quantize(state, "exp_avg_sq", square, codebooks)


def _least_square(beta1: float, beta2: float, step: float) -> float:
    """Returns the least `exp_avg_sq` of any sequence of gradients whose `exp_avg` is 1.

    By the Cauchy-Schwarz inequality, `exp_avg`, a sum of (1 - beta1) beta1^i g_i, has a square of at most `exp_avg_sq`, the sum of
    (1 - beta2) beta2^i g_i^2, times the sum of (1 - beta1)^2 / (1 - beta2) (beta1^2 / beta2)^i.
    """
    if beta1**2 >= beta2:
        return 0.0  # the sum grows without limit
    ratio = beta1**2 / beta2
    return (1.0 - beta2) / (1.0 - beta1) ** 2 * (1.0 - ratio) / (1.0 - ratio**step)


def _dequantize(state: dict[str, Tensor], name: str, codebooks: dict[str, Tensor]) -> Tensor:
    if f"{name}_scale" not in state:
        return state[name].float()
    return codebooks[name][state[name].int()] * state[f"{name}_scale"]


def _quantize(state: dict[str, Tensor], name: str, value: Tensor, codebooks: dict[str, Tensor]) -> None:
    if f"{name}_scale" not in state:
        state[name].copy_(value)
        return
    scale = value.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)  # not 0 in a block of zeros
    midpoints = (codebooks[name][1:] + codebooks[name][:-1]) / 2
    if name == "exp_avg_sq":
        midpoints = midpoints.where(codebooks[name][:-1] > 0, 0.0)  # only 0 gets the code of 0
    state[name].copy_(torch.bucketize(value / scale, midpoints).to(torch.uint8))
    state[f"{name}_scale"].copy_(scale)


@cache
def _codebook(name: str, device: torch.device) -> Tensor:
    """Returns the 256 values of a dynamic 8-bit code, denser near 0."""
    with suppress_import_warnings():
        from torchao.optim.quant_utils import create_dynamic_map  # takes two seconds

    return torch.tensor(create_dynamic_map(signed=name == "exp_avg"), dtype=torch.float32, device=device)


@cache
def _compiled_update() -> Any:
    return torch.compile(_update, fullgraph=True, dynamic=True)


def _as_blocks(tensor: Tensor, name: str = "") -> Tensor:
    """Views a tensor as rows of one block, so that one compiled function serves all shapes."""
    if name.endswith("_scale"):
        return tensor.view(-1, 1)
    return tensor.view(-1, BLOCK) if tensor.numel() % BLOCK == 0 else tensor.view(1, -1)


def _block_scales(parameter: Tensor) -> Tensor:
    """Returns a zero scale for each block of a row, sharded like the parameter."""
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    shard = local_tensor(parameter)
    local = torch.zeros(*shard.shape[:-1], shard.shape[-1] // BLOCK, device=shard.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _random_bits(parameter: Tensor, seed: int, first: int, count: int) -> Tensor:
    """Returns 16 random bits for each of `count` elements of the local shard: a function of the seed and of an element's index in
    the full weight."""
    shard = local_tensor(parameter)
    offset: tuple[int, ...] = (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        _, offset = local_shape_and_offset(parameter)
    rest = torch.arange(first, first + count, device=shard.device)
    index, stride = torch.zeros_like(rest), 1
    for size, start, full_size in zip(reversed(shard.shape), reversed(offset), reversed(parameter.shape), strict=True):
        index += (rest % size + start) * stride
        rest, stride = rest // size, stride * full_size
    return (hash_u32(hash_u32(index) + (seed & 0xFFFFFFFF)) >> 16).to(torch.int32)
