"""QK-clip against loops over pairs of tokens in float64."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.interop.models import CONFIGS, model_of
from tests.training import DEEPSEEK_V3
from titanlike.config.optimizer import Optimizer, OptimizerGroup
from titanlike.models.common import attention_logits
from titanlike.optim import build_optimizer
from titanlike.optim.qk_clip import QKClip

MUON = (OptimizerGroup(pattern="attention", optimizer="muon"),)
MODELS: dict[str, Any] = {
    "MHA": dataclasses.replace(CONFIGS["theta"]),  # type: ignore[call-arg]
    "GQA": dataclasses.replace(CONFIGS["grouped-query"]),  # type: ignore[call-arg]
    "biases": CONFIGS["Qwen2"],
    "MLA": CONFIGS["DeepSeek-V3"],
    "MLA without a latent query": CONFIGS["Moonlight"],
}
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 20 + [1] * 4])


def logits_of(model: nn.Module, tokens: Tensor, documents: Tensor | None) -> list[Tensor]:
    """Returns the logits (B, H, T, T) of each block in float64, with -inf where attention is masked."""
    model = copy.deepcopy(model).double()
    found: list[Tensor] = []

    def observe(attend: Any, arguments: tuple[Any, ...]) -> None:
        q, k = arguments[:2]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        length = q.shape[2]
        logits = torch.full((*q.shape[:2], length, length), -torch.inf, dtype=torch.float64)
        for i in range(length):
            for j in range(i + 1):
                pairs = (q[:, :, i] * k[:, :, j]).sum(-1) * q.shape[-1] ** -0.5
                for row in range(len(q)):
                    if documents is None or documents[row, i] == documents[row, j]:
                        logits[row, :, i, j] = pairs[row]
        found.append(logits)

    for layer in model.layers.values():
        layer.attention.attend.register_forward_pre_hook(observe)
    with torch.no_grad():
        model(tokens, document_ids=documents)
    return found


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("name", ["GQA", "MLA"])
def test_the_largest_logits_of_micro_batches_are_exact(
    name: str, documents: Tensor | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(MODELS[name])
    monkeypatch.setattr(attention_logits, "MAX_SCORES", rows * 24 * model.config.num_heads)
    clip = QKClip(model, 1.0)
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([layer.amax((0, 2, 3)) for layer in logits_of(model, tokens, documents)])
    for row in range(2):  # two micro-batches
        model(tokens[row : row + 1], document_ids=None if documents is None else documents[row : row + 1])
    with torch.no_grad():
        model(3 * torch.ones_like(tokens))  # validation does not count
    torch.testing.assert_close(torch.stack(clip.maxima).double(), expected, rtol=1e-4, atol=1e-4)
    clip.step()
    torch.testing.assert_close(clip.max_logit.double(), expected.max(), rtol=1e-4, atol=1e-4)
    clip.reset()
    assert all(bool((maxima == -torch.inf).all()) for maxima in clip.maxima)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_heads_above_the_threshold_are_scaled_to_it(name: str) -> None:
    model = model_of(MODELS[name])
    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    before = logits_of(model, tokens, None)[0]  # of the first block, whose input does not change
    largest = before.amax((0, 2, 3))
    ordered = largest.sort().values
    threshold = float(ordered[len(ordered) // 2 - 1 :][:2].mean())  # half of the heads are above
    clip = QKClip(model, threshold)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(tokens)
    clip.step()
    after = logits_of(model, tokens, None)[0]
    factors = (threshold / largest).clamp(max=1.0)
    assert 0 < int((factors < 1).sum()) < len(factors)
    pairs = torch.ones(24, 24).tril().bool()
    expected = before * factors[:, None, None]
    torch.testing.assert_close(after[..., pairs], expected[..., pairs], rtol=1e-4, atol=1e-4)
    # The rotated key of latent attention, values and everything outside of attention stay as they are.
    changed = {name.split(".", 2)[2] for name, p in model.named_parameters() if not torch.equal(p, values[name])}
    kinds = {"MLA": {"wq_b", "wkv_b"}, "MLA without a latent query": {"wq", "wkv_b"}}.get(name, {"wq", "wk"})
    assert {each.split(".")[1] for each in changed} <= kinds and all(each.startswith("attention.") for each in changed)
    if name.startswith("MLA"):
        attention, old = model.layers["0"].attention, values["layers.0.attention.wkv_b.weight"]
        parts = [
            each.unflatten(0, (-1, attention.nope_dim + attention.v_dim)) for each in (attention.wkv_b.weight, old)
        ]
        assert torch.equal(parts[0][:, attention.nope_dim :], parts[1][:, attention.nope_dim :])


def test_muon_clips_after_its_step_and_records_the_largest_logit() -> None:
    config = DEEPSEEK_V3
    first, second = model_of(config), model_of(config)
    section = Optimizer(groups=MUON, lr=1e-3)
    plain = build_optimizer(first, section)
    clipped = build_optimizer(second, dataclasses.replace(section, muon_qk_clip=0.1))
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    for model, optimizer in ((first, plain), (second, clipped)):
        model(tokens, labels=tokens).backward()
        optimizer.step()
    assert plain.metrics == {}
    largest = float(clipped.metrics["max_attention_logit"])
    one, other = (model.layers["1"].attention.wq_b.weight for model in (first, second))
    ratio = (other / one).detach().unflatten(0, (-1, config.head_dim))
    factors = torch.tensor([0.1 / float(value) for value in clipped.optimizers[1].qk_clip.maxima[1]]).clamp(max=1.0)
    assert largest > 0.1 and float(factors.min()) < 0.9
    for head, factor in enumerate(factors):
        nope = ratio[head, : config.qk_nope_head_dim]
        torch.testing.assert_close(nope, factor.sqrt().expand_as(nope), rtol=1e-3, atol=1e-3)
        rotated = ratio[head, config.qk_nope_head_dim :]
        torch.testing.assert_close(rotated, factor.expand_as(rotated), rtol=1e-3, atol=1e-3)
    clipped.zero_grad()
    assert all(bool((maxima == -torch.inf).all()) for maxima in clipped.optimizers[1].qk_clip.maxima)
