"""Document masks: one per batch; block masks equal dense ones, and their memory does not grow with the square of the length."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

from tests.documents import documents, zigzag
from tests.training import GEMMA2, GPT_, GPT_OSS, LLAMA, Observer
from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.document_mask import (
    BLOCK_SIZE,
    DocumentMask,
    compiled_flex_attention,
    document_block_mask,
    document_dense_mask,
)
from titanlike.models.common.init import initialize
from titanlike.models.common.layers import DotProductAttention
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.compile import apply_compile


def to_dense(mask: BlockMask, batch: int) -> tuple[Tensor, int, int]:
    """Returns the pairs of tokens that attention with a block mask computes, and the numbers of its partial and full blocks."""
    queries, keys = mask.seq_lengths
    found, kinds = torch.zeros(batch, 1, queries, keys, dtype=torch.bool), []
    indices = torch.arange(batch)[:, None, None], None, torch.arange(queries)[:, None], torch.arange(keys)
    elements = mask.mask_mod(*indices)  # type: ignore[arg-type]
    for kind in ("kv", "full_kv"):
        counts, order = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
        kinds.append(int(counts.sum()))
        for b in range(batch):
            for row in range(counts.shape[2]):
                for column in order[b, 0, row, : counts[b, 0, row]].tolist():
                    rows, columns = (slice(n * BLOCK_SIZE, (n + 1) * BLOCK_SIZE) for n in (row, column))
                    assert not found[b, 0, rows, columns].any()
                    found[b, 0, rows, columns] = elements[b, rows, columns] if kind == "kv" else True
    return found, kinds[0], kinds[1]


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """FlexAttention in eager mode, without its compiler."""
    monkeypatch.setattr(
        "titanlike.models.common.document_mask.compiled_flex_attention", lambda: flex_attention.flex_attention
    )
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    yield monkeypatch
    torch._dynamo.reset()


@pytest.mark.parametrize("mean", [0, 3, 100, 600])
@pytest.mark.parametrize(
    ("length", "window", "causal"),
    [
        *((length, 0, True) for length in (32, 640, 1000)),
        *((*sizes, True) for sizes in ((32, 5), (640, 1), (640, 128), (640, 200), (1000, 300), (640, 640))),
        *((*sizes, False) for sizes in ((640, 0), (640, 2), (640, 256), (1000, 300), (640, 1278), (32, 6))),
    ],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_block_mask_equals_the_dense_mask(length: int, window: int, causal: bool, mean: int, ranks: int) -> None:
    """With documents and without, and under context parallelism."""
    ids, positions = documents(length, mean) if mean else None, torch.arange(length)
    for rank in range(ranks):
        local = zigzag(length, ranks, rank) if ranks > 1 else positions
        local_ids = None if ids is None else ids[:, local]
        arguments = local, positions, local_ids, ids, window, causal
        found, partial, full = to_dense(document_block_mask(*arguments), 2 if mean else 1)
        distance = local[:, None] - positions
        expected = (
            (distance >= 0) & (distance < (window or length)) if causal else distance.abs() <= (window // 2 or length)
        )
        if ids is not None and local_ids is not None:
            expected = expected & (local_ids[:, :, None] == ids[:, None, :])
        expected = expected.reshape(-1, 1, len(local), length)
        assert torch.equal(found, expected)
        assert torch.equal(document_dense_mask(*arguments).expand_as(expected), expected)
        if ranks == 1:  # no block is computed in vain, and the mask is evaluated in those only that need it
            size = -(-length // BLOCK_SIZE) * BLOCK_SIZE
            blocks = F.pad(expected, (0, size - length, 0, size - length)).unflatten(3, (-1, BLOCK_SIZE))
            blocks = blocks.unflatten(2, (-1, BLOCK_SIZE))
            assert partial + full == blocks.any(5).any(3).sum()
            if length % BLOCK_SIZE == 0 and not window and causal:
                assert full == blocks.all(5).all(3).sum()
    made = DocumentMask(window=window, causal=causal)(None, positions[None])
    assert causal or (made is None) == (window == 0 or window // 2 >= length - 1)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Soft-capped attention with all heads of keys and values repeated, in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 / cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("flex", [False, True])
def test_soft_capped_attention_with_a_window_equals_the_formula(
    flex_on_cpu: pytest.MonkeyPatch, kv_heads: int, flex: bool
) -> None:
    ids, positions = documents(320, 60), torch.arange(320)
    q, k, v = (3 * torch.randn(2, heads, 320, 16) for heads in (4, kv_heads, kv_heads))
    arguments = positions, positions, ids, ids, 25
    dense = document_dense_mask(*arguments)
    expected = capped_attention(q, k, v, dense, 2.0).float()
    mask = document_block_mask(*arguments) if flex else dense
    torch.testing.assert_close(DotProductAttention(soft_cap=2.0)(q, k, v, mask), expected)
    assert not torch.allclose(DotProductAttention()(q, k, v, mask), expected, atol=0.1)


@pytest.mark.filterwarnings("ignore")  # FlexAttention warns in eager mode
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("flex", [False, True])
def test_attention_with_sinks_equals_that_with_a_further_key(
    flex_on_cpu: pytest.MonkeyPatch, kv_heads: int, flex: bool
) -> None:
    """Whose score is the sink, and whose value is 0; and so do the gradients."""
    ids, positions = documents(320, 60), torch.arange(320)
    arguments = positions, positions, ids, ids, 25
    dense = document_dense_mask(*arguments)
    inputs = [torch.randn(2, heads, 320, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], requires_grad=True)
    q, k, v = inputs
    found = DotProductAttention()(q, k, v, document_block_mask(*arguments) if flex else dense, sinks)
    k, v = (x.double().repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    scores = (q.double() @ k.mT / 4.0).masked_fill(~dense, -torch.inf)
    column = sinks.double()[:, None, None].expand(2, 4, 320, 1)
    expected = torch.cat((scores, column), -1).softmax(-1) @ F.pad(v, (0, 0, 0, 1))
    torch.testing.assert_close(found, expected.float())
    probe = torch.randn(found.shape)
    gradients = [torch.autograd.grad((out * probe).sum(), [*inputs, sinks]) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def model_of(config: TransformerConfig, flex: bool | None = None) -> nn.Module:
    with torch.device("meta"):
        model = build_model(config)
    initialize(model, torch.device("cpu"), seed=0)
    for module in model.modules():
        if isinstance(module, DocumentMask):
            module.flex = flex
    return model


def loss_and_gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    tokens = torch.arange(ids.numel()).reshape(ids.shape) * 7 % 320
    loss = model(tokens, document_ids=ids, labels=tokens) / ids.numel()
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # FlexAttention warns in eager mode, torch.compile of an autograd.Function
@pytest.mark.parametrize(("config", "mode", "checkpoint"), [
    (LLAMA, "none", "full"), (LLAMA, "block", "selective"), (GPT_, "model", "none"), (GEMMA2, "block", "full"),
    (GPT_OSS, "block", "none"),
])  # fmt: skip
def test_a_model_has_the_same_gradients_with_block_masks(
    flex_on_cpu: pytest.MonkeyPatch, config: TransformerConfig, mode: Any, checkpoint: Any
) -> None:
    """Each batch has other documents, which must not recompile."""
    flex_on_cpu.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    backend: Any = CompileCounterWithBackend("aot_eager")
    model, dense = model_of(config, flex=True), model_of(config)
    apply_activation_checkpoint(blocks(model), mode=checkpoint, preserve_rng_state=False)
    if mode == "block":
        apply_compile(blocks(model), backend=backend)
    elif mode == "model":
        model.compile(backend=backend, fullgraph=True)
    for seed in range(3):
        ids = documents(200, 50, seed=seed)
        torch.testing.assert_close(loss_and_gradients(model, ids), loss_and_gradients(dense, ids), rtol=1e-4, atol=1e-6)
        kinds = 2 if config in (GEMMA2, GPT_OSS) else 1  # of blocks
        assert backend.frame_count == (0 if mode == "none" else kinds)


def test_flex_attention_is_compiled_for_each_length_or_fails(flex_on_cpu: pytest.MonkeyPatch) -> None:
    """It never runs in eager mode, which would materialize the scores."""
    backend: Any = CompileCounterWithBackend("eager")
    flex_on_cpu.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))

    def attend(length: int) -> None:
        q = torch.ones(1, 1, length, 16)
        attention(q, q, q, block_mask=DocumentMask(flex=True)(torch.zeros(1, length)))

    with torch._dynamo.config.patch(recompile_limit=1):  # type: ignore[no-untyped-call]
        attention = compiled_flex_attention.__wrapped__()
        for length in (16, 32):
            attend(length)
        assert backend.frame_count == 2
        limits: Any = torch._dynamo.config
        limits.recompile_limit = 2
        with pytest.raises(FailOnRecompileLimitHit):
            attend(48)


def results() -> tuple[Observer, list[Tensor]]:
    """Returns a context, and the results of all operations in it."""
    made: list[Tensor] = []
    return Observer(lambda *call: made.extend(x for x in tree_leaves(call[2]) if isinstance(x, Tensor))), made


@pytest.mark.parametrize("config", [LLAMA, GPT_], ids=["llama", "gpt"])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_dense_mask_is_made_once_for_all_layers_and_recomputations(
    config: LlamaConfig | GPTConfig, checkpoint: Any
) -> None:
    """Two tensors of its size: equal documents, and the mask."""
    model, ids = model_of(config), documents(48, 10)
    apply_activation_checkpoint(blocks(model), mode=checkpoint, preserve_rng_state=False)
    observer, made = results()
    with observer:
        loss_and_gradients(model, ids)
    assert sum(x.dtype == torch.bool and x.shape == (2, 1, 48, 48) for x in made) == 2


@pytest.mark.parametrize("length", [4096, 16384])
def test_no_tensor_grows_with_the_square_of_the_length(length: int) -> None:
    """A block mask has one element for each pair of blocks: at 16,384 tokens as many as tokens."""
    ids = documents(length, 500, batch=1)
    module = DocumentMask(flex=True)
    observer, made = results()
    with observer:
        mask = module(ids)
    assert max(x.numel() for x in made) <= length + 2 * length // BLOCK_SIZE
    kept = sum(x.nbytes for x in mask.as_tuple() if isinstance(x, Tensor))
    blocks = length // BLOCK_SIZE
    assert kept == 16 * blocks * (
        blocks + 1
    )  # bytes: indices and counts, by query and by key, of partial and of full blocks


def test_without_documents_there_is_a_mask_only_if_it_is_needed() -> None:
    positions = torch.arange(8)[None]
    assert DocumentMask()(None) is None
    assert DocumentMask()(None, positions) is None
    assert DocumentMask(window=8)(None, positions) is None
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    for module, expected in ((DocumentMask(window=3), causal & ~causal.tril(-3)), (DocumentMask(always=True), causal)):
        mask = module(None, positions)
        assert isinstance(mask, Tensor) and torch.equal(mask, expected[None, None])
