"""The models: positions, masks, parameter and FLOP counts, initial values. `tests/interop` compares logits with transformers."""

import dataclasses
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.interop import models
from titanlike.config import UserError
from titanlike.config.base import section
from titanlike.config.finetune import Lora
from titanlike.losses.chunked import Logits, scaled
from titanlike.losses.cross_entropy import cross_entropy_inplace
from titanlike.models import registry
from titanlike.models.common import layers
from titanlike.models.common.config import ParameterSpec, TransformerConfig
from titanlike.models.common.dropout import Dropout
from titanlike.models.common.experts import Router
from titanlike.models.common.init import initialize
from titanlike.models.common.layers import TiedLMHead, UnitOffsetRMSNorm
from titanlike.models.common.lora import apply_lora
from titanlike.models.common.rope import apply_rope, rotary_angles
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.families import all_configs
from titanlike.models.gemma.config import GemmaConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.llama.model import Llama
from titanlike.models.moe.config import MoeConfig, Qwen3MoeConfig
from titanlike.models.registry import build_model, register_model
from titanlike.tools.doctor import checks as doctor

LLAMA, GEMMA2 = models.LLAMA, models.CONFIGS["Gemma 2"]
# One of each family.
CAUSAL = {config.name: config for config in reversed(models.CONFIGS.values())}
ENCODERS = {config.name: config for config in reversed(models.ENCODERS.values())}
OF_EACH_FAMILY = CAUSAL | ENCODERS


def build(config: TransformerConfig, seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        model = build_model(config)
    initialize(model, torch.device("cpu"), seed)
    return model


def with_large_weights(model: nn.Module) -> nn.Module:
    """Fills the parameters with large float64 values, so that an error in positions or masks shows."""
    model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


@pytest.mark.parametrize("config", OF_EACH_FAMILY.values(), ids=OF_EACH_FAMILY)
def test_position_ids(config: TransformerConfig) -> None:
    model = with_large_weights(build(config))
    tokens = torch.arange(12).remainder(37)[None]
    positions = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens, positions), model(tokens))
    assert not torch.allclose(model(tokens, positions * 3), model(tokens))


@pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS)
def test_attention_of_encoders_is_bidirectional_and_stays_in_a_document(config: TransformerConfig) -> None:
    model = with_large_weights(build(config))
    tokens = torch.arange(12).remainder(37)[None]
    changed = tokens.clone()
    changed[0, 7] = 36
    before, after = model(tokens), model(changed)
    assert not (before == after).all(-1).any(), "every token depends on every other one"
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    before, after = (model(each, positions, documents) for each in (tokens, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not (before[:, 5:] == after[:, 5:]).all(-1).any()
    torch.testing.assert_close(before[:, 5:], model(tokens[:, 5:]))


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_each_dropout_is_at_a_site_of_its_own(name: str) -> None:
    """Two of one site would drop the same elements."""
    config: Any = OF_EACH_FAMILY[name]
    model, sites = build(dataclasses.replace(config, dropout=0.5)), []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, inputs, out: sites.append((module.site, (out == 0).any())))
    model(torch.zeros(1, 12, dtype=torch.long), dropout_bits=torch.arange(12)[None] << 20)
    assert sites == [(site, True) for site in range(1 + 2 * config.num_layers)]


def filled(module: Any) -> Any:
    """Returns a module with small weights that bfloat16 represents."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1e-3, 1e-3, parameter.numel()).bfloat16().view(parameter.shape))
    return module


LABELS = torch.arange(16)
IN_FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "1 + weight": filled(UnitOffsetRMSNorm(32)),
    "rotary embeddings": lambda x: apply_rope(
        x.view(2, 8, 4, 8), rotary_angles(LLAMA, torch.arange(100, 108)[None]), 0.7
    ),
    "soft cap": lambda x: Logits(x, soft_cap=3.0).bounded(),
    "logits of experts": lambda x: (
        filled(Router(dataclasses.replace(models.QWEN3_MOE, dim=32, router_scale=2.4)))(x).weights
    ),
    "selected experts": lambda x: filled(Router(dataclasses.replace(models.CONFIGS["DeepSeek-V3"], dim=32)))(x).indices,
    "loss": lambda x: cross_entropy_inplace(x.flatten(0, 1).clone(), LABELS, None, 0.1, 3.0, reduction="none")[0],
    "scaled gradient": lambda x: scaled(x.flatten(0, 1), torch.tensor(1 / 3), x.dtype),
}


@pytest.mark.parametrize("function", IN_FLOAT32)
def test_bfloat16_is_computed_in_float32_and_rounded_once(function: str) -> None:
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = (IN_FLOAT32[function](each) for each in (x, x.float()))
    assert torch.equal(found, expected.to(found.dtype))


def published_frequency(index: int, head_dim: int, theta: float, factor: float, original: int) -> Tensor:
    """Returns a frequency of Llama 3 as the published models were trained with it, and as transformers computes it in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = (1.0 / torch.pow(theta, exponents))[index]
    wavelength = 2 * math.pi / frequency
    if factor == 1.0 or wavelength < original / 4:
        return frequency
    if wavelength > original:
        return frequency / factor
    share = (original / wavelength - 1.0) / 3.0
    return (1.0 - share) * frequency / factor + share * frequency


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(("head_dim", "factor"), [(64, 1.0), (64, 32.0), (128, 1.0), (128, 8.0), (80, 1.0)])
def test_rotary_angles_equal_those_of_published_models(theta: float, head_dim: int, factor: float) -> None:
    """To the bit: at position 131,071, the last bit of a frequency changes its cosine by 5e-3."""
    config = LlamaConfig(
        dim=2 * head_dim, num_heads=2, num_kv_heads=2, rope_theta=theta, rope_scaling=factor, rope_original_seq_len=8192
    )
    positions = torch.tensor([[0, 1, 8191, 100_003, 131_071]])
    frequencies = [published_frequency(i, head_dim, theta, factor, 8192) for i in range(head_dim // 2)]
    angles = positions[0].float()[:, None] * torch.stack(frequencies).repeat(2)
    cos, sin = rotary_angles(config, positions)
    assert torch.equal(cos[0, :, 0], angles.cos())
    assert torch.equal(sin[0, :, 0], angles.sin())


SIZES = [
    (kind, size, fields) for kind in all_configs() if not kind.is_encoder_decoder for size, fields in kind.sizes.items()
]
SIZES += [(Qwen3MoeConfig, "debug", dict(num_shared_experts=2, balance_bias_rate=0.001))]


@pytest.mark.parametrize(
    ("kind", "size", "fields"), SIZES, ids=lambda value: getattr(value, "__name__", str(value)[:20])
)
def test_parameter_counts_of_the_config_match_the_module(
    kind: Callable[..., TransformerConfig], size: str, fields: dict[str, int]
) -> None:
    config = kind(size=size, **fields)
    with torch.device("meta"):
        model = build_model(config)
    assert list(config.parameters()) == [name for name, _ in model.named_parameters()]  # checkpoints have this order
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    # every matrix multiplies each token; the embedding only if it is tied to the LM head
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith("bias")}
    matrices = sum(p.numel() for name, p in parameters.items() if p.dim() == 2 and "embeddings" not in name)
    if isinstance(config, MoeConfig):  # of the stacked matrices of experts, a token multiplies some
        stacks = sum(p.numel() for p in model.parameters() if p.dim() == 3)
        matrices += stacks * config.experts_per_token // config.num_experts
    tied = isinstance(model.output, TiedLMHead)
    assert config.num_matmul_parameters() == matrices + (config.vocab_size * config.dim if tied else 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ffn_norm.weight": None}, "layers.0.ffn_norm.weight has the shape None in LlamaConfig.block_parameters, but (64,) in"),
        ({"attention.wo.bias": ParameterSpec((64,), "rowwise")}, "layers.0.attention.wo.bias has the shape (64,) in"),
        ({"attention.wk.weight": ParameterSpec((64, 64), "colwise")}, "block_parameters, but (16, 64) in Llama"),
    ],
    ids=["missing", "surplus", "shape"],
)  # fmt: skip
def test_a_module_with_other_parameters_than_its_config_describes_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, ParameterSpec | None], expected: str
) -> None:
    table = {name: spec for name, spec in (LLAMA.block_parameters() | changes).items() if spec}
    monkeypatch.setattr(LlamaConfig, "block_parameters", lambda config: table)
    with pytest.raises(ValueError, match=re.escape(expected)):
        build_model(LLAMA)


@pytest.mark.parametrize(
    ("name", "size", "parameters", "heads", "max_seq_len", "rope", "active"),
    [  # heads of queries, and of keys and values; theta and scaling; parameters of a token
        ("llama", "3.1-405B", 405_853_388_800, (128, 8), 131072, (500000.0, 8.0), None),
        ("llama", "3.2-3B", 3_212_749_824, (24, 8), 131072, (500000.0, 32.0), None),
        ("mistral", "7B-v0.3", 7_248_023_552, (32, 8), 32768, (1000000.0, 1.0), None),
        ("mistral", "Small-24B", 23_572_403_200, (32, 8), 32768, (100000000.0, 1.0), None),
        ("phi3", "3-medium-4k", 13_960_238_080, (40, 10), 4096, (10000.0, 1.0), None),
        ("olmo2", "1B", 1_484_916_736, (16, 16), 4096, (500000.0, 1.0), None),
        ("olmo2", "13B", 13_716_198_400, (40, 40), 4096, (500000.0, 1.0), None),
        ("qwen2", "2.5-1.5B", 1_543_714_304, (12, 2), 32768, (1000000.0, 1.0), None),
        ("qwen2", "2.5-3B", 3_085_938_688, (16, 2), 32768, (1000000.0, 1.0), None),
        ("qwen2", "2.5-14B", 14_770_033_664, (40, 8), 32768, (1000000.0, 1.0), None),
        ("qwen2", "2.5-32B", 32_763_876_352, (40, 8), 32768, (1000000.0, 1.0), None),
        ("qwen2", "2.5-72B", 72_706_203_648, (64, 8), 32768, (1000000.0, 1.0), None),
        ("qwen3", "1.7B", 1_720_574_976, (16, 8), 40960, (1000000.0, 1.0), None),
        ("qwen3", "4B", 4_022_468_096, (32, 8), 40960, (1000000.0, 1.0), None),
        ("qwen3", "14B", 14_768_307_200, (40, 8), 40960, (1000000.0, 1.0), None),
        ("qwen3", "32B", 32_762_123_264, (64, 8), 40960, (1000000.0, 1.0), None),
        ("qwen3_moe", "235B-A22B", 235_093_634_560, (64, 4), 40960, (1000000.0, 1.0), 22e9),
        ("mixtral", "8x22B", 140_620_634_112, (48, 8), 65536, (1000000.0, 1.0), 39e9),
        ("deepseek_v2", "Lite", 15_706_484_224, (16, 16), 163840, (10000.0, 40.0), 2.66e9),
        ("deepseek_v2", "236B", 235_741_434_880, (128, 128), 163840, (10000.0, 40.0), 21.4e9),
        ("deepseek_v3", "Moonlight-16B", 15_960_110_208, (16, 16), 8192, (50000.0, 1.0), 2.91e9),
        ("gemma2", "2B", 2_614_341_888, (8, 4), 8192, (10000.0, 1.0), None),
        ("gemma2", "9B", 9_241_705_984, (16, 8), 8192, (10000.0, 1.0), None),
        ("gemma3", "270M", 268_098_176, (4, 1), 32768, (1000000.0, 1.0), None),
        ("gemma3", "4B", 3_880_263_168, (8, 4), 131072, (1000000.0, 8.0), None),
        ("gemma3", "12B", 11_766_034_176, (16, 8), 131072, (1000000.0, 8.0), None),
        ("gemma3", "27B", 27_009_346_304, (32, 16), 131072, (1000000.0, 8.0), None),
        ("gpt", "124M", 124_439_808, (12, 12), 1024, (0.0, 1.0), None),
        ("gpt", "355M", 354_823_168, (16, 16), 1024, (0.0, 1.0), None),
        ("gpt", "774M", 774_030_080, (20, 20), 1024, (0.0, 1.0), None),
        ("gpt", "1.5B", 1_557_611_200, (25, 25), 1024, (0.0, 1.0), None),
        ("gpt", "1.3B", 1_315_723_264, (16, 16), 2048, (0.0, 1.0), None),
        ("gpt", "2.7B", 2_651_553_280, (32, 32), 2048, (0.0, 1.0), None),
        ("gpt", "6.7B", 6_658_404_352, (32, 32), 2048, (0.0, 1.0), None),
        ("gpt", "13B", 12_853_386_240, (40, 40), 2048, (0.0, 1.0), None),
        ("gpt", "175B", 174_604_259_328, (96, 96), 2048, (0.0, 1.0), None),
    ],
)  # fmt: skip
def test_sizes_are_the_published_ones(
    name: str, size: str, parameters: int, heads: Any, max_seq_len: int, rope: Any, active: float | None
) -> None:
    """But those that `tests/interop` reads from a published config.json. With the biases of the routers of DeepSeek-V3, as in
    transformers. The parameters of a token are published in billions."""
    kind: Any = next(each for each in all_configs() if each.name == name)
    config = kind(**{"size": size, **kind.sizes[size]})
    assert config.num_parameters() == parameters
    assert (config.num_heads, getattr(config, "num_kv_heads", config.num_heads)) == heads
    assert config.max_seq_len == max_seq_len
    assert (getattr(config, "rope_theta", 0.0), getattr(config, "rope_scaling", 1.0)) == rope
    used = config.num_matmul_parameters() + config.vocab_size * config.dim
    for found in (used, config.num_active_parameters()) if active else ():
        assert found == pytest.approx(active, rel=0.02)
    scalars = {("gemma3", "27B"): 168.0}
    assert getattr(config, "query_scalar", 256.0) == scalars.get((name, size), 256.0)


def test_flops_of_a_sliding_window_are_those_of_its_tokens() -> None:
    config = dataclasses.replace(GEMMA2, sliding_window=5)
    attention = 2 * (2 * 4 * 24)  # of one token with one key
    keys = 2 * 5 + 16  # two blocks with a window, one without
    assert config.flops_per_token(seq_len=16) == 6 * config.num_matmul_parameters() + 3 * attention * keys
    assert config.flops_per_token(seq_len=4) == 6 * config.num_matmul_parameters() + 3 * attention * 3 * 4


LARGER = models.CONFIGS | models.ENCODERS | {"T5": models.T5}


@pytest.mark.parametrize("config", LARGER.values(), ids=LARGER)
def test_flops_are_those_that_torch_counts(config: Any) -> None:
    """In a forward pass, and twice as many in the backward pass, without a window and recomputation."""
    tokens, targets = torch.zeros(1, 12, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64)
    of_targets: dict[str, Any] = {"decoder_tokens": targets} if config.is_encoder_decoder else {}
    of_experts: Any = {torch.ops.titanlike.grouped_matmul: lambda x, weight, *_, **__: 2 * x[0] * weight[1] * weight[2]}
    model = build_model(config)
    # The kernel of a CPU has no count.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=of_experts) as counter:
        model(tokens, **of_targets)
    found = config.flops_per_token(12, **({"target_len": 7} if of_targets else {}))
    assert 12 * found == 3 * counter.get_total_flops()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(num_dense_layers=3), "num_dense_layers = 3 leaves no block with experts of model.num_layers = 3; use 2 or less"),
        (dict(num_expert_groups=4), "num_expert_groups = 4 does not divide model.num_experts = 6; use 1, 2 or 3"),
        (dict(groups_per_token=4), "groups_per_token = 4 exceeds model.num_expert_groups = 3; use 3 or less"),
        (dict(groups_per_token=1, experts_per_token=3), "groups of 2 experts have fewer than model.experts_per_token = 3; use 2"),
        (dict(num_expert_groups=6), "groups of 1 expert, but the score of a group is the sum of its best 2; use 3 or fewer groups"),
        (dict(qk_rope_head_dim=5), "model.qk_rope_head_dim = 5 is odd, but RoPE rotates pairs; use 4 or 6"),
        (dict(rope_scaling=0.5), "model.rope_scaling = 0.5, but YaRN lengthens sequences; use 1.0 or more"),
        (dict(rope_scaling=4.0, rope_theta=1.0), "model.rope_theta = 1.0, but YaRN requires more than 1; use 10000.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_sizes_of_deepseek_that_cannot_work_are_refused(fields: dict[str, Any], expected: str) -> None:
    config = DeepseekV3Config(num_layers=3, num_experts=6, num_expert_groups=3)
    assert config.problems() == []
    [problem] = dataclasses.replace(config, **fields).problems()
    assert expected in problem


@pytest.mark.parametrize("config", OF_EACH_FAMILY.values(), ids=OF_EACH_FAMILY)
def test_initialization_depends_on_seed_and_name_only(config: TransformerConfig) -> None:
    full = dict(build(config).named_parameters())
    with torch.device("meta"):
        part = build_model(config)
    del part.layers["0"], part.tok_embeddings  # type: ignore[union-attr]
    initialize(part.bfloat16(), torch.device("cpu"), 0)  # rounded, and not other numbers
    for name, value in part.named_parameters():
        assert torch.equal(value, full[name].bfloat16()), name
    other = dict(build(config, seed=1).named_parameters())
    assert not torch.equal(full["tok_embeddings.weight"], other["tok_embeddings.weight"])
    assert not torch.equal(full["layers.0.attention.wo.weight"], full["layers.1.attention.wo.weight"])


@pytest.mark.parametrize("config", OF_EACH_FAMILY.values(), ids=OF_EACH_FAMILY)
def test_initialization_has_the_documented_standard_deviation(config: TransformerConfig) -> None:
    for name, value in build(config).named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        elif "sinks" in name:  # a few numbers
            assert 0 < value.abs().max() < 0.1
        elif "norm" in name:
            assert torch.equal(value, torch.full_like(value, 0.0 if isinstance(config, GemmaConfig) else 1.0))
        else:
            residual = name.endswith((".wo.weight", ".w2.weight", ".w2")) and config.name != "bert"  # post-norm
            expected = 0.02 / math.sqrt(2 * config.num_layers) if residual else 0.02
            assert value.std().item() == pytest.approx(expected, rel=0.1), name


def test_lora_starts_with_the_distribution_of_peft() -> None:
    """Its `kaiming_uniform_(A, a=sqrt(5))` is uniform up to the inverse root of the number of inputs."""
    model: Any = build_model(LLAMA)
    apply_lora(model, model.layers, Lora(rank=16))
    initialize(model, torch.device("cpu"), 0)
    for name, value in model.state_dict().items():
        if name.endswith("lora_A"):
            assert [value.min(), value.max()] == [
                pytest.approx(sign * value.shape[1] ** -0.5, rel=0.05) for sign in (-1, 1)
            ]
            assert value.std() == pytest.approx((3 * value.shape[1]) ** -0.5, rel=0.1)
        assert not name.endswith("lora_B") or not value.any()


def test_an_uninitialized_parameter_is_detected() -> None:
    with torch.device("meta"):
        model = build_model(LLAMA)
        model.extra = nn.Parameter(torch.empty(3))
    fill = model.init_parameter
    model.init_parameter = lambda name, value, generator: None if name == "extra" else fill(name, value, generator)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="left extra uninitialized"):
        initialize(model, torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("capability", "first"),
    [
        ((8, 0), ["FLASH_ATTENTION", "CUDNN_ATTENTION"]),
        ((8, 9), ["FLASH_ATTENTION", "CUDNN_ATTENTION"]),
        ((9, 0), ["CUDNN_ATTENTION", "FLASH_ATTENTION"]),
        ((10, 0), ["CUDNN_ATTENTION", "FLASH_ATTENTION"]),
    ],
)
def test_cudnn_attention_is_preferred_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with layers.attention_backend("auto"):
        order = [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()]
    assert order[:4] == [*first, "EFFICIENT_ATTENTION", "MATH"]


@pytest.fixture
def flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Registers an implementation that records its activation and removal, on a fake Hopper GPU."""
    calls: list[str] = []

    def register() -> SimpleNamespace:
        calls.append("activated")
        return SimpleNamespace(remove=lambda: calls.append("removed"))

    from torch.nn.attention import _registry

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return calls


def test_flash_attention_3_is_active_in_its_context(flash_attention_3: list[str]) -> None:
    with layers.attention_backend("flash3"):
        assert flash_attention_3 == ["activated"]
        assert torch.nn.attention.current_flash_attention_impl() == "FA3"
        assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    assert flash_attention_3 == ["activated", "removed"]
    assert doctor._flash_attention()[0].text == 'available: training.attention = "flash3"'
    assert flash_attention_3 == ["activated", "removed"] * 2


@pytest.mark.parametrize(
    ("name", "where", "value", "problem"),
    [
        ("flash3", "get_device_capability", (8, 0), "FlashAttention 3 requires a GPU of compute capability 9.x, not 8.0"),
        ("flash4", "get_device_capability", (8, 6), "FlashAttention 4 requires a GPU of compute capability 9.x or 10.x, not 8.6"),
        ("flash4", "get_device_capability", (9, 0), "flash-attn-4, which FlashAttention 4 requires, cannot be used: No module"),
        ("flash3", "list_flash_attention_impls", [], "torch .* cannot select FlashAttention 3"),
    ],
)  # fmt: skip
def test_flash_attention_that_is_not_available(
    monkeypatch: pytest.MonkeyPatch, flash_attention_3: list[str], name: str, where: str, value: Any, problem: str
) -> None:
    module = torch.cuda if where == "get_device_capability" else torch.nn.attention
    monkeypatch.setattr(module, where, lambda: value)
    expected = f"^training.attention = '{name}': {problem}.*; set training.attention = 'auto'$"
    with pytest.raises(UserError, match=expected), layers.attention_backend(name):
        pass
    assert flash_attention_3 == []
    assert re.match(problem, doctor._flash_attention()[name == "flash4"].text)


@section
class DroppingConfig(LlamaConfig):
    """A Llama with another module in a block."""

    name: Literal["dropping"] = "dropping"  # type: ignore[assignment]
    kind: str = "Dropout"
    p: float = 0.1


class Dropping(Llama):
    def __init__(self, config: DroppingConfig) -> None:
        super().__init__(config)
        self.layers["1"].add_module("drop", getattr(nn, config.kind)(config.p))


@pytest.mark.parametrize(
    "kind", ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"]
)
def test_a_model_with_dropout_of_torch_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All data-parallel ranks would drop the same elements, and validation some."""
    monkeypatch.setattr(registry, "_models", {})
    register_model(DroppingConfig)(Dropping)
    message = rf"^layers\.1\.drop of Dropping is a torch\.nn\.{kind} with p = 0\.1, .*; use titanlike\.models\.common\.dropout"
    with pytest.raises(UserError, match=message):
        build_model(DroppingConfig(kind=kind))
    build_model(DroppingConfig(kind=kind, p=0.0))
    build_model(DroppingConfig(kind="Identity"))
