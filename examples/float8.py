"""Float8 matmuls and float8 all-gathers on a module of one's own, under FSDP x tensor parallelism.

    torchrun --nproc-per-node=4 examples/float8.py

The matmuls are emulated: a GPU with float8 runs them without `emulate=True`, and is fast with `torch.compile`.
"""

import copy

import torch
import torch.distributed as dist
from fsdp_tensor import PLAN, STEPS, Transformer, train

from titanlike.config.sections import Float8
from titanlike.distributed.process_group import session
from titanlike.float8.all_gather import wrap_weights
from titanlike.float8.linear import apply_float8, matmul_of
from titanlike.float8.tensor_parallel import share_scales
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.tensor import apply_tensor

FLOAT8 = Float8(scaling="tensorwise", skip=("head",), layers=("*",), emulate=True)


def main() -> tuple[float, float]:
    """Returns the largest relative difference of a step's loss in float8 from float32, and the same for one process."""
    world_size = dist.get_world_size()
    tensor = 2 if world_size % 2 == 0 else 1
    mesh = build_mesh("cpu", shard=world_size // tensor, tensor=tensor)
    torch.manual_seed(0)
    model = Transformer()
    expected = torch.tensor(train(copy.deepcopy(model), 0, 1))

    alone = copy.deepcopy(model)
    apply_float8(alone, FLOAT8)
    in_one_process = torch.tensor(train(alone, 0, 1))

    # The order matters: layers are selected by their full size, and FSDP comes last.
    apply_float8(model, FLOAT8)
    apply_tensor(model, PLAN, mesh.tensor)
    share_scales(model, mesh.tensor.get_group())  # shards of a matrix round alike
    wrap_weights(model)  # FSDP all-gathers one byte for each element
    apply_fsdp(model, mesh.fsdp)
    assert sum(matmul_of(module) is not None for module in model.modules()) == 12  # all but the head

    losses = torch.tensor(train(model, mesh.data_rank, mesh.num_data_ranks, STEPS))
    dist.all_reduce(losses, group=mesh.fsdp.get_group())
    losses /= mesh.num_data_ranks
    return ((losses / expected - 1).abs().max().item(), (in_one_process / expected - 1).abs().max().item())


if __name__ == "__main__":
    with session("cpu"):
        layout, one = main()
        print(f"largest difference of a loss from float32: {layout:.1%}, and in one process {one:.1%}")
        assert 0 < layout < 0.05
