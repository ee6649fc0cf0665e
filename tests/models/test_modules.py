"""How transforms replace layers: classes, names of parameters, and what refers to a layer that has been replaced."""

import copy
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training import GPT_, LLAMA, MIXTRAL, Operations
from titanlike.config.sections import Float8
from titanlike.models.common.init import initialize
from titanlike.models.common.layers import TiedLMHead
from titanlike.models.families import all_configs
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.mixed_precision import (
    MixedPrecisionEmbedding,
    MixedPrecisionLinear,
    _Linear,
    apply_mixed_precision,
    cast_once,
    cast_parameters,
)
from titanlike.parallelisms.pipeline import _stage_module
from titanlike.utils import weight_gradients
from titanlike.utils.modules import ParameterOwner, rebuild, replace_modules
from titanlike.utils.weight_gradients import accumulate_in_place

FLOAT8 = Float8(scaling="tensorwise", layers=("*",), emulate=True)


@pytest.mark.parametrize("config", [LLAMA, GPT_, MIXTRAL], ids=lambda config: config.name)
def test_mixed_precision_keeps_parameters_and_computes_in_the_compute_dtype(config: Any) -> None:
    with torch.device("meta"):
        model = build_model(config)
    initialize(model, torch.device("cpu"), 0)
    reference = copy.deepcopy(model).bfloat16()
    names = [*model.state_dict()]
    apply_mixed_precision(model, torch.bfloat16)
    assert [*model.state_dict()] == names
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    tokens = torch.arange(16)[None]
    found, expected = model(tokens), reference(tokens)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_has_the_float32_product_as_its_gradient(bias: bool) -> None:
    """As on a GPU, whose matmul writes float32. The plain layer rounds the gradients to the compute dtype first."""
    torch.manual_seed(1)
    x = torch.randn(2, 64, 8).bfloat16().requires_grad_()
    layer = MixedPrecisionLinear(8, 4, bias=bias)
    layer.compute_dtype = torch.bfloat16
    out, plain = _Linear.apply(x, layer.weight, layer.bias, torch.bfloat16), layer(x)
    assert torch.equal(out, plain)
    direction = torch.randn(2, 64, 4).bfloat16()
    inputs = (x, *layer.parameters())
    found, expected = (torch.autograd.grad(each, inputs, direction) for each in (out, plain))
    assert torch.equal(found[0], expected[0])
    rows = direction.double().flatten(0, 1)
    for exact, one, other in zip(
        (rows.t() @ x.double().flatten(0, 1), rows.sum(0)), found[1:], expected[1:], strict=False
    ):
        errors = [(each.double() - exact).norm() / exact.norm() for each in (one, other)]
        assert one.dtype == torch.float32 and errors[0] < 1e-6 < 1e-3 < errors[1]


class Shared(nn.Module):
    """Embeddings, of which the head uses one, and linear layers, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = MixedPrecisionEmbedding(16, 8), MixedPrecisionEmbedding(12, 8)
        self.tokens.compute_dtype = self.positions.compute_dtype = torch.bfloat16
        self.once, self.hooked, self.twice = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head = TiedLMHead(self.tokens)

    def layers(self, x: Tensor) -> Tensor:
        for layer in (self.twice, self.once, self.hooked, self.twice):
            x = _Linear.apply(x, layer.weight, layer.bias, torch.bfloat16).tanh()
        return x

    def forward(self, ids: Tensor, run: Any) -> Tensor:
        x = run(self.tokens(ids) + self.positions(torch.arange(12)))
        return self.head(x, ids.roll(1, -1))


@pytest.mark.parametrize(("how", "added"), [("eager", 4), ("compiled", 4), ("checkpointed", 0)])
def test_gradients_of_micro_batches_are_added_where_they_are_computed(
    how: str, added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As autograd adds them, which does so for a weight with a hook, and one that checkpointing saves. `torch.autograd.grad`
    changes none."""
    ids = torch.randint(0, 16, (3, 2, 12), generator=torch.Generator().manual_seed(0))
    add_product = MagicMock(side_effect=weight_gradients.add_product)
    monkeypatch.setattr(weight_gradients, "add_product", add_product)
    found: list[list[Tensor]] = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = Shared()
        run: Any = (
            torch.compile(model.layers, backend="aot_eager", fullgraph=True) if how == "compiled" else model.layers
        )
        if how == "checkpointed":
            run = partial(checkpoint, run, use_reentrant=False)
        seen: list[Tensor] = []
        num_rows = 0
        model.hooked.weight.register_hook(seen.append)
        for each in ids:
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            torch.autograd.grad(model(each, run), [*model.parameters()])
            after = [p.grad for p in model.parameters()]
            assert all(map(torch.equal, before, after)) if None not in before else before == after
            loss = model(each, run)
            with accumulate_in_place(in_place), Operations() as operations:
                loss.backward()
            num_rows += operations.counts["index_put_"]
        assert add_product.call_count == (added if in_place else 0)
        assert num_rows == (5 if in_place else 0)  # those of the tied weight also in the first micro-batch
        found.append([*(cast(Tensor, p.grad) for p in model.parameters()), *seen])
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_cast_once_in_a_step(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same results, also after changes of weights that autograd does not know of."""
    monkeypatch.setattr(MixedPrecisionLinear, "is_cast", lambda layer: layer.weight.requires_grad)  # as on a GPU
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=bias) for bias in (True, False, True)))
    model[1].weight.requires_grad_(False)
    apply_mixed_precision(model, torch.bfloat16)
    run = torch.compile(model.forward, backend="aot_eager", fullgraph=True) if compiled else model.forward
    found, casts = [], []
    for factor, model.casts_once in ((0.5, False), (2.0, False), (0.5, True), (2.0, True)):
        model[0].weight.data.mul_(factor)
        model.zero_grad()
        with nullcontext() if compiled else Operations() as operations, cast_once(model):
            outs = [run(each) for each in torch.ones(2, 4, 8).bfloat16()]
            torch.stack(outs).float().square().sum().backward()
        found.append([*outs, *(p.grad for p in model.parameters() if p.grad is not None)])
        casts.append(operations and operations.counts["_to_copy"])
        assert all(layer.weight_copy is None for layer in model)
    assert all(map(torch.equal, found[0] + found[1], found[2] + found[3]))
    assert not torch.equal(found[2][0], found[3][0])
    assert (
        compiled or casts[1] - casts[3] == 8 - 2
    )  # of two weights, in the forward and backward pass of two micro-batches
    with pytest.raises(RuntimeError, match="weights have changed"), cast_once(model), torch.no_grad():
        model[2].weight.add_(1.0)


def test_a_stage_of_a_pipeline_has_the_modules_of_no_other() -> None:
    for kind in (kind for kind in all_configs() if not kind.is_encoder_decoder):
        with torch.device("meta"):
            model = build_model(kind())
        stages = [_stage_module(model, stage, [1, len(blocks(model)) - 2, 1]) for stage in range(3)]
        names = {*dict(model.named_parameters()), "output.weight"}  # also of a tied head, which the last stage copies
        assert Counter(name for stage in stages for name, _ in stage.named_parameters()) == Counter(names), kind
        assert [getattr(stage, "output", None) is None for stage in stages] == [True, True, False], kind


class Shifted(nn.Module):
    """A module of a user with a parameter that stays in float32."""

    float32_parameters = ("shift",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.001]))
        self.shift = nn.Parameter(torch.tensor([1.001]), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.shift


def test_a_parameter_that_stays_in_float32_is_not_cast() -> None:
    model = nn.Sequential(Shifted())
    apply_mixed_precision(model, torch.bfloat16)
    scale, shift = model[0]()
    assert scale.dtype == torch.bfloat16 and scale.item() == 1.0
    assert shift.dtype == torch.float32 and shift.item() == torch.tensor(1.001).item()
    cast_parameters(model, torch.bfloat16)
    assert model[0].scale.dtype == torch.bfloat16 and model[0].shift.dtype == torch.float32


class Gain(nn.Module):
    """A module of a user, with a parameter, a child and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.child, self.factor = nn.Parameter(torch.full((4,), 3.0)), nn.Dropout(0.5), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x * self.gain * self.factor)


def test_an_owner_has_the_names_and_the_attributes_of_its_module() -> None:
    model = nn.Sequential(Gain())
    gain = model[0]
    owner = ParameterOwner(gain)
    replace_modules(model, {gain: owner})
    assert [*model.state_dict()] == ["0.gain"]
    assert [name for name, _ in model.named_modules()] == ["", "0", "0.child"]
    assert owner.factor == 2.0 and not model.eval()[0].module.training
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = owner.unknown
    owner.set_tensors({"gain": torch.full((4,), 5.0)})
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 10.0))
    assert torch.equal(copy.deepcopy(model)(torch.ones(4)), torch.full((4,), 10.0))
    owner.register_parameter("gain", nn.Parameter(torch.zeros(4)))
    assert torch.equal(gain.gain, torch.zeros(4))  # what refers to the old module sees the new parameter


@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_precision_of_a_module_of_a_user(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Gain()).eval()
    apply_mixed_precision(model, torch.bfloat16)
    assert isinstance(model[0], MixedPrecisionLinear) and str(model[1]).startswith("MixedPrecision(")
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    out = call(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())


def test_a_module_that_is_used_twice_stays_one_module() -> None:
    linear = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": linear, "b": nn.Sequential(linear)})
    replace_modules(model, {linear: rebuild(linear, MixedPrecisionLinear, compute_dtype=torch.bfloat16)})
    assert isinstance(model["a"], MixedPrecisionLinear) and model["a"] is model["b"][0]  # type: ignore[index]
