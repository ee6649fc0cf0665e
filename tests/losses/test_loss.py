"""The chunked linear cross-entropy against `F.cross_entropy` of the full logits."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.loss_errors import linear_cross_entropy, reference, weight_gradient_errors
from tests.training import Operations
from titanlike.config import UserError
from titanlike.config.sections import Float8
from titanlike.float8.linear import Float8Head, apply_float8
from titanlike.losses import IGNORE, chunked, cross_entropy
from titanlike.losses.chunked import Logits, compiled
from titanlike.losses.cross_entropy import CrossEntropy, cross_entropy_inplace
from titanlike.losses.own import OwnLoss, check_loss
from titanlike.models.common.layers import LMHead, TiedLMHead
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.registry import build_model
from titanlike.parallelisms.mixed_precision import apply_mixed_precision
from titanlike.utils.weight_gradients import accumulate_in_place

TOKENS, DIM, VOCAB = 24, 16, 40


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS // 2, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (2, TOKENS // 2), generator=generator)
    labels[0, 3] = labels[1, :4] = IGNORE
    return x, weight, labels


@pytest.mark.parametrize("chunk", [0, 1, 7, TOKENS, 1000])
def test_chunked_loss_and_gradients_match_torch(chunk: int) -> None:
    x, weight, labels = inputs()
    expected = torch.autograd.grad(reference(x, weight, labels) / 19, (x, weight))
    loss = linear_cross_entropy(x, weight, labels, chunk=chunk)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference(x, weight, labels))
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight)), expected)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_frozen_head_has_no_gradient_and_no_product_for_it(reduction: Any) -> None:
    for frozen in (False, True):
        x, weight, labels = inputs()
        weight.requires_grad_(not frozen)
        bias = None if reduction == "none" else torch.zeros(VOCAB, requires_grad=not frozen)
        saved: list[Tensor] = []

        def save(value: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(value)
            return value

        with Operations() as operations, torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
            linear_cross_entropy(x, weight, labels, chunk=7, reduction=reduction, bias=bias).sum().backward()
        (expected,) = torch.autograd.grad(reference(x, weight, labels), (x,))
        torch.testing.assert_close(x.grad, expected)
        assert (weight.grad is None) == frozen and (bias is None or (bias.grad is None) == frozen)
        assert operations.counts["addmm_"] == (0 if frozen else 4)  # one for each chunk
        if reduction == "sum":
            shapes = [(TOKENS, DIM)] if frozen else [(TOKENS, DIM), (VOCAB, DIM), (VOCAB,)]
            assert [tuple(value.shape) for value in saved] == shapes


@pytest.mark.parametrize("token_loss", [False, True])
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_bias_of_the_logits(chunk: int, token_loss: bool) -> None:
    def own_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")

    x, weight, labels = inputs()
    bias = torch.linspace(-3.0, 2.0, VOCAB).requires_grad_()
    logits = (x.double() @ weight.double().t() + bias.double()).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    gradients = torch.autograd.grad(expected / 19, (x, weight, bias))
    loss = linear_cross_entropy(x, weight, labels, chunk=chunk, bias=bias, function=own_loss if token_loss else None)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight, bias)), gradients)
    head = LMHead(DIM, VOCAB, bias=True)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        torch.testing.assert_close(head(x).flatten(0, 1), logits.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head(x, labels).double(), expected)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns when it traces an autograd.Function
@pytest.mark.parametrize("chunk", [0, 7])
def test_the_loss_can_be_a_part_of_a_compiled_model(chunk: int) -> None:
    def own_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=0.1)

    for loss in (CrossEntropy(chunk=chunk), OwnLoss(own_loss, chunk=chunk)):
        x, weight, labels = inputs()

        def loss_of(x: Tensor, weight: Tensor, labels: Tensor, loss: CrossEntropy = loss) -> Tensor:
            return loss(Logits(x, weight), labels)

        traced = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        expected, found = (
            torch.autograd.grad(function(x, weight, labels), (x, weight)) for function in (loss_of, traced)
        )
        torch.testing.assert_close(found, expected)


class Results(TorchDispatchMode):
    """Records the sizes of the results of all operations, and the sizes and dtypes of those that have memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.new: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.sizes += [x.numel() for x in made]
        self.new += [(x.numel(), x.dtype) for x in made if x.untyped_storage().data_ptr() not in before]
        return out

    def dtypes(self, size: int) -> list[torch.dtype]:
        """Returns the dtypes of new tensors with this number of elements."""
        return [dtype for numel, dtype in self.new if numel == size]


def z_loss_reference(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """The summed loss with its z-loss term, in plain PyTorch."""
    logits, labels = logits.flatten(0, -2), labels.flatten()
    squares = logits.logsumexp(-1).square().where(labels != IGNORE, 0.0)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") + z_loss * squares.sum()


@pytest.mark.parametrize("z_loss", [1e-4, 0.1])
@pytest.mark.parametrize("chunk", [0, 7])
def test_z_loss_and_its_gradients_match_torch(chunk: int, z_loss: float) -> None:
    x, weight, labels = inputs()
    expected = z_loss_reference(x.double() @ weight.double().t(), labels, z_loss)
    assert expected > reference(x, weight, labels) + 100 * z_loss  # the term takes part
    gradients = torch.autograd.grad(expected / 19, (x, weight))
    loss = linear_cross_entropy(x, weight, labels, chunk=chunk, z_loss=z_loss)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight)), gradients)


@pytest.mark.parametrize(
    ("chunk", "z_loss", "backend"), [(0, 0.1, ""), (7, 0.0, ""), (7, 0.1, ""), (7, 0.1, "aot_eager_decomp_partition")]
)
def test_soft_capped_logits_match_the_plain_formula(chunk: int, z_loss: float, backend: str) -> None:
    x, weight, labels = inputs()
    logits = 3.0 * torch.tanh(x.double() @ weight.double().t() / 3.0)  # the largest are above 10 without the cap
    expected = torch.autograd.grad(z_loss_reference(logits, labels, z_loss) / 19, (x, weight))
    options: Any = dict(z_loss=z_loss, soft_cap=3.0)
    loss = linear_cross_entropy(x, weight, labels, chunk=chunk, backend=backend, **options)
    torch.testing.assert_close(loss.double(), z_loss_reference(logits, labels, z_loss))
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight)), expected)
    products = (x @ weight.t()).detach().requires_grad_()
    of_logits = linear_cross_entropy(products, None, labels, **options)
    torch.testing.assert_close(of_logits, loss)
    (found,) = torch.autograd.grad(of_logits / 19, products)
    torch.testing.assert_close((found @ weight).detach(), expected[0])


@pytest.mark.parametrize("head_class", [LMHead, TiedLMHead, Float8Head])
def test_every_head_bounds_its_logits_and_its_loss(head_class: Any) -> None:
    x, weight, labels = inputs()
    head = LMHead(DIM, VOCAB, soft_cap=3.0)
    if head_class is TiedLMHead:
        head = TiedLMHead(nn.Embedding(VOCAB, DIM), soft_cap=3.0)  # type: ignore[assignment]
    with torch.no_grad():
        head.weight.copy_(weight)
    if head_class is Float8Head:
        model = nn.Module()
        model.output = head
        apply_float8(model, Float8(scaling="tensorwise", head=True, layers=("*",), emulate=True))
        head = model.output
    assert isinstance(head, head_class)
    logits, loss = head(x), head(x, labels)
    plain = 3.0 * torch.tanh(x @ weight.t() / 3.0)  # the largest are above 10 without the cap
    assert (logits - plain).abs().mean() < (0.1 if head_class is Float8Head else 1e-5)
    torch.testing.assert_close(loss, z_loss_reference(logits, labels, 0.0))


def test_without_gradients_there_is_no_z_loss() -> None:
    x, weight, labels = inputs()
    with torch.no_grad():
        for args in ((x, weight), (x @ weight.t(), None)):
            found = linear_cross_entropy(*args, labels, chunk=7, z_loss=0.1)
            assert torch.equal(found, linear_cross_entropy(*args, labels, chunk=7))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "z_loss"), [(torch.float32, 0.1), (torch.bfloat16, 0.0)])
def test_compiled_matches_eager(backend: str, dtype: torch.dtype, z_loss: float) -> None:
    torch._dynamo.reset()
    compiled.cache_clear()
    x, weight, labels = inputs(dtype)
    eager = linear_cross_entropy(x, weight, labels, chunk=7, z_loss=z_loss)
    expected = torch.autograd.grad(eager / 19, (x, weight))
    loss = linear_cross_entropy(x, weight, labels, chunk=7, backend=backend, z_loss=z_loss)
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(torch.autograd.grad(loss / 19, (x, weight)), expected)
    with torch.no_grad():  # without z-loss
        found = linear_cross_entropy(x, weight, labels, chunk=7, backend=backend, z_loss=z_loss)
    torch.testing.assert_close(found, linear_cross_entropy(x, weight, labels, chunk=7))


def test_without_valid_labels_loss_and_gradients_are_zero() -> None:
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, torch.full_like(labels, IGNORE), chunk=5)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None and weight.grad is not None
    assert not x.grad.any() and not weight.grad.any()


def test_huge_logits_do_not_overflow() -> None:
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x * 1e4, weight, labels, chunk=7)
    torch.testing.assert_close(loss.double(), reference(x * 1e4, weight, labels), rtol=1e-5, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("scale", [1 / 3000, 1 / 4096])
def test_in_bfloat16_the_scale_is_not_rounded(scale: float) -> None:
    """In bfloat16, 1/3000 has an error of 0.2%; unbiased rounding of the gradients has a mean error far below that."""
    x, weight, labels = inputs(torch.bfloat16)
    once = torch.autograd.grad(linear_cross_entropy(x, weight, labels), weight)[0].float()
    scaled = torch.autograd.grad(linear_cross_entropy(x, weight, labels) * scale, weight)[0].float()
    assert (scaled * once).sum() / once.square().sum() == pytest.approx(scale, rel=3e-4)


@pytest.fixture
def factor_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the pass over the logits multiplies by what the backward pass starts from."""
    monkeypatch.setattr(cross_entropy, "factor_of", lambda logits: chunked._factor)


@pytest.mark.usefixtures("factor_on_cpu")
@pytest.mark.parametrize("auxiliary", [None, (1, 0.3)])
@pytest.mark.parametrize("starts_from_factor", [True, False])
def test_gradients_with_a_factor_are_those_without(starts_from_factor: bool, auxiliary: Any) -> None:
    factor = torch.tensor(1 / 3000)
    found = []
    for context in (nullcontext(), chunked.gradient_factor(factor)):
        x, weight, labels = inputs()
        with context:
            loss = linear_cross_entropy(x, weight, labels, chunk=7, z_loss=0.1, auxiliary=auxiliary)
        with Operations() as operations:
            loss.backward(factor if starts_from_factor else torch.tensor(0.7))
        found.append((loss.detach(), x.grad, weight.grad))
    assert chunked._factor is None
    assert operations.counts["mul"] == (0 if starts_from_factor else 2)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def accumulated(in_place: bool, scales: Any = (1.0, 1.0, 1.0), unused: int | None = None, hook: Any = None) -> Any:
    """Accumulates gradients over three micro-batches, as the loop does. Returns them, the addresses of that of the weight, and the
    dtypes of new tensors of its size in the last micro-batch.

    Args:
        scales: the objective of each micro-batch returns its loss times this number, if that is not 1.
        unused: the micro-batch whose objective computes another loss, which it does not return.
        hook: of the weight.
    """
    factor, (_, weight, _) = torch.tensor(1 / 3000), inputs()
    if hook is not None:
        weight.register_hook(hook)
    found, addresses = [], []
    with chunked.gradient_factor(factor):
        for index, scale in enumerate(scales):
            x, _, labels = inputs()
            with Results() as made:
                if index == unused:
                    linear_cross_entropy(x, weight, labels, chunk=7)
                loss = linear_cross_entropy(x, weight, labels.roll(index, -1), chunk=7)
                with accumulate_in_place(in_place):
                    (loss if scale == 1.0 else loss * scale).backward(factor)
            found.append(x.grad)
            addresses.append(0 if weight.grad is None else weight.grad.data_ptr())
    return [*found, weight.grad], addresses, made.dtypes(VOCAB * DIM)


@pytest.mark.usefixtures("factor_on_cpu")
def test_the_head_adds_to_the_gradient_of_the_micro_batches_before() -> None:
    (expected, _, others), (found, addresses, made) = (accumulated(in_place) for in_place in (False, True))
    torch.testing.assert_close(found, expected)
    assert len(set(addresses)) == 1 and others == [torch.float32] and made == []


@pytest.mark.usefixtures("factor_on_cpu")
@pytest.mark.parametrize(
    "options", [dict(scales=(0.5, 0.5, 2.0)), dict(unused=0), dict(hook=lambda gradient: 2.0 * gradient)],
    ids=["scaled losses", "a loss that is not used", "a hook"],
)  # fmt: skip
def test_where_a_loss_does_not_start_from_the_factor_autograd_adds(options: Any) -> None:
    (expected, _, others), (found, _, made) = (accumulated(in_place, **options) for in_place in (False, True))
    torch.testing.assert_close(found, expected)
    assert made == others != []


@pytest.mark.usefixtures("factor_on_cpu")
@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(unused=1), "does not return a loss"), (dict(scales=(1.0, 0.5, 1.0)), "scales this micro-batch")],
    ids=["not used", "scaled"],
)
def test_a_loss_that_was_added_to_the_gradient_has_to_be_that_of_the_backward_pass(options: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        accumulated(True, **options)
    accumulated(False, **options)


def test_in_bfloat16_many_chunks_are_as_exact_as_one() -> None:
    """A sum of 64 chunks in bfloat16 has several times the error of a single product."""
    unchunked, *chunked = weight_gradient_errors([0, 32, 100, 1024])
    assert unchunked < 4e-3  # 8 bits
    assert max(chunked) < 1.2 * unchunked


@pytest.mark.parametrize(("dtype", "master", "chunk", "expected"), [
    (torch.float32, torch.float32, 16, [torch.float32]),
    (torch.bfloat16, torch.float32, 16, [torch.bfloat16, torch.float32]),  # the weight for the matmuls, and the gradient
    (torch.bfloat16, torch.bfloat16, 16, [torch.float32, torch.bfloat16]),  # the sum, and the gradient
    (torch.bfloat16, torch.bfloat16, 0, [torch.bfloat16]),
])  # fmt: skip
def test_buffers_of_the_size_of_the_weight(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, master: torch.dtype, chunk: int, expected: list[torch.dtype]
) -> None:
    """The gradient of a float32 weight is the buffer in which it accumulates. Products and casts have `BLOCK_ROWS` rows."""
    monkeypatch.setattr("titanlike.utils.weight_gradients.BLOCK_ROWS", 16)
    monkeypatch.setattr("titanlike.losses.chunked.BLOCK_ROWS", 16)
    x, head = torch.randn(64, 8, dtype=dtype, requires_grad=True), LMHead(8, 320, bias=False, dtype=master)
    head.loss = CrossEntropy(chunk=chunk)
    if dtype != master:
        apply_mixed_precision(head, dtype, cast_forward_inputs=False)
    with Results() as made:
        (head(x, torch.zeros(64, dtype=torch.long)) / 7).backward()
    assert made.dtypes(320 * 8) == expected
    assert head.weight.grad is not None and head.weight.grad.dtype == master


@pytest.mark.parametrize("head_class", [LMHead, TiedLMHead])
def test_a_float32_weight_gets_a_gradient_that_is_not_rounded(head_class: Any) -> None:
    x, weight, labels = inputs(torch.bfloat16)
    head = LMHead(DIM, VOCAB, bias=False) if head_class is LMHead else TiedLMHead(nn.Embedding(VOCAB, DIM))
    with torch.no_grad():
        head.weight.copy_(weight)
    head.loss = CrossEntropy(chunk=7)
    assert head(x).dtype == torch.bfloat16
    (found,) = torch.autograd.grad(head(x, labels) / 19, head.weight)
    (expected,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels, chunk=7) / 19, weight)
    assert torch.equal(found.bfloat16(), expected)
    assert not torch.equal(found, expected.float())


def test_a_second_backward_pass_without_retain_graph_is_refused() -> None:
    x, weight, labels = inputs(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, labels, chunk=7)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_split_backward_pass_gets_the_same_gradients_twice() -> None:
    x, weight, labels = inputs()
    own = partial(F.cross_entropy, ignore_index=IGNORE, reduction="sum")
    for loss_of in (CrossEntropy(chunk=7, retain_graph=True), OwnLoss(own, chunk=7, retain_graph=True)):
        loss = loss_of(Logits(x, weight), labels) / 19
        (for_x,) = torch.autograd.grad(loss, x, retain_graph=True)
        found = for_x, *torch.autograd.grad(loss, weight)
        torch.testing.assert_close(found, torch.autograd.grad(reference(x, weight, labels) / 19, (x, weight)))


def test_the_full_logits_never_exist() -> None:
    x, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (512, 64))
    largest = []
    for chunk in (16, 0):
        with Results() as made:
            linear_cross_entropy(x, weight, torch.zeros(512, dtype=torch.long), chunk=chunk).backward()
        largest.append(max(made.sizes))
    assert largest == [512 * 8, 512 * 64]  # the hidden states, and the full logits


@pytest.mark.parametrize("z_loss", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_overwrites_the_logits_without_a_copy(dtype: torch.dtype, z_loss: float | None) -> None:
    logits, labels = torch.randn(64, 320).to(dtype), torch.zeros(64, dtype=torch.long)
    kept = logits.clone()
    with Results() as made:
        cross_entropy_inplace(logits, labels, z_loss=z_loss)
    copies = [each for each in made.dtypes(64 * 320) if each != torch.bool]
    assert len(copies) == (0 if dtype == torch.float32 else 1)  # bfloat16: one float32 copy
    exact = kept.double().requires_grad_()
    (gradient,) = torch.autograd.grad(z_loss_reference(exact, labels, z_loss or 0.0), exact)
    torch.testing.assert_close(logits, gradient.to(dtype))


def test_without_grad_no_gradients_are_computed() -> None:
    x, weight, labels = inputs()
    with torch.no_grad(), Operations() as operations:
        linear_cross_entropy(x, weight, labels, chunk=12)
    assert operations.counts["mm"] == 2  # one per chunk
    with Operations() as operations:
        linear_cross_entropy(x, weight, labels, chunk=12).backward()
    assert operations.counts["mm"] + operations.counts["addmm_"] == 6


def test_a_loss_of_ones_own_does_not_replace_those_of_further_tokens() -> None:
    model = build_model(DeepseekV3Config(num_mtp_layers=1))
    with pytest.raises(
        UserError, match=r"model\.num_mtp_layers adds cross-entropies of further tokens, which the loss does not"
    ):
        check_loss(model, F.cross_entropy, 0.0, torch.device("cpu"))
