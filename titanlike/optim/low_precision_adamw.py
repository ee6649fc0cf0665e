"""AdamW that takes less memory: averages in bfloat16 or in 8 bits, and bfloat16 weights that are rounded by chance.

What it keeps is plain tensors, cut as the weight is: another layout reads the same values, and rounds to the same bits.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from titanlike.config.layout import BLOCK
from titanlike.utils.counter_rng import derive_seed, hash_u32
from titanlike.utils.dtensor import is_dtensor, local_tensor
from titanlike.utils.suppress_warnings import suppress_import_warnings

PIECE = 1 << 22  # numbers that are updated at once
AVERAGES = ("exp_avg", "exp_avg_sq")  # of gradients, and of their squares


class LowPrecisionAdamW(torch.optim.Optimizer):
    """One step a call, as torch's AdamW; arithmetic in float32, whatever is kept."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state: Literal["full", "bfloat16", "8bit"],
        seeds: Mapping[Tensor, int],
    ) -> None:
        """`seeds` has a number for each bfloat16 weight that is to be rounded by chance."""
        super().__init__(parameters, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.kind = state
        self.seeds = seeds

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients that are there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was saved, as it was saved: torch's own way makes everything of the weight's type."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, mine, strict=True):
            self.state[parameter] = dict(state_dict["state"].get(index, {}))

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        numbers = dict(  # as tensors: a compiled function is made anew for each other number
            lr=group["lr"],
            decay=1.0 - group["lr"] * group["weight_decay"],
            correction1=1.0 - beta1**step,
            correction2=1.0 - beta2**step,
        )
        tensors = {name: torch.tensor(number, dtype=torch.float32) for name, number in numbers.items()}
        weight = _rows(local_tensor(parameter))
        gradient = _rows(local_tensor(cast(Tensor, parameter.grad)).contiguous())
        kept = {name: _rows(local_tensor(value), name) for name, value in state.items() if name != "step"}
        levels = {name: _levels(name, weight.device) for name in AVERAGES if self.kind == "8bit"}
        seed = self.seeds.get(parameter)
        update = _compiled() if weight.is_cuda else _update
        # By pieces: what is computed on the way takes many times the memory of what is kept.
        size = max(1, PIECE // weight.shape[1])
        for first in range(0, weight.shape[0], size):
            piece = slice(first, first + size)
            bits = None
            if seed is not None:
                bits = _bits(
                    parameter, derive_seed(seed, f"step {step:.0f}"), first * weight.shape[1], weight[piece].numel()
                )
            update(
                weight[piece],
                gradient[piece],
                {name: value[piece] for name, value in kept.items()},
                tensors,
                None if bits is None else bits.view_as(weight[piece]),
                levels,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
            )

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = {"step": torch.tensor(0.0)}
        if self.kind != "8bit" or parameter.dim() != 2 or parameter.shape[1] % BLOCK:
            dtype = parameter.dtype if self.kind == "full" else torch.bfloat16
            if self.kind == "8bit":
                dtype = torch.float32  # norms, biases, and matrices of odd sizes
            return step | {name: torch.zeros_like(parameter, dtype=dtype) for name in AVERAGES}
        codes = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in AVERAGES}
        return step | codes | {f"{name}_scale": _scales(parameter) for name in AVERAGES}


def _update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    numbers: dict[str, Tensor],
    bits: Tensor | None,
    levels: dict[str, Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    gradient = gradient.float()
    mean = _read(state, "exp_avg", levels).lerp(gradient, 1.0 - beta1)
    square = _read(state, "exp_avg_sq", levels).lerp(gradient.square(), 1.0 - beta2)
    change = (mean / numbers["correction1"]) / ((square / numbers["correction2"]).sqrt() + eps)
    new = weight.float() * numbers["decay"] - numbers["lr"] * change
    if bits is not None:
        # The lower half is cut off; what is added before carries over as often as that half is large.
        new = ((new.view(torch.int32) + bits) & -65536).view(torch.float32)
    weight.copy_(new)
    _write(state, "exp_avg", mean, levels)
    _write(state, "exp_avg_sq", square, levels)


def _read(state: dict[str, Tensor], name: str, levels: dict[str, Tensor]) -> Tensor:
    if f"{name}_scale" not in state:
        return state[name].float()
    return levels[name][state[name].int()] * state[f"{name}_scale"]


def _write(state: dict[str, Tensor], name: str, value: Tensor, levels: dict[str, Tensor]) -> None:
    if f"{name}_scale" not in state:
        state[name].copy_(value)
        return
    scale = value.abs().amax(-1, keepdim=True).clamp(min=1e-30)  # squares of gradients are small
    middles = (levels[name][1:] + levels[name][:-1]) / 2
    state[name].copy_(torch.bucketize(value / scale, middles).to(torch.uint8))  # the nearest
    state[f"{name}_scale"].copy_(scale)


@cache
def _levels(name: str, device: torch.device) -> Tensor:
    """The 256 numbers that 8 bits stand for: close together near 0, where most are, and far apart near 1."""
    with suppress_import_warnings():
        from torchao.optim.quant_utils import create_dynamic_map  # only here: it takes two seconds

    return torch.tensor(create_dynamic_map(signed=name == "exp_avg"), dtype=torch.float32, device=device)


@cache
def _compiled() -> Any:
    return torch.compile(_update, fullgraph=True, dynamic=True)


def _rows(tensor: Tensor, name: str = "") -> Tensor:
    """In rows of a block, so that one compiled function does for all shapes."""
    if name.endswith("_scale"):
        return tensor.view(-1, 1)
    return tensor.view(-1, BLOCK) if tensor.numel() % BLOCK == 0 else tensor.view(1, -1)


def _scales(parameter: Tensor) -> Tensor:
    """A scale for each block, cut over the ranks as the parameter is."""
    rows, columns = parameter.shape
    shape = (rows, columns // BLOCK)
    if not is_dtensor(parameter):
        return torch.zeros(shape, device=parameter.device)
    from torch.distributed.tensor import DTensor

    local = local_tensor(parameter)
    mine = torch.zeros(local.shape[0], local.shape[1] // BLOCK, device=local.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def _bits(parameter: Tensor, seed: int, first: int, count: int) -> Tensor:
    """16 random bits for each of so many numbers of this rank's part: a function of the seed and of the place in the whole."""
    local = local_tensor(parameter)
    offset: tuple[int, ...] = (0,) * parameter.dim()
    if is_dtensor(parameter):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    rest = torch.arange(first, first + count, device=local.device)
    places, stride = torch.zeros_like(rest), 1
    for size, start, whole in zip(reversed(local.shape), reversed(offset), reversed(parameter.shape), strict=True):
        places += (rest % size + start) * stride
        rest, stride = rest // size, stride * whole
    return (hash_u32(hash_u32(places) + (seed & 0xFFFFFFFF)) >> 16).to(torch.int32)
