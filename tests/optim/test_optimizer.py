"""Loss, learning-rate schedule, parameter groups, gradient clipping and the non-finite guard."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titanlike.config import UserError
from titanlike.config.optimizer import Optimizer, OptimizerGroup, Schedule
from titanlike.config.sections import Training
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.registry import build_model
from titanlike.optim.clipping import Norms, clip_gradients, gradient_norms
from titanlike.optim.muon import Muon
from titanlike.optim.non_finite import LossScale, NonFiniteGuard
from titanlike.optim.optimizer import AdamW, build_optimizer
from titanlike.optim.schedule import learning_rate


@pytest.mark.parametrize(
    ("decay", "decay_ratio", "at"),
    [
        # 10 warm-up steps of 110: mid warm-up, peak, mid decay, minimum of 0.1
        ("linear", 0, {5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1}),
        ("cosine", 0, {5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * (0.5 + 0.5**1.5), 60: 0.55, 110: 0.1}),
        ("sqrt", 0, {10: 1.0, 35: 0.55, 110: 0.1}),
        ("none", 0, {5: 0.5, 10: 1.0, 110: 1.0}),
        # warm-up, stable phase, decay over the last 20 steps
        ("linear", 0.18, {10: 1.0, 60: 1.0, 90: 1.0, 100: 0.55, 110: 0.1}),
    ],
)
def test_learning_rate(decay: str, decay_ratio: float, at: dict[int, float]) -> None:
    section = Schedule(warmup_steps=10, decay=decay, decay_ratio=decay_ratio, min_ratio=0.1)  # type: ignore[arg-type]
    for step, ratio in at.items():
        assert learning_rate(step, 110, 2.0, section) == pytest.approx(2.0 * ratio), step


def test_stacks_of_biases_of_experts_are_no_matrices() -> None:
    """They have two dimensions, but no weight decay, and Muon does not update them."""
    model = build_model(GptOssConfig(dim=32, num_layers=2, ffn_dim=16, num_experts=4))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for groups in ((), (OptimizerGroup(pattern="experts", optimizer="muon"),)):
        optimizer = build_optimizer(model, Optimizer(groups=groups))
        decaying = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
        assert decaying == {name for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("_bias")}
        updated = {
            names[p]
            for one in getattr(optimizer, "optimizers", ())
            if isinstance(one, Muon)
            for group in one.param_groups
            for p in group["params"]
        }
        assert len(updated) == (2 * 3 if groups else 0) and not any(name.endswith("bias") for name in updated)


@pytest.mark.parametrize(("ratio", "steps"), [(0.2, 20), (0.25, 25), (0.204, 20), (0.001, 1), (0.9, 90)])
def test_a_decay_ratio_is_a_fraction_of_all_steps(ratio: float, steps: int) -> None:
    section = Schedule(warmup_steps=10, decay_ratio=ratio, min_ratio=0.0)
    assert section.num_decay_steps(100) == steps
    rates = [learning_rate(step, 100, 2.0, section) for step in range(10, 101)]
    assert [rate for rate in rates if rate < 2.0] == rates[-steps:] and rates[-1] == 0.0


def test_learning_rate_of_runs_shorter_than_the_warmup() -> None:
    assert learning_rate(1, 1, 2.0, Schedule(warmup_steps=0)) == pytest.approx(0.2)
    assert learning_rate(5, 5, 2.0, Schedule(warmup_steps=5)) == pytest.approx(2.0)
    assert learning_rate(3, 3, 2.0, Schedule(warmup_steps=6)) == pytest.approx(1.0)


@pytest.mark.parametrize("config", [LlamaConfig(num_layers=1), GPTConfig(num_layers=1)], ids=["llama", "gpt"])
def test_norms_and_biases_have_no_weight_decay(config: LlamaConfig | GPTConfig) -> None:
    model = build_model(config)
    decayed, not_decayed = build_optimizer(model, Optimizer(weight_decay=0.1)).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], not_decayed["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[p] or names[p].endswith("bias") for p in not_decayed["params"])
    assert not any("norm" in names[p] or names[p].endswith("bias") for p in decayed["params"])
    assert len(decayed["params"]) + len(not_decayed["params"]) == len(names)


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_bitwise_equal_to_torch(fused: bool) -> None:
    def trained(optimizer_class: type[torch.optim.AdamW]) -> dict[str, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
        optimizer = optimizer_class(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=fused)
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            model(torch.randn(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[p] for p in model.parameters()]
        moments = {key: [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")}
        return moments | {"parameters": [p.detach() for p in model.parameters()]}

    found, expected = trained(AdamW), trained(torch.optim.AdamW)
    for key, values in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(found[key], values, strict=True)), key


def test_clipping_scales_gradients_down_and_never_up() -> None:
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    assert gradient_norms(model).total.item() == pytest.approx(5.0)
    clip_gradients(model, gradient_norms(model).total, max_norm=1.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.0, 0.8]]))
    clip_gradients(model, gradient_norms(model).total, max_norm=2.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.0, 0.8]]))


@pytest.mark.usefixtures("alone")
def test_non_finite_step_raises_and_finite_step_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    NonFiniteGuard(Training()).should_step(3, good, good, gradient_norms(model), ONE)
    with pytest.raises(UserError, match=r"step 3: the loss is nan on rank 0\. The step was not saved"):
        NonFiniteGuard(Training()).should_step(3, bad, bad, gradient_norms(model), ONE)
    model[1].bias.grad = torch.tensor([float("inf")])
    with pytest.raises(UserError, match=r"finite, but not the gradient of 1\.bias, in the shard of rank 0"):
        NonFiniteGuard(Training()).should_step(3, good, good, gradient_norms(model), ONE)
    model[1].bias.grad = torch.tensor([3e38])
    with pytest.raises(UserError, match="the gradient norm overflows to inf"):
        NonFiniteGuard(Training()).should_step(3, good, good, gradient_norms(model), ONE)


ONE = torch.tensor(1)
FINITE_NORMS = Norms(torch.tensor(1.0), torch.tensor([1.0]), ["weight"])


def should_step(guard: NonFiniteGuard, step: int, *, finite: bool) -> bool:
    loss = torch.tensor(float("nan") if not finite else 1.0)
    return guard.should_step(step, loss, loss, FINITE_NORMS, ONE)


@pytest.mark.usefixtures("alone")
def test_non_finite_step_is_skipped_and_reported() -> None:
    reported: list[tuple[int, str]] = []
    guard = NonFiniteGuard(Training(non_finite="skip"), on_skip=lambda step, cause: reported.append((step, cause)))
    assert [should_step(guard, step, finite=step != 2) for step in range(1, 5)] == [True, False, True, True]
    infinite = Norms(torch.tensor(float("inf")), torch.tensor([1.0, float("inf")]), ["first", "second"])
    assert not guard.should_step(5, torch.tensor(1.0), torch.tensor(1.0), infinite, ONE)
    guard.flush()
    assert guard.skipped == [2, 5]
    assert reported[0] == (2, "the loss is nan on rank 0")
    assert reported[1] == (5, "the loss is finite, but not the gradient of second, in the shard of rank 0")


def test_the_loss_scale_is_that_of_torch() -> None:
    ours, parameter = LossScale("float16"), torch.nn.Parameter(torch.zeros(1))
    theirs = torch.amp.GradScaler("cpu", init_scale=LossScale.INITIAL, growth_interval=LossScale.GROWTH_INTERVAL)
    optimizer = torch.optim.SGD([parameter])
    for step in range(3 * LossScale.GROWTH_INTERVAL):
        overflow = step in (0, 1, 7, LossScale.GROWTH_INTERVAL + 3)
        assert ours.value == theirs.scale(torch.ones(1)).item()
        parameter.grad = torch.tensor([float("inf") if overflow else 1.0])
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow=overflow)
        ours = LossScale("float16", ours.state)  # a checkpoint loses nothing
    assert ours.value == theirs.get_scale() == LossScale.INITIAL / 8


def test_the_loss_scale_is_bounded_and_for_float16_only() -> None:
    scale = LossScale("float16", [LossScale.LARGEST, LossScale.GROWTH_INTERVAL - 1])
    scale.update(overflow=False)
    assert scale.state == [LossScale.LARGEST, 0]
    scale = LossScale("bfloat16", [4.0, 1])  # of a checkpoint in float16
    assert (scale.value, scale.state) == (1.0, [])


@pytest.mark.usefixtures("alone")
def test_an_overflow_skips_the_step_and_a_non_finite_loss_does_not() -> None:
    reported: list[tuple[int, str]] = []
    overflow = Norms(torch.tensor(float("inf")), torch.tensor([float("inf")]), ["weight"])
    one = torch.tensor(1.0)
    half = Training(compute_dtype="float16")
    guard = NonFiniteGuard(half, loss_scale=[4.0, 0], on_skip=lambda step, cause: reported.append((step, cause)))
    norms = (overflow, FINITE_NORMS, overflow)
    assert [guard.should_step(step, one, one, each, ONE) for step, each in enumerate(norms)] == [False, True, False]
    cause = "the loss is finite, but not the gradient of weight, in the shard of rank 0; the loss scale is now"
    assert reported == [(0, f"{cause} 2"), (2, f"{cause} 1")]
    assert (guard.loss_scale, guard.skipped) == (1.0, [])
    with pytest.raises(
        UserError, match=r"step 3: .* of rank 0, in float16 without a loss scale; set training.compute_dtype"
    ):
        guard.should_step(3, one, one, overflow, ONE)
    guard = NonFiniteGuard(half)
    with pytest.raises(UserError, match=r"step 1: the loss is nan on rank 0\. The step was not saved"):
        should_step(guard, 1, finite=False)
    assert guard.loss_scale == LossScale.INITIAL


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("steps", "stops"),
    [
        ([1, 2], None),
        ([1, 2, 3], 3),
        ([1, 5, 10], 10),  # a window of exactly 10 steps
        ([1, 5, 11], None),
        ([1, 5, 11, 14], 14),
        ([1, 5, 11, 15, 21], None),
    ],
)
def test_too_many_skips_within_a_window_stop_the_run(steps: list[int], stops: int | None) -> None:
    guard = NonFiniteGuard(Training(non_finite="skip", skip_limit=2), window=10)
    stopped = None
    try:
        for step in range(1, 25):
            assert should_step(guard, step, finite=step not in steps) == (step not in steps)
    except UserError as error:
        stopped = step
        window = ", ".join(str(old) for old in steps if step - 10 < old <= step)
        assert f"It would be skip number 3 in the last 10 steps (steps {window}), more than" in str(error)
    assert stopped == stops


@pytest.mark.usefixtures("alone")
def test_skipped_steps_are_restored_on_resume() -> None:
    before = NonFiniteGuard(Training(non_finite="skip", skip_limit=2), window=10)
    for step in (4, 7):
        should_step(before, step, finite=False)
    after = NonFiniteGuard(Training(non_finite="skip", skip_limit=2), before.skipped, window=10)
    assert should_step(after, 8, finite=True)
    with pytest.raises(UserError, match=r"\(steps 4, 7, 9\)"):
        should_step(after, 9, finite=False)
    later = NonFiniteGuard(Training(non_finite="skip", skip_limit=2), before.skipped, window=10)
    assert not should_step(later, 14, finite=False)
    assert later.skipped == [7, 14]  # steps outside of every later window are dropped
    assert before.skipped == [4, 7]


def test_both_copies_of_a_tied_weight_are_in_one_group() -> None:
    """Of a pipeline, whose first and last stage have one each."""
    model: Any = nn.Module()
    model.tok_embeddings, model.output = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.copies = {"output.weight": "tok_embeddings.weight"}
    section = Optimizer(groups=(OptimizerGroup(pattern="tok_embeddings", lr_scale=3.0, weight_decay=0.0),))
    groups = [group for group in build_optimizer(model, section).param_groups if group["lr_scale"] == 3.0]
    assert [parameter for group in groups for parameter in group["params"]] == list(model.parameters())


def test_norms_of_bfloat16_gradients_are_not_rounded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 96, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm()
    norms = gradient_norms(model)
    assert norms.parts.dtype == torch.float32
    assert float(norms.total) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("option", [None, "fused", "amsgrad", "maximize"])
def test_the_kernel_of_gpus_is_not_used_for_what_it_does_not_compute(option: str | None) -> None:
    options: dict[str, Any] = {"fused": False} | ({option: True} if option else {})
    optimizer = AdamW([nn.Parameter(torch.ones(2))], **options)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert optimizer._has_kernel(on_gpu) == (option is None)
    assert optimizer.scale_in_step(torch.tensor(0.5)) == set()  # its weight is on a CPU
