"""AdamW that takes less memory: what it computes, what it keeps, and how it rounds. One process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanlike.config.sections import Optimizer
from titanlike.optim.low_precision_adamw import BLOCK, LowPrecisionAdamW, _levels, _read, _scales, _update, _write
from titanlike.optim.optimizer import build_optimizer


class Learner(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def learn(steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Learner, Any, float]:
    """A model after some steps, its optimizer, and the loss."""
    model = Learner(dtype)
    optimizer: Any = build_optimizer(model, Optimizer(lr=1e-3, fused=False, **options))
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = (model(x.to(dtype)).float() - torch.sin(2 * x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss.item()


def kept(optimizer: Any) -> float:
    """Bytes a parameter."""
    tensors = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    numbers = sum(parameter.numel() for parameter in optimizer.state)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / numbers


def test_with_full_averages_it_is_torchs_own() -> None:
    ours = Learner(torch.float32)
    optimizer = LowPrecisionAdamW(
        [{"params": list(ours.parameters()), "weight_decay": 0.1}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, state="full", seeds={},
    )  # fmt: skip
    theirs = Learner(torch.float32)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "dtype", "most_bytes", "worse"),
    [
        (dict(state_dtype="bfloat16"), torch.float32, 4.0, 1.05),
        (dict(state_dtype="8bit"), torch.float32, 2.3, 1.2),
        (dict(stochastic_rounding=True), torch.bfloat16, 4.0, 1.3),
        (dict(state_dtype="8bit", stochastic_rounding=True), torch.bfloat16, 2.3, 1.3),
    ],
    ids=str,
)
def test_less_is_kept_and_it_learns_all_the_same(
    options: dict[str, Any], dtype: torch.dtype, most_bytes: float, worse: float
) -> None:
    _, usual, expected = learn(80)
    assert kept(usual) == 8.0
    _, optimizer, loss = learn(80, dtype, **options)
    assert isinstance(optimizer, LowPrecisionAdamW)
    assert kept(optimizer) <= most_bytes
    assert loss < worse * expected


def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = dict(state_dtype="8bit", stochastic_rounding=True)
    expected, *_ = learn(3, torch.bfloat16, **options)
    monkeypatch.setattr("titanlike.optim.low_precision_adamw.PIECE", 3 * BLOCK)
    found, *_ = learn(3, torch.bfloat16, **options)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_that_are_too_small_for_bfloat16_add_up() -> None:
    """A hundred steps of a sixteenth of what bfloat16 can tell from 1: lost to the nearest, kept by chance."""
    ends = []
    for seeds in (False, True):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = LowPrecisionAdamW(
            [{"params": [weight], "weight_decay": 0.0}],
            lr=2**-12, betas=(0.9, 0.95), eps=1e-8, state="full", seeds={weight: 7} if seeds else {},
        )  # fmt: skip
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends.append(weight.float())
    assert (ends[0] == 1.0).all()
    assert ends[1].mean().item() == pytest.approx(1.0 - 100 * 2**-12, abs=2e-4)
    assert ends[1].std() > 0


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_eight_bits_are_near(name: str) -> None:
    value = torch.randn(256, BLOCK, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 256)[:, None]
    value = value if name == "exp_avg" else value.square()
    state = {name: torch.zeros(256, BLOCK, dtype=torch.uint8), f"{name}_scale": torch.zeros(256, 1)}
    levels = {name: _levels(name, torch.device("cpu"))}
    _write(state, name, value, levels)
    largest = value.abs().amax(-1, keepdim=True)
    assert ((_read(state, name, levels) - value).abs() / largest).max() < 0.02
    _write(state, name, torch.zeros(256, BLOCK), levels)
    assert (_read(state, name, levels) == 0).all()
    assert _scales(torch.zeros(4, 3 * BLOCK)).shape == (4, 3)


def test_what_was_kept_is_taken_over_as_it_was() -> None:
    """torch's own way would make everything of the weight's type, scales too."""
    model, optimizer, _ = learn(3, torch.bfloat16, state_dtype="8bit", stochastic_rounding=True)
    other = build_optimizer(model, Optimizer(state_dtype="8bit", stochastic_rounding=True))
    other.load_state_dict(optimizer.state_dict())
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            found = other.state[parameter][name]
            assert found.dtype == value.dtype and torch.equal(found, value), name


@pytest.mark.parametrize("state", ["full", "8bit"])
def test_the_update_compiles_once_for_all_shapes(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with a back end that does not wait for code generation."""
    torch._dynamo.reset()
    expected, *_ = learn(4, torch.bfloat16, state_dtype=state, stochastic_rounding=True)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        "titanlike.optim.low_precision_adamw._update",
        torch.compile(_update, fullgraph=True, dynamic=True, backend=backend),
    )
    found, *_ = learn(4, torch.bfloat16, state_dtype=state, stochastic_rounding=True)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(graphs) <= 4  # of six weights: what is quantized or not, of one row or of more
