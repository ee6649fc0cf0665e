"""Data parallelism: FSDP2, HSDP (sharded copies) and plain replication are one transform on one or two mesh dimensions."""

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
    """Shard the model's parameters over `mesh`: each of `units` is gathered by itself, the rest with the root.

    A mesh of two dimensions replicates over the first and shards over the second. Gradients are summed, not averaged:
    the loss is already divided by the tokens of the whole batch.
    """
    # Takes most of a second, which a run in one process does not need.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if cpu_offload and mesh.device_type == "cpu":
        raise UserError(
            "parallelism.cpu_offload = true moves weights from a GPU to the host, but there is no GPU; set it false"
        )
    # Float8's matrices, and compiled models, return views. That matters to who writes into a result, which nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        # Activations follow the weights' type by themselves, and the rotary angles must stay in float32.
        cast_forward_inputs=False,
    )
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    )
    for index, unit in enumerate(units):
        # The backward pass starts with the last unit: letting go of it only to gather it again would be waste.
        reshard = reshard_after_forward == "always" or (reshard_after_forward == "auto" and index < len(units) - 1)
        shard(unit, reshard_after_forward=reshard)  # <- shards a layer
    shard(model, reshard_after_forward=reshard_after_forward == "always")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
