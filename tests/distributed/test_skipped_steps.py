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
from tests.pool import Ranks, user_error
from tests.training import GPT_, result, tiny, train_on_rank
from titanlike.optim.clipping import gradient_norms
from titanlike.optim.optimizer import build_optimizer
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


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "FSDP, loss": (LOSS, 1, dict(parallelism=dict(shard=2))),
    "FSDP, gradient": (GRADIENT, 1, dict(parallelism=dict(shard=2))),
    "PP, loss": (LOSS, 1, dict(parallelism=dict(pipeline=2), model=GPT_)),  # tied: the last stage holds a copy of the embedding
    "PP, gradient": (GRADIENT, 0, dict(parallelism=dict(pipeline=2))),
    "HSDP, gradient": (GRADIENT, 1, dict(parallelism=dict(replicate=2, shard=1))),  # unknown to the other replica
    "TP, gradient": (GRADIENT, 1, dict(parallelism=dict(tensor=2, shard=1))),
    "8bit": (LOSS, 0, dict(
        parallelism=dict(shard=2), optimizer=dict(state_dtype="8bit", stochastic_rounding=True),
        training=dict(master_dtype="bfloat16"),
    )),
    "float8": (LOSS, 0, dict(
        parallelism=dict(shard=2), float8=dict(scaling="tensorwise", layers=("*",), emulate=True, all_gather=True),
    )),
}  # fmt: skip
FAST = ("PP, loss", "HSDP, gradient")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_skipped_steps_leave_no_trace(ranks: Ranks, tmp_path: Path, case: str) -> None:
    where, rank, sections = CASES[case]
    sections = sections | dict(training=dict(non_finite="skip") | sections.get("training", {}))
    faulty = (2, 4)
    skipping, reference = (tiny(tmp_path, name, **sections) for name in ("skipping", "reference"))
    ends = ranks(2).run(train_with_faults, skipping, where, rank, faulty)
    ranks(2).run(train_without_updates, reference, faulty)

    assert [message for message, _ in ends] == ["", ""]
    if "HSDP" in case:
        assert ends[0] == ends[1]
    skipped = [record for record in records(tmp_path / "skipping") if "skipped" in record]
    assert [record["step"] for record in skipped] == list(faulty)
    assert all(f"rank {rank}" in record["skipped"] for record in skipped)
    found, expected = result(skipping), result(reference)
    assert found.state["optimizer"]["norm.weight.step"] == 3.0
    assert_equal_state(found.state, expected.state)
    finite = [step - 1 for step in range(1, 6) if step not in faulty]
    assert [found.losses[index] for index in finite] == [expected.losses[index] for index in finite]


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
