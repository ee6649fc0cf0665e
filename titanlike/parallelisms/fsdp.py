"""Data parallelism with FSDP2: FSDP, HSDP and DDP are one transform on a mesh of one or two dimensions."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titanlike.config import UserError
from titanlike.parallelisms.blocks import check_choice, find_blocks
from titanlike.parallelisms.mixed_precision import float32_parameters
from titanlike.utils import compat
from titanlike.utils.modules import without_owner

MicroBatch = TypeVar("MicroBatch")


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[nn.Module | list[nn.Module]] | None = None,
    gradient_reduction: Literal["mean", "sum"] = "mean",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    cast_forward_inputs: bool = True,
    reshard_after_forward: Literal["auto", "always", "never"] = "auto",
    cpu_offload: bool = False,
    inner_units: Mapping[nn.Module, DeviceMesh] | None = None,
) -> None:
    """Shards the parameters of a model over `mesh`, in place.

    Args:
        mesh: of one dimension, which shards, or of two, the first of which replicates and the second shards.
        units: the modules whose parameters are all-gathered together, one all-gather each, in the order of the forward pass. Each
            unit prefetches the next one in the forward pass, and the previous one in the backward pass. The root gathers the
            remaining parameters. A unit of `nn.Embedding`s is not gathered for the backward pass, which does not read their
            weights. Default: the blocks (`find_blocks`) that share no parameter with other modules.
        gradient_reduction: over all ranks of `mesh`. `mean`, as DDP does, for a loss that is the mean over the local batch. `sum`
            for a loss that is already divided by the size of the global batch.
        compute_dtype: of the forward and backward pass. Default: the parameters' dtype.
        reduce_dtype: of the gradient reduction.
        cast_forward_inputs: casts floating-point inputs of each unit to `compute_dtype`.
        reshard_after_forward: whether a unit frees its gathered parameters after its forward pass. `auto`: yes, except for the last
            unit, which the backward pass uses first.
        cpu_offload: keeps parameters, gradients and optimizer state in host memory.
        inner_units: modules inside of units that are units of their own, sharded over another mesh, such as the experts of a block
            with expert parallelism.
    """
    check_choice("gradient_reduction", gradient_reduction, ("mean", "sum"))
    check_choice("reshard_after_forward", reshard_after_forward, ("auto", "always", "never"))
    if cpu_offload and mesh.device_type == "cpu":
        raise UserError(
            "parallelism.cpu_offload = true moves weights from a GPU to the host, but there is no GPU; set it false"
        )
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(module)

    def is_shared(unit: Sequence[nn.Module]) -> bool:
        return not _users_in(unit, users) <= {module for root in unit for module in root.modules()}

    if units is None:
        units = [block for block in find_blocks(model) if not is_shared([block])]
    groups = [unit if isinstance(unit, list) else [unit] for unit in units]
    for index, group in enumerate(groups):
        if is_shared(group):
            raise UserError(
                f"units: unit {index} has a parameter that is also used outside of it, which sharding would separate; leave the "
                "unit out, and the root gathers its parameters"
            )
    only_embeddings = [
        all(isinstance(without_owner(user), nn.Embedding) for user in _users_in(group, users)) for group in groups
    ]
    # Float8 modules and compiled models return views. FSDP warns because in-place writes to them would be lost; there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    shard = partial(
        fully_shard,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=cast_forward_inputs
        ),
        offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        ignored_params=float32_parameters(model),  # would be gathered in `compute_dtype`
    )
    inner = {index: _inner_units(group, inner_units or {}) for index, group in enumerate(groups)}
    for index, group in enumerate(groups):
        # The backward pass starts with the last unit, so resharding it would only repeat its all-gather.
        reshard = reshard_after_forward == "always" or (reshard_after_forward == "auto" and index < len(groups) - 1)
        for unit, unit_mesh in inner[index].items():
            placement = partial(_placement, num_shards=unit_mesh.size(-1))
            shard(unit, mesh=unit_mesh, reshard_after_forward=reshard, shard_placement_fn=placement)
        placement = partial(_placement, num_shards=mesh.size(-1))
        shard(group, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=placement)  # <- shards a layer
        if only_embeddings[index]:
            cast(FSDPModule, group[0]).set_unshard_in_backward(False)
    shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward == "always")
    _prefetch([[model], *([group[0], *inner[index]] for index, group in enumerate(groups))])
    inner_meshes = {unit: unit_mesh for units in inner.values() for unit, unit_mesh in units.items()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            inner_mesh = inner_meshes.get(module)
            if gradient_reduction == "sum":
                module.set_gradient_divide_factor(1.0)  # the default is the number of ranks
            elif inner_mesh is not None:
                # Its gradients are sums over the ranks of another dimension, too.
                module.set_gradient_divide_factor(mesh.size())
            # gloo has no PREMUL_SUM. With a single shard, which is not reduced, torch would then divide twice.
            divides_twice = gradient_reduction == "mean" and inner_mesh is not None and inner_mesh.size(-1) == 1
            module.set_force_sum_reduction_for_comms(not divides_twice)


def _inner_units(
    group: Sequence[nn.Module], inner_units: Mapping[nn.Module, DeviceMesh]
) -> dict[nn.Module, DeviceMesh]:
    """Returns the units inside of the modules of a group."""
    return {module: inner_units[module] for root in group for module in root.modules() if module in inner_units}


def _placement(parameter: nn.Parameter, *, num_shards: int) -> Any:
    """Returns the dimension to shard: the first one, or the second one of stacked matrices that are too few for all ranks. None is
    the default."""
    is_stack = parameter.dim() == 3
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(1) if is_stack and local.shape[0] % num_shards and local.shape[1] % num_shards == 0 else None


def _users_in(unit: Sequence[nn.Module], users: Mapping[nn.Parameter, set[nn.Module]]) -> set[nn.Module]:
    """Returns the modules that have a parameter of the unit."""
    return {user for module in unit for parameter in module.parameters() for user in users[parameter]}


def _prefetch(units: Sequence[Sequence[Any]]) -> None:
    """Has each FSDP unit start the all-gather of the next one before it computes, in the order of the forward pass and of the
    backward pass. The units are in the order of the forward pass, each followed by the units inside of it. Both passes enter a unit
    before those inside of it.

    FSDP's default is the order of the last forward pass, which the backward pass does not follow if forward and backward passes of
    several micro-batches alternate. Its default in the forward pass starts an all-gather only after the previous unit's kernels
    have been launched, which comes late if the host is not far ahead of the GPU.
    """
    for unit, following in pairwise(chain.from_iterable(units)):
        unit.set_modules_to_forward_prefetch([following])
    for unit, following in pairwise(chain.from_iterable(reversed(units))):
        unit.set_modules_to_backward_prefetch([following])
    root, last = units[0][0], units[-1][0]
    root.set_modules_to_backward_prefetch([last])  # the root computes last, too


def accumulate_gradients(
    model: nn.Module, microbatches: Sequence[MicroBatch], gradient_sync: str = "each_microbatch"
) -> Iterator[MicroBatch]:
    """Yields the micro-batches of a step, and sets for each which gradient reductions FSDP runs in its backward pass.

    Run the forward and backward pass of each micro-batch in the body of the loop. DDP and HSDP all-reduce gradients for the last
    micro-batch only; until then, each FSDP unit keeps the sum of its gradients, in the dtype of the reduction, outside of
    `Parameter.grad`. If an exception ends the loop before, the next loop discards these sums. Parameters without a gradient in the
    last micro-batch are not all-reduced.

    Args:
        gradient_sync: when FSDP reduce-scatters gradients. `each_microbatch` keeps the sum of a rank's shards of the gradients,
            `last_microbatch` the sum of the full gradients.
    """
    check_choice("gradient_sync", gradient_sync, ("each_microbatch", "last_microbatch"))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        compat.discard_unreduced_gradients(unit)
    for index, microbatch in enumerate(microbatches, start=1):
        is_last = index == len(microbatches)
        for unit in units:
            unit.set_requires_gradient_sync(is_last or gradient_sync == "each_microbatch", recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)  # the line above has set both
        yield microbatch
