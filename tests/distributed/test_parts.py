"""Single parts of the parallelisms: attention over shared sequences, dropout, the split loss, the tensor-parallel plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.parity import FAST
from tests.pool import Pool
from tests.training import LLAMA, build, mesh_of, tiny
from titanlike.config import UserError
from titanlike.config.sections import ActivationCheckpoint, Compile, Parallelism
from titanlike.models import build_model
from titanlike.models.layers import CausalAttention, Dropout
from titanlike.models.loss import IGNORE, cross_entropy_sum
from titanlike.parallelisms.context import attend_over, attend_to_prefix, context_position_ids, gather_sequence
from titanlike.parallelisms.tensor import apply_tensor

Ranks = Callable[[int], Pool]


def _attention(ranks: int, kv_heads: int, with_documents: bool) -> tuple[float, float]:
    """How far attention over a shared sequence is from attention over all of it: the result, and the gradients."""
    generator = torch.Generator().manual_seed(1)
    mesh = mesh_of("cpu", context=ranks).context
    whole = [torch.randn(2, heads, 48, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]
    documents = torch.randint(0, 3, (2, 48), generator=generator).cumsum(1) if with_documents else None
    places = context_position_ids(48, mesh)

    plain = [x.clone().requires_grad_() for x in whole]
    expected = CausalAttention()(*plain, documents)
    expected.square().sum().backward()

    mine = [x[:, :, places].clone().requires_grad_() for x in whole]
    found = attend_over(*mine, None if documents is None else documents[:, places], mesh=mesh)
    found.square().sum().backward()
    assert torch.equal(gather_sequence(places[None], 1, mesh)[0], torch.arange(48))
    worst = max((a.grad - b.grad[:, :, places]).abs().max().item() for a, b in zip(mine, plain, strict=True))
    return (found - expected[:, :, places]).abs().max().item(), worst


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("sharing", [2, 4])
def test_attention_over_a_shared_sequence_is_attention(
    ranks: Ranks, sharing: int, kv_heads: int, documents: bool
) -> None:
    for result, gradients in ranks(sharing).run(_attention, sharing, kv_heads, documents):
        assert result < 1e-5 and gradients < 1e-4


def test_documents_do_not_see_each_other() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    found = CausalAttention()(q, k, v, documents)
    for part in (slice(0, 3), slice(3, 6)):
        alone = CausalAttention()(q[:, :, part], k[:, :, part], v[:, :, part])
        torch.testing.assert_close(found[:, :, part], alone)
    last = attend_to_prefix(q[:, :, 4:], k, v, (documents[:, 4:], documents))
    torch.testing.assert_close(last, found[:, :, 4:])


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_each_rank_that_shares_a_sequence_has_as_much_to_look_at(rank: int) -> None:
    class Mesh:
        def size(self) -> int:
            return 4

        def get_local_rank(self) -> int:
            return rank

    places = context_position_ids(64, Mesh())  # type: ignore[arg-type]
    assert (places + 1).sum() == (torch.arange(64) + 1).sum() / 4
    assert len(places.unique()) == 16


def _split_loss(scale: float) -> tuple[float, float, float, float]:
    group = mesh_of("cpu", tensor=2).tensor.get_group()
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 8, 64, generator=generator) * scale).requires_grad_()
    labels = torch.randint(0, 64, (2, 8), generator=generator)
    labels[0, 3] = IGNORE
    expected = cross_entropy_sum(logits, labels)
    expected.backward()
    part = slice(32 * group.rank(), 32 * (group.rank() + 1))
    mine = logits.detach()[..., part].clone().requires_grad_()
    found = cross_entropy_sum(mine, labels, group)
    found.backward()
    assert mine.grad is not None and logits.grad is not None
    return (
        found.item(),
        expected.item(),
        (mine.grad - logits.grad[..., part]).abs().max().item(),
        mine.grad[0, 3].norm().item(),
    )


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_loss_over_slices_of_the_vocabulary_is_the_loss(ranks: Ranks, scale: float) -> None:
    for found, expected, gradient, ignored in ranks(2).run(_split_loss, scale):
        assert found == pytest.approx(expected, rel=1e-6)
        assert gradient < 1e-6
        assert ignored == 0.0


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    noise = torch.randint(0, 2**32, (8, 128), generator=torch.Generator().manual_seed(0))
    x = torch.ones(8, 128, 96)
    dropped = Dropout(0.3, site=1)(x, noise)
    zero = dropped == 0
    assert zero.float().mean().item() == pytest.approx(0.3, abs=0.005)
    assert (
        zero.float().mean((0, 1)).std() < 0.03 and zero.float().mean(2).std() < 0.06
    )  # no channel, no token is favoured
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(dropped, Dropout(0.3, site=1)(x, noise))
    other = Dropout(0.3, site=2)(x, noise) == 0
    assert (zero & other).float().mean().item() == pytest.approx(0.09, abs=0.005)  # sites are independent
    assert torch.equal(Dropout(0.3, site=1)(x, None), x)  # as in validation


def _forgetful(entry: str) -> str:
    with torch.device("meta"):
        model: nn.Module = build_model(LLAMA)
    plan = {name: part for name, part in model.tensor_plan.items() if name != entry}  # type: ignore[union-attr]
    try:
        apply_tensor(model, plan, mesh_of("cpu", tensor=2).tensor)
    except UserError as error:
        return str(error)
    return "nothing said"


@pytest.mark.parametrize(
    ("entry", "name"),
    [("norm", "norm"), ("layers.*.attention.wo", "layers.0.attention.wo"), ("tok_embeddings", "tok_embeddings")],
)
def test_a_parameter_that_the_plan_forgets_is_named(ranks: Ranks, entry: str, name: str) -> None:
    for said in ranks(2).run(_forgetful, entry):
        assert said == (
            f"the tensor-parallel plan of Llama does not name {name}; add it, as one of vocabulary, positions, tokens, "
            "gather, columns, rows, head"
        )


def _graphs(layout: dict[str, int], mode: Any) -> tuple[int, int]:
    torch._dynamo.reset()
    counters.clear()
    model, mesh = build(
        tiny(
            Path(), "", parallelism=Parallelism(**layout), compile=Compile(backend=FAST),
            activation_checkpoint=ActivationCheckpoint(mode=mode),
        )
    )  # fmt: skip
    places = context_position_ids(32, mesh.context)
    for _ in range(2):
        logits: Tensor = model(tokens=torch.zeros(1, len(places), dtype=torch.long), position_ids=places[None])
        logits.float().sum().backward()
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        (dict(tensor=2), "none"),
        (dict(context=2), "full"),
        pytest.param(dict(tensor=2), "full", marks=pytest.mark.slow),
        pytest.param(dict(context=2), "none", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_compiled_block_serves_all(ranks: Ranks, layout: dict[str, int], mode: str) -> None:
    assert ranks(2).run(_graphs, layout, mode) == [(1, 0)] * 2


def test_the_plain_loss_is_torchs_own() -> None:
    logits, labels = torch.randn(2, 4, 8), torch.randint(0, 8, (2, 4))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(cross_entropy_sum(logits, labels), expected)
