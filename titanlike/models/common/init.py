"""Parameter initialization that does not depend on the layout.

The value of each parameter is a function of the seed and of its name. Every rank draws the full tensor of one parameter at a time
and keeps its shard. A GPU and a CPU draw different numbers; ranks of one device type draw the same.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlike.utils.counter_rng import derive_seed
from titanlike.utils.modules import copies_of

# Fills one full parameter in place, given its name and a seeded generator. Every model has it as `init_parameter`.
InitParameter = Callable[[str, Tensor, torch.Generator], None]


def fill(name: str, value: Tensor, std: float, generator: torch.Generator) -> None:
    """Fills a parameter as its kind is initialized: biases with 0, norms with 1, matrices and stacks of matrices with a normal
    distribution. Raises `ValueError` for any other: `init_parameter` of its model has to fill it."""
    if name.endswith("bias"):
        value.zero_()
    elif name.endswith("norm.weight"):
        value.fill_(1.0)
    elif value.dim() > 1:
        value.normal_(0.0, std, generator=generator)
    else:
        raise ValueError(
            f"{name} is no bias, norm or matrix; init_parameter of its model does not say how it is filled"
        )


@torch.no_grad()
def initialize(model: nn.Module, device: torch.device, seed: int, *, offload: bool = False) -> None:
    """Allocates the parameters of a model on the meta device, and fills each with the value for its name.

    Args:
        device: where the values are drawn and, unless `offload`, where the parameters live.
        offload: allocate the parameters in host memory.
    """
    init_parameter = cast(InitParameter, model.init_parameter)
    model.to_empty(device=torch.device("cpu") if offload else device)
    copies = copies_of(model)
    for own_name, parameter in model.named_parameters():
        name = copies.get(own_name, own_name)
        # In float32 and then rounded: the numbers that a generator draws depend on the dtype.
        full = torch.full(parameter.shape, torch.nan, device=device)
        init_parameter(name, full, torch.Generator(device).manual_seed(derive_seed(seed, name)))
        # A model may forget a parameter: find the NaN now, not at step 300.
        if bool(full.isnan().any()):
            raise ValueError(f"{type(model).__name__}.init_parameter left {name} uninitialized")
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has the same full tensor, so each takes its shard without a broadcast.
            sharded = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(sharded.to_local())
        else:
            parameter.copy_(full)
    assert not list(model.buffers()), "a buffer would stay uninitialized"
