"""Async tensor parallelism: the compiler overlaps collectives with matmuls."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config import UserError
from titanlike.distributed.autograd_collectives import all_gather_by_cat
from titanlike.parallelisms.tensor import TensorParallelModule
from titanlike.utils import compat


def overlap_tensor(model: nn.Module, mesh: DeviceMesh) -> None:
    """Enables async tensor parallelism: the compiler splits each collective and overlaps it with matmuls. Call it after
    `apply_tensor`, and compile the blocks."""
    if mesh.device_type != "cuda":
        raise UserError(
            "parallelism.async_tensor_parallel = true requires GPUs with peer-to-peer memory access, but the device is "
            f"{mesh.device_type}; set it false"
        )
    compat.enable_async_tensor_parallel(mesh.get_group().group_name)
    for module in model.modules():
        if isinstance(module, TensorParallelModule):
            module.set_collectives(all_gather_input=all_gather_by_cat)
