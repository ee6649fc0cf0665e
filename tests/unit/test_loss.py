"""The loss by way of the head, in pieces, against torch's own of all logits at once."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training import Operations
from titanlike.models.loss import (
    IGNORE,
    chunked_linear_cross_entropy,
    compiled,
    cross_entropy_inplace,
    cross_entropy_sum,
)

TOKENS, WIDTH, WORDS = 24, 16, 40


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (2, TOKENS // 2), generator=generator)
    labels[0, 3] = labels[1, :4] = IGNORE
    return x, weight, labels


def by_torch(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (x.double() @ weight.double().t()).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [0, 1, 7, TOKENS, 1000])
def test_in_pieces_it_is_torchs_own(chunk: int) -> None:
    x, weight, labels = inputs()
    expected = torch.autograd.grad(by_torch(x, weight, labels) / 19, (x, weight))
    loss = chunked_linear_cross_entropy(x, weight, labels, chunk=chunk)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), by_torch(x, weight, labels))
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight)), expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_the_same(backend: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled.cache_clear()
    x, weight, labels = inputs(dtype)
    expected = torch.autograd.grad(chunked_linear_cross_entropy(x, weight, labels, chunk=7) / 19, (x, weight))
    loss = chunked_linear_cross_entropy(x, weight, labels, chunk=7, backend=backend)
    torch.testing.assert_close(loss, chunked_linear_cross_entropy(x, weight, labels, chunk=7))
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight)), expected)


def test_of_logits_it_is_torchs_own() -> None:
    x, weight, labels = inputs()
    logits = (x @ weight.t()).detach().requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    for loss in (cross_entropy_sum(logits, labels), chunked_linear_cross_entropy(logits, None, labels)):
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits, retain_graph=True)
        )


def test_nothing_to_learn_is_no_loss_and_no_gradient() -> None:
    x, weight, labels = inputs()
    loss = chunked_linear_cross_entropy(x, weight, torch.full_like(labels, IGNORE), chunk=5)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None and weight.grad is not None
    assert not x.grad.any() and not weight.grad.any()


def test_huge_logits_do_not_overflow() -> None:
    x, weight, labels = inputs()
    loss = chunked_linear_cross_entropy(x * 1e4, weight, labels, chunk=7)
    torch.testing.assert_close(loss.double(), by_torch(x * 1e4, weight, labels), rtol=1e-5, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("scale", [1 / 3000, 1 / 4096])
def test_in_bfloat16_the_scale_is_not_rounded(scale: float) -> None:
    """1/3000 is 0.2% off in bfloat16. Rounding by itself is without bias: its mean over many numbers is far below that."""
    x, weight, labels = inputs(torch.bfloat16)
    once = torch.autograd.grad(chunked_linear_cross_entropy(x, weight, labels), weight)[0].float()
    scaled = torch.autograd.grad(chunked_linear_cross_entropy(x, weight, labels) * scale, weight)[0].float()
    assert (scaled * once).sum() / once.square().sum() == pytest.approx(scale, rel=3e-4)


def test_in_bfloat16_pieces_add_little_to_the_rounding() -> None:
    x, weight, labels = inputs(torch.bfloat16)
    exact = torch.autograd.grad(by_torch(x, weight, labels), weight)[0].float()
    errors = {}
    for chunk in (0, 3):
        found = torch.autograd.grad(chunked_linear_cross_entropy(x, weight, labels, chunk=chunk), weight)[0].float()
        errors[chunk] = ((found - exact).norm() / exact.norm()).item()
    assert errors[0] < 4e-3  # 8 bits
    assert errors[3] < 3 * errors[0]


def test_a_backward_pass_in_two_parts_finds_the_same_twice() -> None:
    x, weight, labels = inputs()
    loss = chunked_linear_cross_entropy(x, weight, labels, chunk=7) / 19
    (for_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    (for_weight,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close((for_x, for_weight), torch.autograd.grad(by_torch(x, weight, labels) / 19, (x, weight)))


class Largest(TorchDispatchMode):
    """The largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor):
                self.numbers = max(self.numbers, made.numel())
        return out


class Made(TorchDispatchMode):
    """How many tensors of the size of the first one's whole are made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.numbers += sum(
            x.numel() == 64 * 320 and x.untyped_storage().data_ptr() not in before
            for x in (out if isinstance(out, tuple) else (out,))
            if isinstance(x, Tensor) and x.dtype != torch.bool
        )
        return out


def test_the_logits_are_never_there_at_once() -> None:
    x, weight, labels = (
        torch.randn(512, 8, requires_grad=True),
        torch.randn(64, 8, requires_grad=True),
        torch.zeros(512),
    )
    with Largest() as largest:
        chunked_linear_cross_entropy(x, weight, labels.long(), chunk=16).backward()
    assert largest.numbers == 512 * 8  # the stream itself; all logits would be 512 * 64
    with Largest() as largest:
        chunked_linear_cross_entropy(x, weight, labels.long()).backward()
    assert largest.numbers == 512 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_become_their_gradient_without_a_second_of_their_size(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(64, 320).to(dtype), torch.zeros(64, dtype=torch.long)
    kept = logits.clone()
    with Made() as made:
        cross_entropy_inplace(logits, labels)
    assert made.numbers == (0 if dtype == torch.float32 else 1)  # bfloat16: one in float32, to compute with
    exact = kept.double().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(exact, labels, reduction="sum"), exact)
    torch.testing.assert_close(logits, gradient.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_there_is_no_second_of_their_size_at_all(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    logits, labels = torch.randn(64, 320).to(dtype), torch.zeros(64, dtype=torch.long)
    _, codes = run_and_get_code(torch.compile(cross_entropy_inplace, fullgraph=True), logits, labels)
    sizes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "".join(codes))
    assert sizes
    assert set(sizes) <= {"64, 1", "64", ""}  # a number a token, and the sum


def test_without_gradients_none_are_made() -> None:
    x, weight, labels = inputs()
    with torch.no_grad(), Operations() as operations:
        chunked_linear_cross_entropy(x, weight, labels, chunk=12)
    assert operations.counts["mm"] == 2  # one a piece
    with Operations() as operations:
        chunked_linear_cross_entropy(x, weight, labels, chunk=12).backward()
    assert operations.counts["mm"] + operations.counts["addmm_"] == 6
