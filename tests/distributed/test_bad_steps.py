"""A NaN on one rank stops all ranks, and the error names that rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.pool import Ranks, user_error
from titanlike.config.sections import Training
from titanlike.distributed import collectives
from titanlike.optim.clipping import gradient_norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh


def _error(loss: Tensor, local_loss: Tensor, model: nn.Module) -> str:
    guard = NonFiniteGuard(Training())
    return user_error(guard.should_step, 7, loss, local_loss, gradient_norms(model), torch.tensor(1))


def _step_with_nan(nan_rank: int) -> str:
    model = nn.Linear(2, 1, bias=False)
    local_loss = torch.tensor(float("nan") if dist.get_rank() == nan_rank else 1.0)
    (model(torch.ones(1, 2)).sum() * local_loss).backward()
    assert model.weight.grad is not None
    collectives.all_reduce_sum(model.weight.grad, [dist.group.WORLD])
    return _error(collectives.all_reduce_sum(local_loss.clone(), [dist.group.WORLD]), local_loss, model)


@pytest.mark.parametrize("nan_rank", [0, 1])
def test_all_ranks_name_the_rank_with_the_nan(ranks: Ranks, nan_rank: int) -> None:
    for error in ranks(2).run(_step_with_nan, nan_rank):
        assert error.startswith(f"step 7: the loss is nan on rank {nan_rank}. The step was not saved")


def test_finite_steps_pass(ranks: Ranks) -> None:
    assert ranks(2).run(_step_with_nan, 2) == [""] * 2


def _step_with_infinite_shard(inf_rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    apply_fsdp(model, build_mesh("cpu", shard=2).fsdp, units=[], compute_dtype=torch.float32)
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == inf_rank:
        gradient = model.get_parameter("1.weight").grad
        assert isinstance(gradient, DTensor)
        gradient.to_local().fill_(float("inf"))
    loss = torch.tensor(1.0)
    return _error(loss, loss, model)


@pytest.mark.parametrize("inf_rank", [0, 1])
def test_all_ranks_name_the_parameter_and_the_rank_of_its_shard(ranks: Ranks, inf_rank: int) -> None:
    for error in ranks(2).run(_step_with_infinite_shard, inf_rank):
        assert f"but not the gradient of 1.weight, in the shard of rank {inf_rank}." in error
