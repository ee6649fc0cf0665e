"""A NaN on one rank stops all of them, names that rank, and leaves the weights as they were."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool
from titanlike import distributed
from titanlike.config import UserError
from titanlike.optimizer import clip_gradients, stop_if_not_finite

Ranks = Callable[[int], Pool]


def _step_with_nan(guilty: int) -> str:
    model = nn.Linear(2, 1, bias=False)
    local_loss = torch.tensor(float("nan") if dist.get_rank() == guilty else 1.0)
    (model(torch.ones(1, 2)).sum() * local_loss).backward()
    assert model.weight.grad is not None
    distributed.sum_over(model.weight.grad)
    grad_norm = clip_gradients(model, 1.0)
    try:
        stop_if_not_finite(7, distributed.sum_over(local_loss.clone()), local_loss, grad_norm, model)
    except UserError as error:
        return str(error)
    return "nothing said"


@pytest.mark.parametrize("guilty", [0, 1])
def test_the_rank_is_named_by_all(ranks: Ranks, guilty: int) -> None:
    for said in ranks(2).run(_step_with_nan, guilty):
        assert said.startswith(
            f"step 7: the loss is nan on rank {guilty}. The step was not taken and nothing was saved"
        )


def test_good_steps_pass(ranks: Ranks) -> None:
    assert ranks(2).run(_step_with_nan, 2) == ["nothing said"] * 2
