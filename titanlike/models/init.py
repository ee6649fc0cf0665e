"""Memory and first values for a model built on the meta device, the same on every layout.

Each parameter's value is a function of (seed, its name) and of nothing else: every rank makes the full tensor of one
parameter at a time and keeps its slice. A GPU and a CPU draw different numbers; ranks of one kind draw the same.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from titanlike.utils.counter_rng import derive_seed
from titanlike.utils.dtensor import is_dtensor

# What a model offers: fill one whole parameter in place, given its name and a seeded generator.
Initialize = Callable[[str, Tensor, torch.Generator], None]


@torch.no_grad()
def initialize(model: nn.Module, device: torch.device, seed: int, *, offload: bool = False) -> None:
    """Give every parameter memory, on `device` or offloaded to the host, and the value drawn for its name on `device`."""
    init_parameter = cast(Initialize, model.init_parameter)
    _to_empty(model, torch.device("cpu") if offload else device)
    copies: dict[str, str] = getattr(model, "copies", {})
    for own_name, parameter in model.named_parameters():
        name = copies.get(own_name, own_name)
        full = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=device)
        init_parameter(name, full, torch.Generator(device).manual_seed(derive_seed(seed, name)))
        # The model of another may forget a parameter; a NaN here is found now and not in step 300.
        if bool(full.isnan().any()):
            raise ValueError(f"{type(model).__name__}.init_parameter left {name} without values")
        if is_dtensor(parameter):
            from torch.distributed.tensor import distribute_tensor

            # src_data_rank=None: every rank has the same full tensor, so each takes its slice without a broadcast
            mine = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(mine.to_local())
        else:
            parameter.copy_(full)
    assert not list(model.buffers()), "a buffer would be left without values"


def _to_empty(model: nn.Module, device: torch.device) -> None:
    """`model.to_empty`, but for plain parameters without `torch.empty_like`, which imports sympy where a tensor is on meta."""

    def empty(tensor: Tensor) -> Tensor:
        if type(tensor) is nn.Parameter and tensor.is_contiguous():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    model._apply(empty)
