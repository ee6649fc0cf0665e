"""The models against slow references written from the formulas, and the numbers that are told about them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titanlike.config.model_configs import GPT_SIZES, LLAMA_SIZES, GPTConfig, LlamaConfig
from titanlike.models import build_model
from titanlike.models.init import initialize
from titanlike.models.layers import TiedLMHead
from titanlike.models.llama import rotary_angles, scale_rope_frequencies

TINY_LLAMA = LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=37, max_seq_len=64)
TINY_GPT = GPTConfig(dim=32, num_layers=2, num_heads=4, vocab_size=37, max_seq_len=64)
SHAPES = [TINY_LLAMA, TINY_GPT]


def made(shape: LlamaConfig | GPTConfig, seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        model = build_model(shape)
    initialize(model, torch.device("cpu"), seed)
    return model


def scaled_up(model: nn.Module) -> nn.Module:
    """Weights large enough that an error in positions or masks shows, in double precision."""
    model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotary positions of (T, E) by complex numbers: place t turns pair i by t * theta ** (-2i / E)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angles = torch.tensor([[t * theta ** (-2 * i / x.shape[-1]) for i in range(half)] for t in range(len(x))])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
    return torch.cat((turned.real, turned.imag), -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head of causal attention on (T, E), place by place."""
    rows = []
    for t in range(len(q)):
        odds = (k[: t + 1] @ q[t] / math.sqrt(q.shape[-1])).softmax(0)
        rows.append(odds @ v[: t + 1])
    return torch.stack(rows)


def llama_reference(shape: LlamaConfig, w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = w["tok_embeddings.weight"][tokens]
    group = shape.num_heads // shape.num_kv_heads
    for i in range(shape.num_layers):
        b = {name.removeprefix(f"layers.{i}."): value for name, value in w.items()}
        h = rms(x, b["attention_norm.weight"], shape.norm_eps)
        q, k, v = (h @ b[f"attention.w{p}.weight"].T for p in "qkv")
        q, k, v = (part.split(shape.head_dim, -1) for part in (q, k, v))
        heads = [
            attend(turn(q[j], shape.rope_theta), turn(k[j // group], shape.rope_theta), v[j // group])
            for j in range(shape.num_heads)
        ]
        x = x + torch.cat(heads, -1) @ b["attention.wo.weight"].T
        h = rms(x, b["ffn_norm.weight"], shape.norm_eps)
        gate = h @ b["feed_forward.w1.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ b["feed_forward.w3.weight"].T)) @ b["feed_forward.w2.weight"].T
    head = w["tok_embeddings.weight" if shape.tied_head else "output.weight"]
    return rms(x, w["norm.weight"], shape.norm_eps) @ head.T


def gpt_reference(shape: GPTConfig, w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return rms(centred, w[f"{name}.weight"], shape.norm_eps) + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["tok_embeddings.weight"][tokens] + w["pos_embeddings.weight"][: len(tokens)]
    for i in range(shape.num_layers):
        h = norm(x, f"layers.{i}.attention_norm")
        q, k, v = (linear(h, f"layers.{i}.attention.w{p}").split(shape.head_dim, -1) for p in "qkv")
        heads = [attend(q[j], k[j], v[j]) for j in range(shape.num_heads)]
        x = x + linear(torch.cat(heads, -1), f"layers.{i}.attention.wo")
        h = linear(norm(x, f"layers.{i}.ffn_norm"), f"layers.{i}.feed_forward.w1")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"layers.{i}.feed_forward.w2")
    return norm(x, "norm") @ w["tok_embeddings.weight"].T


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_llama_follows_its_formulas(num_kv_heads: int, tied: bool) -> None:
    shape = LlamaConfig(
        dim=32, num_layers=2, num_heads=4, num_kv_heads=num_kv_heads, ffn_dim=48, vocab_size=37, max_seq_len=64,
        rope_theta=100.0, tied_head=tied,
    )  # fmt: skip
    model = scaled_up(made(shape))
    tokens = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(0))
    for row, logits in zip(tokens, model(tokens), strict=True):
        expected = llama_reference(shape, dict(model.named_parameters()), row)
        # rotary angles and turns are float32 in the model, whatever the weights are
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


def test_gpt_follows_its_formulas() -> None:
    model = scaled_up(made(TINY_GPT))
    tokens = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(0))
    for row, logits in zip(tokens, model(tokens), strict=True):
        torch.testing.assert_close(logits, gpt_reference(TINY_GPT, dict(model.named_parameters()), row))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_positions_may_be_given(shape: LlamaConfig | GPTConfig) -> None:
    model = scaled_up(made(shape))
    tokens = torch.arange(12).remainder(37)[None]
    positions = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens, positions), model(tokens))
    assert not torch.allclose(model(tokens, positions * 3), model(tokens))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_token_does_not_see_the_next(shape: LlamaConfig | GPTConfig) -> None:
    model = scaled_up(made(shape))
    tokens = torch.arange(12).remainder(37)[None]
    changed = tokens.clone()
    changed[0, 7] = 36
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_stretch_keeps_fast_frequencies_and_slows_slow_ones() -> None:
    original, factor = 8192, 8.0
    fast, slow = 2 * math.pi * 4.5 / original, 2 * math.pi * 0.9 / original
    middle = 2 * math.pi * 2.5 / original  # half-way between one turn and four
    stretched = scale_rope_frequencies(torch.tensor([fast, slow, middle]), factor, original)
    torch.testing.assert_close(stretched, torch.tensor([fast, slow / factor, middle * (0.5 + 0.5 / factor)]))


def test_the_stretch_is_off_at_1_and_reaches_the_angles_otherwise() -> None:
    def cosines(scaling: float) -> Tensor:
        return rotary_angles(
            LlamaConfig(size="3-8B", dim=4096, num_heads=32, rope_scaling=scaling), torch.arange(9000)[None]
        )[0][0, 0]

    assert torch.equal(cosines(1.0)[:, 0], cosines(8.0)[:, 0])  # the fastest pair is kept
    assert not torch.allclose(cosines(1.0)[:, 63], cosines(8.0)[:, 63])


@pytest.mark.parametrize(
    ("kind", "size", "fields"),
    [(LlamaConfig, size, fields) for size, fields in LLAMA_SIZES.items()]
    + [(GPTConfig, size, f) for size, f in GPT_SIZES.items()],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_counts_told_without_torch_are_those_of_the_model(
    kind: Callable[..., LlamaConfig | GPTConfig], size: str, fields: dict[str, int]
) -> None:
    shape = kind(size=size, **fields)
    with torch.device("meta"):
        model = build_model(shape)
    assert shape.num_parameters() == sum(p.numel() for p in model.parameters())
    # every matrix multiplies each token; the embedding does only where it is the head as well
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embeddings" not in name)
    tied = isinstance(model.output, TiedLMHead)
    assert shape.num_matmul_parameters() == matrices + (shape.vocab_size * shape.dim if tied else 0)


def test_flops_count_six_a_weight_and_attention_in_full() -> None:
    attention = 2 * (2 * 32 * 16)  # scores and mix, two operations a multiply-add, for each of 16 places
    expected = 6 * TINY_LLAMA.num_matmul_parameters() + 3 * TINY_LLAMA.num_layers * attention
    assert TINY_LLAMA.flops_per_token(seq_len=16) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_first_values_depend_on_the_seed_and_the_name_alone(shape: LlamaConfig | GPTConfig) -> None:
    whole = dict(made(shape).named_parameters())
    with torch.device("meta"):
        part = build_model(shape)
    del part.layers["0"], part.tok_embeddings  # type: ignore[union-attr]
    initialize(part, torch.device("cpu"), 0)
    for name, value in part.named_parameters():
        assert torch.equal(value, whole[name]), name
    other = dict(made(shape, seed=1).named_parameters())
    assert not torch.equal(whole["tok_embeddings.weight"], other["tok_embeddings.weight"])
    wq, wk = whole["layers.0.attention.wq.weight"], whole["layers.1.attention.wq.weight"]
    assert not torch.equal(wq, wk)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_first_values_have_the_spread_that_is_meant(shape: LlamaConfig | GPTConfig) -> None:
    for name, value in made(shape).named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value))
        else:
            expected = 0.01 if name.endswith((".wo.weight", ".w2.weight")) else 0.02  # 0.02 / sqrt(2 * 2 layers)
            assert value.std().item() == pytest.approx(expected, rel=0.1), name


def test_a_parameter_that_the_model_forgets_is_found() -> None:
    with torch.device("meta"):
        model = build_model(TINY_LLAMA)
        model.extra = nn.Parameter(torch.empty(3))
    fill = model.init_parameter
    model.init_parameter = lambda name, value, generator: None if name == "extra" else fill(name, value, generator)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="left extra uninitialized"):
        initialize(model, torch.device("cpu"), 0)
