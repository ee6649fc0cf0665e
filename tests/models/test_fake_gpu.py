"""What runs on a GPU, seen without one: fake tensors take its branches. `tests/gpu` has their numerics."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

from tests.data.sequences import batches, counting
from tests.interop.models import CONFIGS, ENCODERS, T5
from tests.loss_errors import linear_cross_entropy
from tests.training import Operations
from titanlike.checkpoint import staging
from titanlike.config.distill import Distillation
from titanlike.inference.logits import recomputed_logits
from titanlike.losses import chunked
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.losses.distillation import distillation_loss
from titanlike.losses.terms import LossTerms
from titanlike.losses.top_k import top_k_of
from titanlike.metrics.model_statistics import ModelStatistics
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.common.experts import _Float32Linear
from titanlike.models.registry import build_model
from titanlike.optim.low_precision_adamw import _block_scales, _random_bits
from titanlike.optim.muon import Muon
from titanlike.parallelisms.context import ContextParallelMask, prefix_attention
from titanlike.utils.async_d2h import AsyncD2H
from titanlike.utils.weight_gradients import weight_gradient


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


HALF, FULL = torch.bfloat16, torch.float32
# What is called, and how often some operators run.
CALLS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "logits of experts": (lambda: _Float32Linear.apply(tensor(8, 16), tensor(4, 16)), {"mm": 1, "_to_copy": 0}),
    # A scale without a dimension would be rounded to the dtype of the gradient.
    "scaled gradient": (
        lambda: chunked.scaled(tensor(8, 16), tensor(dtype=FULL), HALF), {"unsqueeze": 1, "mul": 1, "_to_copy": 0}
    ),
    "gradient of the head": (
        lambda: chunked.add_product(tensor(16, 16, dtype=FULL), tensor(16, 8), tensor(8, 16)), {"addmm": 1, "mm": 0}
    ),
    "gradient of a weight": (
        lambda: weight_gradient._init_fn(tensor(16, 8, dtype=FULL), tensor(16, 4), tensor(4, 8)), {"mm": 1, "_to_copy": 0}
    ),
    "its first chunk": (
        lambda: chunked.add_product(tensor(16, 16, dtype=FULL), tensor(16, 8), tensor(8, 16), replace=True),
        {"addmm": 0, "mm": 1, "add": 0, "_to_copy": 0},
    ),
}  # fmt: skip


def fake_tensors_add_products() -> bool:
    try:
        with FakeTensorMode():
            torch.addmm(tensor(2, 2, dtype=FULL), tensor(2, 2), tensor(2, 2), out_dtype=FULL)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
def test_products_in_bfloat16_are_summed_in_float32_by_one_kernel(name: str) -> None:
    call, expected = CALLS[name]
    if expected.get("addmm") and not fake_tensors_add_products():
        pytest.skip("fake tensors of this torch have no addmm with a dtype")
    with FakeTensorMode(), Operations() as operations:
        call()
    assert {operator: operations.counts[operator] for operator in expected} == expected


def distilled() -> Any:
    """Returns the losses of the predictions of a teacher, and of its likeliest ones."""
    x, weight, labels = tensor(2, 8, 4), tensor(16, 4), tensor(2, 8, dtype=torch.long)
    logits, section = Logits(x, weight, soft_cap=5.0), Distillation(label_weight=0.5)
    top = top_k_of(logits, 3, 2.0, 4, None)
    return [distillation_loss(section, logits, labels, each, CrossEntropy(chunk=4)) for each in (logits, top)]


ONE: Any = SimpleNamespace(size=lambda: 1)
ALONE: Any = SimpleNamespace(tensor=ONE, context=ONE, vocab_group=None)
CUDA = torch.device("cuda")
# What makes tensors beside those that it gets.
MADE: dict[str, Callable[[], Any]] = {
    "distillation": distilled,
    "losses of tokens": lambda: linear_cross_entropy(
        tensor(2, 8, 4), tensor(16, 4), tensor(2, 8, dtype=torch.long), chunk=4, reduction="none"
    ),
    "a stage without the loss": lambda: ModelStatistics(nn.Identity(), CUDA, LossTerms(["z_loss"]), 0).measure(),
    "context parallelism": lambda: ContextParallelMask(ONE, window=4, flex=False)(tensor(2, 8, dtype=torch.long)),
    "next logits": lambda: recomputed_logits(lambda tokens, **_: tokens[..., None], ALONE, 8, CUDA)([[1, 2], [3]]),  # type: ignore[arg-type]
    "moments in 8 bits": lambda: _block_scales(tensor(4, 512)),
    "random bits": lambda: _random_bits(tensor(4, 8), 0, 0, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_tensors_are_made_on_the_device_of_the_others(name: str) -> None:
    with FakeTensorMode():
        assert {each.device.type for each in tree_leaves(MADE[name]())} == {"cuda"}


MODELS: dict[str, Any] = {"T5": T5} | CONFIGS | ENCODERS


@pytest.mark.parametrize(
    "name", ["Llama 3.1", "Gemma 3", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS", "GPT-2", "BERT", "ModernBERT", "T5"]
)
def test_a_model_makes_tensors_on_the_device_of_its_input(name: str) -> None:
    config: Any = MODELS[name]
    config = replace(config, **{option: 0.1 for option in ("dropout", "balance_loss") if config.has_field(option)})
    with FakeTensorMode():
        with torch.device("cuda"):
            model: Any = build_model(config)
            ids, bits = torch.zeros(2, 64, dtype=torch.long), {"dropout_bits": torch.zeros(2, 64, dtype=torch.long)}
        for mask in (module for module in model.modules() if isinstance(module, DocumentMask)):
            assert isinstance(mask(ids, ids), BlockMask) != config.is_encoder_decoder  # which adds biases to its masks
            mask.use_dense_masks()
            assert not isinstance(mask(ids, ids), BlockMask)
        decoder = {"decoder_tokens": ids} if config.is_encoder_decoder else {}
        documents = {f"{one.removesuffix('tokens')}document_ids": ids for one in ("tokens", *decoder)}
        for options in ({}, documents, bits if config.has_field("dropout") else {}):
            assert model(tokens=ids, labels=ids, **decoder, **options).device.type == "cuda"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "is_flash"),
    [(64, HALF, True), (256, HALF, True), (264, HALF, False), (60, HALF, False), (64, FULL, False)],
)
def test_context_parallelism_uses_flash_attention_where_it_can(
    head_dim: int, dtype: torch.dtype, is_flash: bool
) -> None:
    with FakeTensorMode(), Operations() as operations:
        q, v = tensor(1, 2, 32, head_dim, dtype=dtype), tensor(1, 2, 64, 48, dtype=dtype)
        out = prefix_attention(q, tensor(1, 2, 64, head_dim, dtype=dtype), v)
    assert out.shape == (1, 2, 32, 48)
    assert operations.counts["_scaled_dot_product_flash_attention"] == is_flash


@pytest.mark.parametrize(("device", "dtype"), [("cuda", HALF), ("cpu", FULL)])
def test_muon_orthogonalizes_in_bfloat16_on_gpus(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty(8, 8, device=device))
        parameter.grad = torch.empty_like(parameter)
        assert Muon([parameter], lr=0.1)._direction(parameter).dtype == dtype


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Records what is asked of a GPU, in order: its streams and events, copies, and host memory for them."""
    calls = MagicMock()
    calls.pin.return_value = calls.to.return_value = True
    for name in ("Stream", "Event", "stream", "current_stream", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda"))
    monkeypatch.setattr(
        Tensor, "copy_", lambda to, tensor, **how: calls.copy(to.device.type, tensor.device.type, **how)
    )
    for name, original in (("empty", torch.empty), ("empty_like", torch.empty_like)):
        monkeypatch.setattr(
            torch, name, lambda *a, pin_memory=False, of=original, **b: [pin_memory and calls.pin(), of(*a, **b)][1]
        )
    return calls


def test_a_save_is_copied_beside_the_next_step_and_before_its_update(
    gpu: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, optimizer = staging.StagingBuffers(), MagicMock()
    monkeypatch.setattr(staging, "_assign", lambda ranges, parts: ([*ranges], 0))
    with FakeTensorMode():
        for _ in range(2):
            stage.copy([("weight", torch.zeros(8, device="cuda")), ("step", torch.zeros(1))], optimizer)
    optimizer.register_step_pre_hook.assert_called_once()
    optimizer.register_step_pre_hook.call_args.args[0]()
    copies = [
        call.current_stream(), call.Stream().wait_stream(gpu.current_stream()), call.stream(gpu.Stream()),
        call.stream().__enter__(), call.copy("cpu", "cuda", non_blocking=True), call.copy("cpu", "cpu", non_blocking=True),
        call.Event(), call.Event().record(), call.stream().__exit__(None, None, None),
    ]  # fmt: skip
    update = [call.current_stream(), call.current_stream().wait_event(gpu.Event())]
    assert gpu.mock_calls[:-3] == [call.pin(), call.Stream(), *copies, *copies, *update]


def test_the_host_waits_for_metrics_that_have_not_arrived(gpu: MagicMock) -> None:
    with FakeTensorMode():
        found = AsyncD2H(torch.zeros(2, device="cuda"), torch.zeros(1))
    assert gpu.mock_calls == [
        call.pin(),
        call.copy("cpu", "cuda", non_blocking=True),
        call.Event(),
        call.Event().record(),
    ]
    assert not found.is_on_host
    found.values = torch.ones(3)
    for arrived, deferred in ((True, True), (False, True), (True, False)):
        gpu.Event().query.return_value = arrived
        assert found.is_complete == arrived and found.read(deferred=deferred) == [1.0] * 3
        assert gpu.Event().synchronize.call_count == (not arrived or not deferred)
        gpu.Event().synchronize.reset_mock()


def test_batches_are_copied_from_pinned_memory_while_the_host_continues(
    gpu: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, device = batches(counting(8)), torch.device("cuda", 3)
    loader.device = device
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: gpu.pin() and tensor)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *to, **how: gpu.to(*to, **how) and tensor)
    with loader.prefetch(1, 1, 1):
        assert len(loader.microbatches(1)) == 4
    assert gpu.mock_calls[0] == call.set_device(device)  # of the thread: a new one uses GPU 0
    assert gpu.mock_calls[1:] == [call.pin()] * 3 + [call.to(device, non_blocking=True)] * 3
