"""Low-precision AdamW in a single process: updates, state size, stochastic rounding and quantization."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titanlike.config.optimizer import Optimizer
from titanlike.optim.low_precision_adamw import (
    BLOCK,
    LowPrecisionAdamW,
    _block_scales,
    _codebook,
    _dequantize,
    _quantize,
    _random_bits,
    _update,
)
from titanlike.optim.optimizer import build_optimizer


class TinyModel(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def train(steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[TinyModel, Any]:
    """Returns a trained model and its optimizer."""
    model = TinyModel(dtype)
    optimizer: Any = build_optimizer(model, Optimizer(lr=1e-3, **options))
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = (model(x.to(dtype)).float() - torch.sin(2 * x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_full_precision_state_matches_torch_adamw() -> None:
    model = TinyModel(torch.float32)
    optimizer = LowPrecisionAdamW(
        [{"params": list(model.parameters()), "weight_decay": 0.1}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, state_dtype="full", seeds={},
    )  # fmt: skip
    expected = TinyModel(torch.float32)
    reference = torch.optim.AdamW(expected.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        for each in (model, expected):
            generator = torch.Generator().manual_seed(step)
            for parameter in each.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        reference.step()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_update_scales_gradients_once() -> None:
    updated = []
    for scaled in (True, False):
        model = TinyModel(torch.float32)
        optimizer: Any = build_optimizer(model, Optimizer(state_dtype="8bit", lr=0.1))
        assert optimizer.scale_in_step(torch.tensor(0.25)) == set()  # on a CPU
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                if step == 1 and scaled:
                    parameter.grad *= 0.25  # rounds nothing
            if step == 1 and not scaled:
                optimizer._factor = torch.tensor(0.25)
            optimizer.step()
        updated.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *updated))


@pytest.mark.parametrize(("state", "of_matrix"), [("bfloat16", torch.bfloat16), ("8bit", torch.uint8)])
def test_dtypes_of_moments(state: Any, of_matrix: torch.dtype) -> None:
    """Those of vectors, and of matrices without whole blocks, have 8 bits in no mode."""
    expected = [of_matrix] + [torch.float32 if state == "8bit" else torch.bfloat16] * 2
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in ((2, 512), (512,), (2, 500))])
    optimizer = build_optimizer(model, Optimizer(state_dtype=state))
    sum(parameter.sum() for parameter in model).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert [optimizer.state[parameter]["exp_avg"].dtype for parameter in model] == expected


def test_random_bits_of_rounding_are_those_of_the_tied_weight_and_of_no_other() -> None:
    model: Any = nn.ParameterDict({name: nn.Parameter(torch.ones(64, 64)) for name in ("one", "twin", "other")})
    model.copies = {"twin": "one"}  # as of a pipeline
    optimizer: Any = build_optimizer(model, Optimizer(stochastic_rounding=True))
    seeds = [optimizer.seeds[model[name]] for name in ("one", "twin", "other")]
    one, twin, other, next_seed = (_random_bits(model["one"], seed, 0, 4096) for seed in (*seeds, seeds[0] + 1))
    assert torch.equal(one, twin)
    for bits in (other, next_seed, next_seed.roll(1), next_seed.roll(-1)):
        assert (one == bits).float().mean() < 0.01


def test_chunked_update_matches_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = dict(state_dtype="8bit", stochastic_rounding=True)
    expected, _ = train(3, torch.bfloat16, **options)
    monkeypatch.setattr("titanlike.optim.low_precision_adamw.CHUNK", 3 * BLOCK)
    found, _ = train(3, torch.bfloat16, **options)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_stochastic_rounding_accumulates_updates_below_bfloat16_resolution() -> None:
    """Each of 100 updates is a sixteenth of bfloat16's spacing below 1: rounding to nearest loses all of them."""
    ends = []
    for seeds in (False, True):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = LowPrecisionAdamW(
            [{"params": [weight], "weight_decay": 0.0}],
            lr=2**-12, betas=(0.9, 0.95), eps=1e-8, state_dtype="full", seeds={weight: 7} if seeds else {},
        )  # fmt: skip
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends.append(weight.float())
    assert (ends[0] == 1.0).all()
    assert ends[1].mean().item() == pytest.approx(1.0 - 100 * 2**-12, abs=2e-4)
    assert ends[1].std() > 0


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_8bit_quantization_error_is_small(name: str) -> None:
    value = torch.randn(256, BLOCK, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 256)[:, None]
    value = value if name == "exp_avg" else value.square()
    state = {name: torch.zeros(256, BLOCK, dtype=torch.uint8), f"{name}_scale": torch.zeros(256, 1)}
    codebooks = {name: _codebook(name, torch.device("cpu"))}
    _quantize(state, name, value, codebooks)
    amax = value.abs().amax(-1, keepdim=True)
    assert ((_dequantize(state, name, codebooks) - value).abs() / amax).max() < 0.02
    _quantize(state, name, torch.zeros(256, BLOCK), codebooks)
    assert (_dequantize(state, name, codebooks) == 0).all()
    assert _block_scales(torch.zeros(4, 3 * BLOCK)).shape == (4, 3)


def test_load_state_dict_keeps_dtypes() -> None:
    """`torch.optim.Optimizer` would cast all state, including scales, to the weight's dtype."""
    model, optimizer = train(3, torch.bfloat16, state_dtype="8bit", stochastic_rounding=True)
    other = build_optimizer(model, Optimizer(state_dtype="8bit", stochastic_rounding=True))
    other.load_state_dict(optimizer.state_dict())
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            found = other.state[parameter][name]
            assert found.dtype == value.dtype and torch.equal(found, value), name


@pytest.mark.parametrize("state", [pytest.param("full", marks=pytest.mark.slow), "8bit"])
def test_update_compiles_once_for_all_shapes(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with a backend that generates no code."""
    torch._dynamo.reset()
    expected, _ = train(4, torch.bfloat16, state_dtype=state, stochastic_rounding=True)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        "titanlike.optim.low_precision_adamw._update",
        torch.compile(_update, fullgraph=True, dynamic=True, backend=backend),
    )
    found, _ = train(4, torch.bfloat16, state_dtype=state, stochastic_rounding=True)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(graphs) <= 4  # for six weights: quantized or not, one row or several


def steps(gradients: Tensor, state_dtype: Any, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Returns the steps of low-precision AdamW and of torch's in float32 for each of `gradients`, in units of the learning rate."""
    found, expected = nn.Parameter(torch.zeros(gradients.shape[1:])), nn.Parameter(torch.zeros(gradients.shape[1:]))
    options: dict[str, Any] = dict(lr=1.0, betas=betas, eps=1e-12)
    optimizer = LowPrecisionAdamW([found], **options, state_dtype=state_dtype, seeds={})
    optimizers = {found: optimizer, expected: torch.optim.AdamW([expected], **options, weight_decay=0.0)}
    taken: dict[nn.Parameter, list[Tensor]] = {found: [], expected: []}
    for gradient in gradients:
        for parameter, each in optimizers.items():
            parameter.data.zero_()  # a sum would round the step
            parameter.grad = gradient.clone()
            each.step()
            taken[parameter].append(-parameter.data)
    return torch.stack(taken[found]), torch.stack(taken[expected])


def rare_rows() -> Tensor:
    """The embeddings of rare tokens: 2% of the rows in each step."""
    generator = torch.Generator().manual_seed(0)
    gradients = 1e-2 * torch.randn(200, 64, BLOCK, generator=generator)
    gradients[:, 1:] *= 1e-3  # weakly correlated with every token
    return gradients * (torch.rand(200, 64, 1, generator=generator) < 0.02)


def rare_elements() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rare = torch.rand(200, 8, BLOCK, generator=generator) < 0.02
    return 1e-2 * torch.randn(200, 8, BLOCK, generator=generator) * torch.where(rare, 1.0, 1e-4)


def one_large_column() -> Tensor:
    gradients = 1e-2 * torch.randn(200, 8, BLOCK, generator=torch.Generator().manual_seed(0))
    gradients[..., 0] *= 1000
    return gradients


def small_beside_large_then_zero() -> Tensor:
    gradients = torch.zeros(30, 4, BLOCK)
    gradients[0, :, ::2], gradients[0, :, 1::2] = 1e-2, 3e-6
    return gradients


@pytest.mark.parametrize(
    ("gradients", "max_error"),
    [(rare_rows, 0.05), (rare_elements, 0.6), (one_large_column, 0.35), (small_beside_large_then_zero, 0.35)],
)
def test_8bit_steps_are_bounded_where_gradients_are_uneven(gradients: Any, max_error: float) -> None:
    """Second moments below the smallest code became 0, while their first moments did not: steps of 100 learning rates and more."""
    found, expected = steps(gradients(), "8bit", (0.9, 0.95))
    assert expected.abs().max() > 0.5
    assert found.abs().max() < 1.17  # of any sequence of gradients, with these betas
    assert (found - expected).norm() < max_error * expected.norm()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("state_dtype", ["8bit", "bfloat16"])
def test_no_step_is_far_above_that_of_float32(state_dtype: str, seed: int) -> None:
    """Gradients that are rare, that differ by orders of magnitude within a block, and that grow, shrink or spike over time."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    betas = draw.choice([(0.9, 0.95), (0.9, 0.98), (0.95, 0.95), (0.8, 0.95), (0.0, 0.8)])
    decades, growth, spikes, constant = (
        draw.randint(0, 9), draw.uniform(-0.3, 0.6), draw.random() < 0.5, draw.random() < 0.5,
    )  # fmt: skip
    row_share, element_share = draw.choices([1.0, 0.3, 0.02], k=2)
    size = (50, 2, BLOCK)
    gradients = torch.ones(size) if constant else torch.randn(size, generator=generator)
    gradients *= 10 ** (-decades * torch.rand(BLOCK, generator=generator))
    gradients *= torch.exp(growth * torch.rand(size[1:], generator=generator) * torch.arange(50)[:, None, None])
    for share, shape in ((row_share, (50, 2, 1)), (element_share, size)):
        gradients *= torch.rand(shape, generator=generator) < share
    if spikes:
        gradients *= torch.where(torch.rand(size, generator=generator) < 0.05, 1e3, 1.0)
    gradients[..., 0] = 10.0 ** (decades / 2)  # a steady element defines the scale of its block
    found, expected = steps(gradients, state_dtype, betas)
    assert found[expected.abs() <= 1.0].abs().max() <= 3.0


@pytest.mark.parametrize(("dtype", "num_steps"), [(torch.float32, 4), (torch.bfloat16, 1)])
def test_the_kernel_of_gpus_clips_and_updates_as_torch_does(
    dtype: torch.dtype, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, which truncates to bfloat16: weights of several programs, of one, and of sizes and places that are
    not aligned."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs a torch with Triton")
    from titanlike.optim import fused_adamw

    monkeypatch.setattr(fused_adamw, "_update", interpreter.InterpretedFunction(fused_adamw._update.fn))
    options: dict[str, Any] = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    weights = [torch.randn(size)[start:].to(dtype) for size, start in ((9000, 0), (16, 0), (7, 0), (4113, 1))]
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    expected = [[value.float().clone() for value in each] for each in (weights, *moments)]
    steps, counts = ([torch.tensor(0.0) for _ in weights] for _ in range(2))
    for step in range(num_steps):
        present = slice(step % 2, None)  # steps of parameters differ
        gradients = [torch.randn(len(weight)).to(dtype) for weight in weights[present]]
        factor = torch.tensor(0.3 if step else 1.0)
        lists = [each[present] for each in (weights, *moments)]
        fused_adamw.update(lists[0], gradients, *lists[1:], steps[present], factor, **options)
        lists = [each[present] for each in expected]
        scaled = [gradient.float() * factor for gradient in gradients]
        adamw(lists[0], scaled, *lists[1:], [], counts[present], amsgrad=False, maximize=False, fused=True, **options)
    assert steps == counts
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    for found, reference in zip((weights, *moments), expected, strict=True):
        for one, other in zip(found, reference, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=rtol, atol=1e-6)
