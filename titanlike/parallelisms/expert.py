"""Expert parallelism: distributes the experts of each block over a group of ranks, which exchange tokens.

Each rank routes its own tokens. An all-to-all sends each token to the ranks of its experts, and another one returns the results.
The experts of a rank get the tokens of all ranks of the group, so that their gradients are sums over all of these.

The number of tokens that a rank receives depends on the routing, and the host has to know it. The experts are therefore not
compiled; the rest of a block is.

Shapes: R ranks, E experts, M rows, D model dimension.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titanlike.config import UserError
from titanlike.distributed.autograd_collectives import all_to_all
from titanlike.models.common.experts import Experts, MixtureOfExperts, inverse_of, permute_rows
from titanlike.parallelisms.recomputation import KEEPS, keep_for_recomputation
from titanlike.utils import compat
from titanlike.utils.modules import ParameterOwner, rebuild, without_owner


def apply_expert(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Distributes the experts of each `MixtureOfExperts` over a mesh, in place. Returns the modules that hold them,
    which FSDP has to shard over other ranks than the rest of the model.

    Args:
        mesh: of one dimension, or of two, (expert, tensor), after `apply_tensor` over the second one.
    """
    group = mesh.get_group(0)
    layers: list[Any] = [module for module in model.modules() if isinstance(without_owner(module), MixtureOfExperts)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no MixtureOfExperts (titanlike.models.common.experts) to distribute"
        )
    for layer in layers:
        experts: Any = layer.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, _shard(name, parameter, mesh))  # <- shards the experts
        if not isinstance(experts, ParameterOwner):  # as it is after tensor parallelism
            experts = layer.experts = ExpertShard(experts)
        experts.set_module(rebuild(experts.module, ExpertParallelExperts, group=group))  # <- exchanges tokens
        setattr(experts, KEEPS, True)
        # The experts are an FSDP unit of their own, whose parameters are gathered right before this.
        experts.register_forward_pre_hook(_read_local_shards)
        # The experts run outside of compiled code, with the hooks of FSDP.
        computing: Any = without_owner(layer)
        computing.call_experts = compat.disable_compilation(computing.call_experts)
    return [layer.experts for layer in layers]


def _shard(name: str, parameter: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Returns this rank's experts of a stack (E, ...) as a DTensor."""
    local: Any = parameter.detach()
    placements = []
    if isinstance(local, DTensor):
        local, placements = local.to_local(), list(local.placements)
    if len(placements) + 1 != mesh.ndim:
        raise UserError(
            f"the mesh has {mesh.ndim} dimensions, but {name} is sharded over {len(placements)}; pass (expert,), or "
            "(expert, tensor) after apply_tensor"
        )
    if local.shape[0] % mesh.size(0):
        raise UserError(f"{mesh.size(0)} expert-parallel ranks do not divide the {local.shape[0]} experts of {name}")
    local = local.chunk(mesh.size(0))[mesh.get_local_rank(0)].clone()
    return nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0), *placements], run_check=False), parameter.requires_grad
    )


class ExpertShard(ParameterOwner):
    """Owns DTensors. Its module computes with this rank's experts."""

    def read_local_shards(self) -> None:
        """Reads the parameters."""
        parameters: Any = self._parameters
        self.set_tensors({name: p.to_local(grad_placements=p.placements) for name, p in parameters.items()})


class ExpertParallelExperts(Experts):
    """The experts of this rank. The ranks of the group exchange tokens."""

    group: dist.ProcessGroup

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the results (M, D) of all experts for local rows (M, D) that are sorted by expert, of which each has a count
        (E,)."""
        group = self.group
        received_counts, received, sent = keep_for_recomputation(
            lambda: exchange_counts(counts.view(group.size(), -1), group)
        )
        rows = all_to_all(rows, received, sent, group)  # sorted by the rank that sent them, and then by expert
        num_local = received_counts.shape[1]
        experts = torch.arange(num_local, device=rows.device).repeat(group.size())
        experts = experts.repeat_interleave(received_counts.flatten(), output_size=rows.shape[0])
        order = experts.argsort(stable=True)
        inverse = inverse_of(order)
        compute = super().compute
        # Nested, so that no result lives longer than it is read.
        results = permute_rows(compute(permute_rows(rows, order, inverse), received_counts.sum(0)), inverse, order)
        return all_to_all(results, sent, received, group)


def _read_local_shards(experts: Any, *hook_args: object) -> None:
    experts.read_local_shards()


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
    """Returns the number of rows that this rank receives from each rank for each local expert (R, E / R), those from each rank, and
    those to each rank, for the counts that it sends (R, E / R). Synchronizes a GPU with the host."""
    ones = [1] * group.size()
    received = compat.wait_tensor(compat.all_to_all(counts, ones, ones, group))
    from_ranks, to_ranks = torch.stack((received.sum(1), counts.sum(1))).cpu().tolist()
    return received, from_ranks, to_ranks
