"""Transforms on modules that are not ours, in a user's own loop: gradients equal to one process, or an error in one sentence."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.decoder import Batch, Decoder
from tests.launching import ROOT
from tests.pool import Ranks, user_error
from tests.training import full_tensor, mesh_of
from titanlike.parallelisms.blocks import find_blocks
from titanlike.parallelisms.context import apply_context, context_position_ids
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.parallelisms.tensor import STYLES, apply_tensor


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def worst_difference(model: nn.Module, reference: nn.Module) -> float:
    """Returns the largest difference of a gradient, relative to the largest element of its tensor."""
    differences = []
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        assert parameter.grad is not None and gradient is not None, name
        differences.append((full_tensor(gradient) - parameter.grad).abs().max() / parameter.grad.abs().max())
    return max(differences).item()


class MLP(nn.Module):
    """Blocks in a `ModuleList`, and a head that shares the weight of the first module."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"first": nn.Linear(8, 16), "blocks": nn.ModuleList(nn.Linear(16, 16) for _ in range(3))}
        )
        self.head = nn.Linear(16, 8)
        if tied:
            self.embeddings = nn.ModuleList([nn.Embedding(8, 16)])
            self.embeddings[0].weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts["first"](x)
        if hasattr(self, "embeddings"):
            h = h + self.embeddings[0](torch.zeros(len(x), dtype=torch.long))
        for block in self.parts["blocks"]:
            h = h + block(h).relu()
        return self.head(h)


def _data_parallel(layout: dict[str, int], reduction: Any, tied: bool = False) -> float:
    """Returns the largest difference of gradients between an ordinary loop and one process on the full batch."""
    mesh = mesh_of("cpu", **layout)
    model = seeded(lambda: MLP(tied))
    reference = copy.deepcopy(model)
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    (reference(batch) - batch).square().mean().backward()
    apply_fsdp(model, mesh.fsdp, **({"gradient_reduction": reduction} if reduction else {}))
    x = batch.chunk(mesh.num_data_ranks)[mesh.data_rank]
    loss = (model(x) - x).square().mean()
    (loss / mesh.num_data_ranks if reduction == "sum" else loss).backward()
    return worst_difference(model, reference)


LAYOUTS = [dict(shard=2), dict(replicate=2, shard=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fsdp_averages_the_gradients_of_an_ordinary_mean_loss(ranks: Ranks, layout: dict[str, int]) -> None:
    pool = ranks(layout.get("shard", 1) * layout.get("replicate", 1))
    for reduction in ("", "mean", "sum"):
        assert max(pool.run(_data_parallel, layout, reduction)) < 1e-6


def test_default_units_are_the_blocks() -> None:
    model = MLP(tied=True)
    blocks: Any = model.parts["blocks"]
    assert find_blocks(model) == [*blocks, *model.embeddings]  # type: ignore[misc]
    assert find_blocks(nn.ModuleDict({"0": blocks[0], "1": blocks[0]})) == [blocks[0]]


def _tied(units: bool) -> Any:
    model: Any = seeded(lambda: MLP(tied=True))
    error = user_error(apply_fsdp, model, mesh_of("cpu", shard=2).fsdp, units=[model.head] if units else None)
    return error or model.embeddings[0].weight is model.head.weight


def test_fsdp_keeps_tied_parameters_tied(ranks: Ranks) -> None:
    assert ranks(2).run(_tied, False) == [True] * 2
    assert max(ranks(2).run(_data_parallel, dict(shard=2), "", tied=True)) < 1e-6
    for error in ranks(2).run(_tied, True):
        assert error.startswith("units: unit 0 has a parameter that is also used outside of it")


class Attention(nn.Module):
    """Attention with QK-norm, called with named arguments."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, *, hidden: Tensor, causal: bool) -> Tensor:
        q, k, v = (linear(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=causal)
        return self.out(h.transpose(1, 2).flatten(-2))


class Scale(nn.Module):
    """A layer with a parameter that is neither a weight nor a bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Encoder(nn.Module):
    """A model of a user: nothing has the names of ours, and the feed-forward layers have no module of their own."""

    def __init__(self, ids: bool = False, tied: bool = False) -> None:
        super().__init__()
        dim = 32
        self.embed = nn.Embedding(64, dim) if ids else None
        self.position = nn.Embedding(16, dim) if ids else None
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(dim),
                    "attn": Attention(dim),
                    "up": nn.Linear(dim, 48),
                    "down": nn.Linear(48, dim),
                    "scale": Scale(dim),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(dim, 64, bias=False) if ids else None
        if self.embed is not None and self.head is not None and tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = x
        if self.embed is not None and self.position is not None:
            h = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            parts: Any = block
            h = h + parts["attn"](hidden=parts["norm"](h), causal=True)
            h = h + parts["scale"](parts["down"](parts["up"](h).relu()))
        return h if self.head is None else self.head(h)


BLOCK_PLAN = {
    "blocks.*.norm": "sequence_parallel", "blocks.*.attn": "all_gather_input", "blocks.*.attn.q": "colwise",
    "blocks.*.attn.k": "colwise", "blocks.*.attn.v": "colwise", "blocks.*.attn.q_norm": "replicated",
    "blocks.*.attn.k_norm": "replicated", "blocks.*.attn.out": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
    "blocks.*.scale": "sequence_parallel",
}  # fmt: skip
IDS_PLAN = BLOCK_PLAN | {"embed": "vocab_parallel", "position": "position_embedding", "head": "colwise_gather_output"}


def _tensor_parallel(layout: dict[str, int], sequence_parallel: bool, ids: bool, tied: bool) -> list[float]:
    """Returns the largest differences of the output and of the gradients, including the input's, from one process."""
    mesh = mesh_of("cpu", **layout)
    model = seeded(lambda: Encoder(ids, tied))
    model.get_parameter("blocks.0.norm.bias").requires_grad_(False)
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(0, 64, (4, 16), generator=generator) if ids else torch.randn(4, 16, 32, generator=generator)
    if not ids:
        batch.requires_grad_()
    expected = reference(batch)
    expected.square().mean().backward()
    apply_tensor(model, IDS_PLAN if ids else BLOCK_PLAN, mesh.tensor, sequence_parallel=sequence_parallel)
    if mesh.num_data_ranks > 1:
        apply_fsdp(model, mesh.fsdp)
    assert not model.get_parameter("blocks.0.norm.bias").requires_grad
    reference.get_parameter("blocks.0.norm.bias").requires_grad_(False)
    local = batch.detach().chunk(mesh.num_data_ranks)[mesh.data_rank].requires_grad_(not ids)
    out = model(local)
    out.square().mean().backward()
    same = expected.chunk(mesh.num_data_ranks)[mesh.data_rank]
    differences = [((out - same).abs().max() / same.abs().max()).item()]
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            gradient = model.get_parameter(name).grad
            assert parameter.grad is not None and gradient is not None, name
            size = parameter.grad.abs().max().clamp(min=largest / 100)  # the bias of the keys has a gradient of 0
            differences.append(((full_tensor(gradient) - parameter.grad).abs().max() / size).item())
    if not ids:
        assert local.grad is not None and batch.grad is not None
        part = batch.grad.chunk(mesh.num_data_ranks)[mesh.data_rank] * mesh.num_data_ranks
        differences.append((local.grad - part).abs().max().item())
    return differences


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"), [(dict(tensor=2), False), (dict(shard=2, tensor=2), True)], ids=str
)
def test_tensor_parallelism_of_a_plain_module(ranks: Ranks, layout: dict[str, int], sequence_parallel: bool) -> None:
    pool = ranks(2 * layout.get("shard", 1))
    for ids, tied in ((False, False), (True, False), (True, True)):
        for differences in pool.run(_tensor_parallel, layout, sequence_parallel, ids, tied):
            assert max(differences) < 1e-5, (ids, tied)


# A change of the plan, and the start of the error.
PLANS = {
    "the tensor-parallel plan names blocks.*.atn.q, but Encoder has no such module; did": {"blocks.*.atn.q": "colwise"},
    "the tensor-parallel style of blocks.*.up = 'colwize'; use one of ": {"blocks.*.up": "colwize"},
    "the tensor-parallel style colwise of blocks.0.norm does not apply to LayerNorm; ": {"blocks.*.norm": "colwise"},
    "the tensor-parallel plan of Encoder does not name blocks.0.scale; add it ": {"blocks.*.scale": ""},
}


def _refused_plans() -> list[str]:
    mesh = mesh_of("cpu", tensor=2).tensor
    plans = ({name: style for name, style in (BLOCK_PLAN | each).items() if style} for each in PLANS.values())
    return [user_error(apply_tensor, seeded(Encoder), plan, mesh) for plan in plans]


def _refused_sizes() -> list[str]:
    mesh = mesh_of("cpu", tensor=2).tensor
    model, sharded = seeded(Encoder), seeded(Encoder)
    apply_tensor(model, BLOCK_PLAN, mesh)
    apply_fsdp(sharded, mesh_of("cpu", shard=2).fsdp)
    return [
        user_error(model, torch.zeros(2, 15, 32)),
        user_error(apply_tensor, sharded, BLOCK_PLAN, mesh),
        user_error(apply_tensor, nn.Sequential(nn.Linear(8, 9)), {"0": "colwise"}, mesh),
    ]


def test_plans_and_sizes_that_cannot_be_used_are_reported(ranks: Ranks) -> None:
    for errors in ranks(2).run(_refused_plans):
        assert [error.startswith(message) for error, message in zip(errors, PLANS, strict=True)] == [True] * 4, errors
    for sequence, sharded, size in ranks(2).run(_refused_sizes):
        assert "splits dimension 1 of an input of shape (2, 15, 32), which must be divisible by 2; pad " in sequence
        assert sharded.endswith("is sharded already; apply tensor parallelism once, and before FSDP")
        assert size.startswith(
            "0.weight (colwise): 2 tensor-parallel ranks do not divide dimension 0 of the shape (9, 8)"
        )


def _pipeline(schedule: str, split: list[int]) -> float:
    mesh = mesh_of("cpu", pipeline=2).pipeline
    reference = seeded(Decoder)
    model = Pipeline(copy.deepcopy(reference), mesh, schedule=schedule, split=split, dtype=torch.float32)
    copies = model.copies
    worst = 0.0
    for count in (4, 6):  # a user's last batch may have another number of micro-batches
        tokens = torch.randint(0, 32, (count, 1, 8), generator=torch.Generator().manual_seed(count))
        reference.zero_grad()
        model.zero_grad()
        for each in tokens:
            (reference(each, labels=each.roll(-1, 1)) / 100).backward()
        model.forward_backward([Batch(each) for each in tokens], lambda loss: loss / 100)
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(copies.get(name, name)).grad
            assert expected is not None and parameter.grad is not None
            worst = max(worst, ((parameter.grad - expected).abs().max() / expected.abs().max()).item())
    return worst


@pytest.mark.parametrize(("schedule", "split"), [("1f1b", [2, 2]), ("zbv", [1, 1, 1, 1])])
def test_a_pipeline_of_a_plain_module_with_tied_weights(ranks: Ranks, schedule: str, split: list[int]) -> None:
    assert max(ranks(2).run(_pipeline, schedule, split)) < 1e-5


def _refusals() -> list[str]:
    mesh = mesh_of("cpu", pipeline=2).pipeline
    context = mesh_of("cpu", context=2).context
    attempts: tuple[Callable[[], object], ...] = (
        lambda: build_mesh("cpu", shard=2, tensor=2),
        lambda: Pipeline(nn.Sequential(nn.Linear(2, 2)), mesh, schedule="1f1b", split=[1, 1]),
        lambda: Pipeline(Decoder(), mesh, schedule="1f1b", split=[1, 2]),
        lambda: apply_context(Decoder().layers, context),
        lambda: context_position_ids(30, context),
    )
    return [user_error(attempt) for attempt in attempts]


def test_a_model_that_cannot_be_split_is_reported(ranks: Ranks) -> None:
    messages = (
        "has 4 ranks, but there are 2 processes",
        "Sequential cannot be split into pipeline stages: it has no layers, tok_embeddings, output, first_stage_modules, ",
        "split = [1, 2] has 2 stages and 3 blocks, but the schedule 1f1b over 2 ranks takes 2 stages, and the model has 4 ",
        "context parallelism replaces the submodule attention.attend, which Linear does not have",
        "splits a sequence into 4 chunks, which do not divide its 30 tokens",
    )
    for errors in ranks(2).run(_refusals):
        assert [message in error for message, error in zip(messages, errors, strict=True)] == [True] * 5, errors


def test_the_styles_are_documented() -> None:
    text = (ROOT / "docs/extending.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| ", text, flags=re.MULTILINE) == list(STYLES)
