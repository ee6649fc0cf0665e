"""A non-finite step on one rank is skipped on all ranks, and training continues as if the step had not been taken."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipes import pretrain
from tests.checkpoints import assert_equal_state
from tests.launching import records
from tests.parity import DEFAULT, SLOW, Tier, rows_of
from tests.pool import Ranks, user_error
from tests.training import GPT_, mesh_of, result, tiny, train_on_rank
from titanlike.config.sections import Training
from titanlike.optim.clipping import gradient_norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.recipe import PretrainRecipe
from titanlike.utils.dtensor import local_tensor

LOSS, GRADIENT = "loss", "gradient"


@contextmanager
def inject(where: str, rank: int, steps: tuple[int, ...]) -> Iterator[list[nn.Module]]:
    """Makes the loss or the gradient of one rank non-finite at these steps. Yields the trained model in a list."""
    model: list[nn.Module] = []
    count, forward_backward = 0, pretrain.forward_backward

    def non_finite_loss(trained: nn.Module, *arguments: Any) -> Any:
        nonlocal count
        count, model[:] = count + 1, [trained]
        with ExitStack() as hooks:
            if where == LOSS and count in steps and dist.get_rank() == rank:
                head = trained.get_submodule("output")
                hooks.callback(head.register_forward_hook(lambda _, inputs, loss: loss * float("nan")).remove)
            return forward_backward(trained, *arguments)

    def non_finite_gradient(trained: nn.Module, *arguments: Any) -> Any:
        if where == GRADIENT and count in steps and dist.get_rank() == rank:
            local_tensor(next(p.grad for p in trained.parameters() if p.grad is not None)).fill_(float("inf"))
        return gradient_norms(trained, *arguments)

    with (
        patch.object(pretrain, "forward_backward", non_finite_loss),
        patch.object(pretrain, "gradient_norms", non_finite_gradient),
    ):
        yield model


def train_with_faults(recipe: PretrainRecipe, where: str, rank: int, steps: tuple[int, ...]) -> tuple[str, str]:
    """Trains with non-finite steps. Returns the error message, if any, and a digest of this rank's weights."""
    with inject(where, rank, steps) as model:
        message = user_error(train_on_rank, recipe)
    digest = hashlib.sha256()
    for parameter in model[0].parameters():
        digest.update(local_tensor(parameter.detach()).contiguous().view(torch.uint8).numpy().tobytes())
    return message, digest.hexdigest()


def train_without_updates(recipe: PretrainRecipe, steps: tuple[int, ...]) -> None:
    """Trains without the updates of these steps and without faults."""

    def build(*arguments: Any) -> torch.optim.Optimizer:
        optimizer, count = build_optimizer(*arguments), 0
        step = optimizer.step

        def counted() -> None:
            nonlocal count
            count += 1
            if count not in steps:
                step()

        optimizer.step = counted  # type: ignore[method-assign, assignment]
        return optimizer

    with patch.object(pretrain, "build_optimizer", build):
        train_on_rank(recipe)


CASES: dict[str, tuple[Tier, str, int, dict[str, Any]]] = {
    "FSDP, gradient": (SLOW, GRADIENT, 1, dict(parallelism=dict(shard=2))),
    # Tied: the last stage holds a copy of the embedding.
    "PP, loss": (DEFAULT, LOSS, 1, dict(parallelism=dict(pipeline=2), model=GPT_)),
    "HSDP, gradient": (DEFAULT, GRADIENT, 1, dict(parallelism=dict(replicate=2, shard=1))),  # unknown to the other replica
    "8bit": (SLOW, LOSS, 0, dict(
        parallelism=dict(shard=2), optimizer=dict(state_dtype="8bit", stochastic_rounding=True),
        training=dict(master_dtype="bfloat16"),
    )),
    "float8": (SLOW, LOSS, 0, dict(
        parallelism=dict(shard=2), float8=dict(scaling="tensorwise", layers=("*",), emulate=True, all_gather=True),
    )),
}  # fmt: skip


@pytest.mark.parametrize(("where", "rank", "sections"), rows_of(CASES))
def test_skipped_steps_leave_no_trace(
    ranks: Ranks, tmp_path: Path, where: str, rank: int, sections: dict[str, Any]
) -> None:
    sections = sections | dict(training=dict(non_finite="skip") | sections.get("training", {}))
    faulty = (2, 4)
    skipping, reference = (tiny(tmp_path, name, **sections) for name in ("skipping", "reference"))
    ends = ranks(2).run(train_with_faults, skipping, where, rank, faulty)
    ranks(2).run(train_without_updates, reference, faulty)

    assert [message for message, _ in ends] == ["", ""]
    if sections["parallelism"].get("replicate"):
        assert ends[0] == ends[1]
    skipped = [record for record in records(tmp_path / "skipping") if "skipped" in record]
    assert [record["step"] for record in skipped] == list(faulty)
    assert all(f"rank {rank}" in record["skipped"] for record in skipped)
    found, expected = result(skipping), result(reference)
    assert found.state["optimizer"]["norm.weight.step"] == 3.0
    assert_equal_state(found.state, expected.state)
    finite = [step - 1 for step in range(1, 6) if step not in faulty]
    assert [found.losses[index] for index in finite] == [expected.losses[index] for index in finite]


def _error_of_infinite_gradient(rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    apply_fsdp(model, mesh_of("cpu", shard=2).fsdp, units=[], compute_dtype=torch.float32)
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == rank:
        local_tensor(model.get_parameter("1.weight").grad).fill_(float("inf"))  # type: ignore[arg-type]
    loss = torch.tensor(1.0)
    return user_error(NonFiniteGuard(Training()).should_step, 7, loss, loss, gradient_norms(model), torch.tensor(1))


def test_all_ranks_name_the_parameter_and_the_rank_of_its_shard(ranks: Ranks) -> None:
    for rank in (0, 1):
        for error in ranks(2).run(_error_of_infinite_gradient, rank):
            assert f"but not the gradient of 1.weight, in the shard of rank {rank}." in error


def test_too_many_skips_stop_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    recipe = tiny(
        tmp_path, "run", parallelism=dict(shard=2), training=dict(non_finite="skip", skip_limit=2),
        checkpoint=dict(interval=1), validation=dict(interval=0),
    )  # fmt: skip
    ends = ranks(2).run(train_with_faults, recipe, LOSS, 1, (1, 4, 5))
    for message, _ in ends:
        assert message.startswith(
            "step 5: the loss is nan on rank 1. It would be skip number 3 in the last 100 steps (steps 1, 4, 5), "
            "more than training.skip_limit = 2. The step was not saved"
        )
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())[-1] == "step-00000004"
