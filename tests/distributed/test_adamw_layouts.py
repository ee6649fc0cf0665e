"""AdamW on sharded weights: updates that do not depend on the sharding."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.pool import Ranks
from tests.training import mesh_of
from titanlike.optim.low_precision_adamw import BLOCK, LowPrecisionAdamW, _random_bits
from titanlike.optim.optimizer import AdamW


def _compare_sharded_update(placement: Any) -> tuple[bool, bool]:
    """Whether the random bits and the updates of a sharded weight equal those of the full weight."""
    mesh = mesh_of("cpu", shard=2).fsdp
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(6, 4 * BLOCK, generator=generator).bfloat16()
    gradient = torch.randn(full.shape, generator=generator).bfloat16()
    sharded, sharded_gradient = (distribute_tensor(x, mesh, [placement], src_data_rank=None) for x in (full, gradient))
    bits = _random_bits(full, 5, 0, full.numel()).view_as(full)
    local = distribute_tensor(bits, mesh, [placement], src_data_rank=None).to_local()
    same_bits = torch.equal(_random_bits(sharded, 5, 0, local.numel()).view_as(local), local)
    same_bits &= torch.equal(_random_bits(sharded, 5, BLOCK, BLOCK), local.flatten()[BLOCK : 2 * BLOCK])
    results = []
    for weight, weight_gradient in ((full, gradient), (sharded, sharded_gradient)):
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = LowPrecisionAdamW(
            [{"params": [parameter], "weight_decay": 0.1}],
            lr=1e-2, betas=(0.9, 0.95), eps=1e-8, state_dtype="8bit", seeds={parameter: 3},
        )  # fmt: skip
        for _ in range(3):
            parameter.grad = weight_gradient.clone()
            optimizer.step()
        results.append(
            [parameter, *(optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq", "exp_avg_sq_scale"))]
        )
    same = all(torch.equal(one, other.full_tensor()) for one, other in zip(*results, strict=True))
    return same_bits, same


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_low_precision_update_does_not_depend_on_the_sharding(ranks: Ranks, placement: Any) -> None:
    assert ranks(2).run(_compare_sharded_update, placement) == [(True, True)] * 2


def _sharded_updates(placement: Any, optimizer_class: type[torch.optim.AdamW]) -> list[torch.Tensor]:
    """Returns the full weight and moments after several steps."""
    mesh = mesh_of("cpu", shard=2).fsdp
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(
        distribute_tensor(torch.randn(6, 8, generator=generator), mesh, [placement], src_data_rank=None)
    )
    optimizer = optimizer_class([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(3):
        gradient = torch.randn(6, 8, generator=generator)
        parameter.grad = distribute_tensor(gradient, mesh, [placement], src_data_rank=None)
        optimizer.step()
    found = (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")))
    return [tensor.full_tensor().detach() for tensor in found]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_adamw_on_local_shards_matches_dtensors(ranks: Ranks, placement: Any) -> None:
    found, expected = (ranks(2).run(_sharded_updates, placement, each) for each in (AdamW, torch.optim.AdamW))
    for rank, reference in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(rank, reference, strict=True))
