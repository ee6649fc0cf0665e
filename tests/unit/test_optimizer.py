"""The loss, the learning rate, the parameter groups, clipping, and the stop before a bad step."""

import pytest
import torch
from torch import nn

from titanlike.config import UserError
from titanlike.config.models import GPT, Llama
from titanlike.config.sections import Optimizer, Schedule
from titanlike.loss import IGNORE, cross_entropy_sum, num_valid
from titanlike.models import build_model
from titanlike.optimizer import Guard, build_optimizer, clip_gradients, gradient_norms, learning_rate


def test_the_loss_is_a_sum_over_valid_tokens() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, IGNORE, 3, 4], [IGNORE, IGNORE, 6, 0, 1]])
    expected = -sum(
        logits[b, t].log_softmax(-1)[labels[b, t]] for b in range(2) for t in range(5) if labels[b, t] != IGNORE
    )
    torch.testing.assert_close(cross_entropy_sum(logits, labels), expected)
    assert num_valid(labels) == 7
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize(
    ("decay", "decay_steps", "at"),
    [
        # warm-up of 10 in 110 steps: half-way up, at the peak, half-way down, at the floor of 0.1
        ("linear", 0, {5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1}),
        ("cosine", 0, {5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * (0.5 + 0.5**1.5), 60: 0.55, 110: 0.1}),
        ("sqrt", 0, {10: 1.0, 35: 0.55, 110: 0.1}),
        ("none", 0, {5: 0.5, 10: 1.0, 110: 1.0}),
        # warm up, stay, decay over the last 20
        ("linear", 20, {10: 1.0, 60: 1.0, 90: 1.0, 100: 0.55, 110: 0.1}),
    ],
)
def test_the_learning_rate(decay: str, decay_steps: int, at: dict[int, float]) -> None:
    section = Schedule(warmup_steps=10, decay=decay, decay_steps=decay_steps, min_ratio=0.1)  # type: ignore[arg-type]
    for step, ratio in at.items():
        assert learning_rate(step, 110, 2.0, section) == pytest.approx(2.0 * ratio), step


def test_the_learning_rate_of_runs_too_short_to_warm_up() -> None:
    assert learning_rate(1, 1, 2.0, Schedule(warmup_steps=0)) == pytest.approx(0.2)
    assert learning_rate(5, 5, 2.0, Schedule(warmup_steps=5)) == pytest.approx(2.0)
    assert learning_rate(3, 3, 2.0, Schedule(warmup_steps=6)) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [Llama(num_layers=1), GPT(num_layers=1)], ids=["llama", "gpt"])
def test_norms_and_biases_are_not_decayed(shape: Llama | GPT) -> None:
    model = build_model(shape)
    decayed, spared = build_optimizer(model, Optimizer(weight_decay=0.1)).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[p] or names[p].endswith("bias") for p in spared["params"])
    assert not any("norm" in names[p] or names[p].endswith("bias") for p in decayed["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_fused_and_plain_adamw_agree() -> None:
    def trained(fused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = build_optimizer(model, Optimizer(fused=fused, lr=0.1))
        for _ in range(5):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight

    torch.testing.assert_close(trained(True), trained(False))


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    assert gradient_norms(model).total.item() == pytest.approx(5.0)
    clip_gradients(model, gradient_norms(model).total, max_norm=1.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.0, 0.8]]))
    clip_gradients(model, gradient_norms(model).total, max_norm=2.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.0, 0.8]]))


@pytest.mark.usefixtures("alone")
def test_a_bad_step_is_named_and_a_good_one_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    Guard().step(3, good, good, gradient_norms(model))
    with pytest.raises(UserError, match=r"step 3: the loss is nan on rank 0\. Nothing of it was saved"):
        Guard().step(3, bad, bad, gradient_norms(model))
    model[1].bias.grad = torch.tensor([float("inf")])
    with pytest.raises(UserError, match=r"finite, but not the gradient of 1\.bias, in the part held by rank 0"):
        Guard().step(3, good, good, gradient_norms(model))
    model[1].bias.grad = torch.tensor([3e38])
    with pytest.raises(UserError, match="the gradient norm is inf: they are too large to add up"):
        Guard().step(3, good, good, gradient_norms(model))
