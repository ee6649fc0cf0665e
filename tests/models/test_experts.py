"""Grouped matmul against plain loops, and the two ways of balancing the load of the experts. tests/interop has the layers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from titanlike.losses import IGNORE
from titanlike.models.common import grouped_matmul as grouped
from titanlike.models.common.experts import BalanceLoss, Router, routers
from titanlike.models.common.grouped_matmul import grouped_matmul
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.moe.config import MixtralConfig, MoeConfig, Qwen3MoeConfig
from titanlike.models.registry import blocks, build_model
from titanlike.optim.balance import BalanceBias
from titanlike.parallelisms import activation_checkpoint
from titanlike.parallelisms.activation_checkpoint import _selective_contexts, apply_activation_checkpoint
from titanlike.parallelisms.compile import apply_compile
from titanlike.parallelisms.mixed_precision import cast_parameters
from titanlike.parallelisms.recomputation import keep_for_recomputation, keeping_contexts
from titanlike.utils import compat

# With softmax scores as they are, and with sigmoid scores as in DeepSeek-V3.
OPTIONS: tuple[dict[str, Any], ...] = (
    dict(normalize_router=False, num_shared_experts=1),
    dict(router_score="sigmoid", router_scale=2.5, num_shared_experts=2, balance_bias_rate=0.001),
)


def config_of(**options: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **(dict(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=12, vocab_size=37, num_experts=6,
                experts_per_token=3) | options)
    )  # fmt: skip


def scores_of(config: MoeConfig, weight: Tensor, x: Tensor) -> Tensor:
    """Returns the scores of all experts (..., E)."""
    logits = x @ weight.T
    return logits.softmax(-1) if config.router_score == "softmax" else 1 / (1 + (-logits).exp())


ROUTERS: dict[str, MoeConfig] = {
    "mixtral": MixtralConfig(dim=64, num_experts=16),
    "qwen3_moe": Qwen3MoeConfig(dim=64, num_experts=16, experts_per_token=4),
    "gpt_oss": GptOssConfig(dim=64, num_experts=16, experts_per_token=4),
    "deepseek_v3": DeepseekV3Config(
        dim=64, num_experts=16, experts_per_token=4, num_expert_groups=4, groups_per_token=2
    ),
}


def router_in_bfloat16(config: MoeConfig) -> tuple[Router, Tensor]:
    """Returns a router in bfloat16, with a bias for the selection that bfloat16 does not have, and inputs (1, 4096, D)."""
    router, generator = Router(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in router.named_parameters():
            parameter.normal_(0.0, config.dim**-0.5 if name == "weight" else 1.0, generator=generator)
    bias = router.expert_bias
    expected = None if bias is None else bias.detach().clone()
    cast_parameters(router, torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and (bias is None or torch.equal(bias, expected))
    return router, torch.randn(1, 4096, config.dim, generator=generator).bfloat16()


@pytest.mark.parametrize("name", ROUTERS)
def test_the_gradients_of_a_router_in_bfloat16_are_near_those_of_float32(name: str) -> None:
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        router, x = router_in_bfloat16(ROUTERS[name])
        cast_parameters(router, dtype)
        x = x.to(dtype).requires_grad_()
        weights = router(x).weights
        probe = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        (weights * probe).sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in router.parameters() if parameter.requires_grad)])
        assert all(gradient.dtype == dtype for gradient in results[-1])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_of_the_auxiliary_loss_is_that_of_its_formula(score: Any) -> None:
    """Of routers of two blocks, for sequences of which one has fewer labels."""
    config = config_of(router_score=score, balance_loss=0.3)
    module = BalanceLoss(config)
    module.num_replicas = 2
    generator = torch.Generator().manual_seed(0)
    blocks = [Router(config), Router(config)]
    for router in blocks:
        torch.nn.init.normal_(router.weight, generator=generator)
    x = torch.randn(2, 9, config.dim, generator=generator, requires_grad=True)
    labels = torch.zeros(2, 9, dtype=torch.long)
    labels[1, 4:] = IGNORE
    routes = [router(x) for router in blocks]
    main = x.square().sum()
    found = module(main, sum(route.counts for route in routes), labels)
    assert torch.equal(found, main), "the auxiliary loss is not part of the result"

    expected = main
    for sequence, num_valid in enumerate((9, 4)):
        probs = torch.cat([scores_of(config, router.weight, x[sequence]) for router in blocks])  # (2 * 9, E)
        probs = probs / probs.sum(-1, keepdim=True)
        chosen = torch.cat([route.indices[sequence] for route in routes])
        for expert in range(config.num_experts):
            fraction = (chosen == expert).sum() / 18
            expected = expected + 0.3 / 2 * num_valid * config.num_experts * fraction * probs[:, expert].mean()
    inputs = (x, *(router.weight for router in blocks))
    gradients = torch.autograd.grad(0.25 * found, inputs, retain_graph=True)  # scaled like the loss
    torch.testing.assert_close(gradients, torch.autograd.grad(0.25 * expected, inputs), rtol=1e-5, atol=1e-5)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients[1:])


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("options", [dict(balance_loss=0.3), {}], ids=["loss", "no loss"])
def test_the_load_of_each_block_is_counted_once(options: dict[str, Any], checkpoint: Any) -> None:
    """Over micro-batches, not in validation, and not when activation checkpointing computes a block again."""
    config = config_of(balance_bias_rate=0.001, **options)
    torch.manual_seed(0)
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    expected: list[Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda _, args, out: expected.append(out.load.sum(0)))
    batches = torch.randint(37, (2, 2, 11))
    with torch.no_grad():
        for tokens in batches:
            model(tokens, labels=tokens)
    assert all(router.load is None for router in routers(model))
    apply_activation_checkpoint(blocks(model), mode=checkpoint)
    for tokens in batches:
        model(tokens, labels=tokens).backward()
    for index, router in enumerate(routers(model)):
        assert router.load is not None and router.load.dtype == torch.int64
        assert torch.equal(router.load, expected[index] + expected[index + 2]) and router.load.sum() == 2 * 2 * 11 * 3


def test_the_bias_steps_by_the_sign_of_the_load_above_the_average() -> None:
    """Exactly: 2^24 + 1 of 2^24 tokens on average is more, and a float32 has no such number."""
    router = Router(config_of(num_experts=4, balance_bias_rate=0.125))
    torch.nn.init.zeros_(router.expert_bias)  # type: ignore[arg-type]
    optimizer = BalanceBias([router], rate=0.125)
    router.load = torch.tensor([2**24 + 1, 2**24, 2**24, 2**24 - 1])
    optimizer.step()
    assert router.expert_bias is not None and router.expert_bias.tolist() == [-0.125, 0.0, 0.0, 0.125]
    optimizer.zero_grad()
    optimizer.step()
    assert router.load is None and router.expert_bias.tolist() == [-0.125, 0.0, 0.0, 0.125]


def test_the_bias_of_an_overloaded_expert_moves_with_masters_in_bfloat16() -> None:
    """In which a step of 0.001 from -0.5 is rounded away."""
    router = Router(config_of(num_experts=2, balance_bias_rate=0.001))
    torch.nn.init.zeros_(router.expert_bias)  # type: ignore[arg-type]
    cast_parameters(router, torch.bfloat16)
    optimizer = BalanceBias([router], rate=0.001)
    for _ in range(2000):
        router.load = torch.tensor([3, 1])
        optimizer.step()
    assert router.weight.dtype == torch.bfloat16
    torch.testing.assert_close(router.expert_bias, torch.tensor([-2.0, 2.0]), rtol=1e-4, atol=0, check_dtype=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_compiled_block_computes_the_same(options: dict[str, Any]) -> None:
    config = config_of(balance_loss=0.3, **options)
    torch.manual_seed(0)
    plain, compiled = build_model(config), build_model(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(0.0, 0.5)
    compiled.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    apply_compile(blocks(compiled), backend="aot_eager_decomp_partition")
    tokens, labels = torch.randint(37, (2, 2, 11)).unbind()
    results = []
    for model in (plain, compiled):
        loss = model(tokens, labels=labels)
        loss.backward()
        assert len(list(routers(model))) == 2
        loads = [router.load for router in routers(model)]
        results.append([loss.detach(), *loads, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


COUNTS = {
    "all": [2, 3, 1, 4], "empty first": [0, 5, 0, 3], "empty last": [4, 0, 2, 0], "one": [0, 0, 7, 0], "none": [0, 0, 0, 0],
}  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_grouped_matmul_equals_a_loop_over_groups(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((sum(counts), 3), (4, 5, 3))
    )
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    expected = [rows @ weight[group].T for group, rows in enumerate(x.split(counts))]
    torch.testing.assert_close(grouped_matmul(x, weight, ends), torch.cat(expected))
    assert torch.autograd.gradcheck(lambda x, weight: grouped_matmul(x, weight, ends), (x, weight))
    torch.library.opcheck(torch.ops.titanlike.grouped_matmul.default, (x, weight, ends))


def test_no_kernel_is_called_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an expert-parallel rank none of whose experts has tokens."""
    monkeypatch.setattr("titanlike.models.common.grouped_matmul._has_kernel", lambda *_: True)
    monkeypatch.setattr("titanlike.utils.compat.grouped_mm", None)
    x, weight = torch.empty(0, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    out = grouped_matmul(x, weight, torch.zeros(3, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, 5) and x.grad is not None and x.grad.shape == (0, 4)
    assert weight.grad is not None and weight.grad.shape == (3, 5, 4) and not weight.grad.any()


def test_a_value_is_kept_for_each_recomputation() -> None:
    """Of each call, in any order of the backward passes, and twice if the graph is retained."""
    computed: list[int] = []

    def compute() -> int:
        computed.append(len(computed))
        return computed[-1]

    def forward(x: Tensor) -> Tensor:
        for _ in range(2):
            x = (x @ x) * (keep_for_recomputation(compute) + 1)
        return x.sin()

    def results(call: Any) -> list[Tensor]:
        inputs = [torch.eye(2).requires_grad_() for _ in range(3)]
        outs = [call(x).sum() for x in inputs]
        return [torch.autograd.grad(outs[i], inputs[i], retain_graph=True)[0] for i in (1, 0, 1, 2)]

    expected = results(forward)
    computed.clear()
    found = results(partial(checkpoint, forward, use_reentrant=False, context_fn=keeping_contexts))
    torch.testing.assert_close(found, expected)
    assert computed == [0, 1, 2, 3, 4, 5] and not torch.equal(found[0], found[1])


def test_selective_checkpointing_keeps_what_the_host_reads() -> None:
    """The recomputation returns what the forward pass has read, without a synchronization or a collective, although the forward
    pass has cast a parameter before it, as FSDP does, and the recomputation has not."""
    parameter, x = torch.zeros(2), torch.arange(3, dtype=torch.int64)
    calls = []

    def read() -> list[int]:
        calls.append(x.float() + 1)  # of an operator that both call
        return x.tolist()

    forward, recompute = keeping_contexts(_selective_contexts)
    with forward:
        parameter.to(torch.bfloat16)
        read_first, cast = keep_for_recomputation(read), x.float()
    for _ in range(2):  # a schedule that splits the backward pass recomputes twice
        with recompute:
            read_again, cast_again = keep_for_recomputation(read), x.float()
        assert read_again is read_first and len(calls) == 1
        torch.testing.assert_close(cast_again, cast)


@pytest.mark.parametrize("first", [1, 2])
def test_selective_checkpointing_saves_expensive_operators(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention kernel and collective, and of matmuls, every second one."""
    monkeypatch.setattr(activation_checkpoint, "create_selective_checkpoint_contexts", lambda policy: policy)
    policy: Any = _selective_contexts(first)

    def is_saved(operator: Any, is_recompute: bool = False) -> bool:
        return policy(SimpleNamespace(is_recompute=is_recompute), operator) == CheckpointPolicy.MUST_SAVE

    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    always = [
        aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
        c10d.all_gather_into_tensor, c10d.all_reduce, c10d.all_to_all_single, c10d.reduce_scatter_tensor,
    ]  # fmt: skip
    assert all(map(is_saved, [flex_attention, *(each.default for each in always), "torch_attn._varlen_attn.default"]))
    assert not is_saved(aten.add.Tensor)
    matmuls = [aten.mm, aten.addmm, aten._scaled_mm, torch.ops.titanlike.grouped_matmul]
    for is_recompute in (False, True):  # each counts by itself
        found = [is_saved(each.default, is_recompute) for each in matmuls]
        assert found == [first == 1, first == 2] * 2


@pytest.mark.skipif(compat.grouped_mm is None, reason="torch has no grouped matmul")
def test_any_number_of_rows_has_a_kernel() -> None:
    """Expert parallelism receives as many as the routing decides."""
    asked: list[tuple[Any, ...]] = []

    def has_kernel(rows: Tensor, *sizes: int) -> bool:
        asked.append((rows.shape[-1], *sizes))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_has_kernel", has_kernel)
        weight = torch.randn(2, 32, 64, requires_grad=True)
        x = torch.randn(1003, 64, requires_grad=True)
        grouped_matmul(x, weight, torch.tensor([3, 1003], dtype=torch.int32)).sum().backward()
    assert asked == [(64, 32, 64), (32, 64, 32), (32, 64)]  # no number of rows
    with FakeTensorMode():
        rows = torch.empty(1003, 64, device="cuda", dtype=torch.bfloat16)
        assert grouped._has_kernel(rows, 32, 64) and not grouped._has_kernel(rows, 33)
