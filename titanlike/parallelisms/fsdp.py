"""Data parallelism with FSDP2: FSDP, HSDP and DDP are one transform on a mesh of one or two dimensions."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config import UserError


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[nn.Module | list[nn.Module]],
    compute_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: Literal["auto", "always", "never"] = "auto",
    cpu_offload: bool = False,
) -> None:
    """Shards parameters over `mesh`. Each of `units` is one all-gather; the root gathers the remaining parameters.

    A two-dimensional mesh replicates over its first dimension and shards over its second. Gradients are summed, not averaged:
    the loss is already divided by the number of tokens in the global batch.
    """
    # This import takes most of a second, and a single process does not need it.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if cpu_offload and mesh.device_type == "cpu":
        raise UserError(
            "parallelism.cpu_offload = true moves weights from a GPU to the host, but there is no GPU; set it false"
        )
    # Float8 modules and compiled models return views. FSDP warns because in-place writes to them would be lost; there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,  # activations take the weights' dtype, and rotary angles must stay in float32
        ),
        offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    )
    for index, unit in enumerate(units):
        # The backward pass starts with the last unit, so resharding it would only repeat its all-gather.
        reshard = reshard_after_forward == "always" or (reshard_after_forward == "auto" and index < len(units) - 1)
        shard(unit, reshard_after_forward=reshard)  # <- shards a layer
    shard(model, reshard_after_forward=reshard_after_forward == "always")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
