"""Transforms on modules that are not ours, in a user's own loop: gradients equal to one process, or an error in one sentence."""

import copy
import re
from collections.abc import Callable
from typing import Any

import fsdp_tensor
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.launching import ROOT
from tests.parity import FAST
from tests.pool import Ranks, user_error
from tests.training import full_tensor, mesh_of
from titanlike.config import UserError
from titanlike.config.sections import Float8
from titanlike.float8.linear import apply_float8
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.blocks import find_blocks
from titanlike.parallelisms.compile import apply_compile
from titanlike.parallelisms.context import apply_context, context_position_ids
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.mixed_precision import apply_mixed_precision
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


def _bfloat16(cast: bool) -> str:
    model = seeded(MLP)
    apply_fsdp(model, mesh_of("cpu", shard=2).fsdp, compute_dtype=torch.bfloat16, cast_forward_inputs=cast)
    return str(model(torch.zeros(2, 8)).dtype)


def test_fsdp_casts_float32_inputs(ranks: Ranks) -> None:
    assert ranks(2).run(_bfloat16, True) == ["torch.bfloat16"] * 2


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


def _tensor_error(changes: dict[str, str], shape: tuple[int, ...] = (2, 16, 32), after_fsdp: bool = False) -> str:
    model, mesh = seeded(Encoder), mesh_of("cpu", tensor=2)
    if after_fsdp:
        apply_fsdp(model, mesh_of("cpu", shard=2).fsdp)
    plan = {name: style for name, style in (BLOCK_PLAN | changes).items() if style}
    return user_error(apply_tensor, model, plan, mesh.tensor) or user_error(model, torch.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"blocks.*.atn.q": "colwise"},
            "the tensor-parallel plan names blocks.*.atn.q, but Encoder has no such module; did you mean blocks.*.attn.q?",
        ),
        ({"blocks.*.up": "colwize"}, "the tensor-parallel style of blocks.*.up = 'colwize'; use one of colwise, rowwise, "),
        ({"blocks.*.norm": "colwise"}, "the tensor-parallel style colwise of blocks.0.norm does not apply to LayerNorm; use"),
        ({"blocks.*.scale": ""}, "the tensor-parallel plan of Encoder does not name blocks.0.scale; add it with one of"),
    ],
)  # fmt: skip
def test_an_invalid_plan_is_reported(ranks: Ranks, changes: dict[str, str], message: str) -> None:
    for error in ranks(2).run(_tensor_error, changes):
        assert error.startswith(message)


def _sizes() -> list[str]:
    errors = [_tensor_error({}, (2, 15, 32)), _tensor_error({}, after_fsdp=True)]
    mesh = mesh_of("cpu", tensor=2)
    for build, plan in (
        (lambda: nn.Sequential(nn.Linear(8, 9)), {"0": "colwise"}),
        (lambda: nn.Sequential(nn.Embedding(8, 4)), {"0": "sequence_parallel"}),
    ):
        errors.append(user_error(apply_tensor, build(), plan, mesh.tensor))
    for options in (dict(replicated_io=False), dict(sequence_parallel=False)):
        embedding = nn.Sequential(nn.Embedding(8, 4))
        apply_tensor(embedding, {"0": "vocab_parallel"}, mesh.tensor, **options)
        errors.append(user_error(embedding, torch.zeros(2, 15, dtype=torch.long)))
    return errors


def test_sizes_that_ranks_do_not_divide_are_reported(ranks: Ranks) -> None:
    for sequence, fsdp, size, embedding, ids, not_split in ranks(2).run(_sizes):
        assert sequence == (
            "sequence parallelism over 2 ranks splits dimension 1 of an input of shape (2, 15, 32), which must be divisible by 2; "
            "pad the sequence, or pass sequence_parallel=False"
        )
        assert ids == sequence.replace(", 32)", ")") and not not_split
        assert fsdp.endswith("is sharded already; apply tensor parallelism once, and before FSDP")
        assert size == (
            "0.weight (colwise): 2 tensor-parallel ranks do not divide dimension 0 of the shape (9, 8); use another number of "
            "ranks or another size"
        )
        assert embedding.endswith(
            "of 0 does not apply to Embedding; use vocab_parallel, position_embedding or colwise_embedding"
        )


def test_compute_dtype_casts_parameters_and_inputs_of_a_plain_module() -> None:
    model, x = seeded(Encoder), torch.randn(2, 16, 32)
    model.register_parameter("table", nn.Parameter(torch.arange(4), requires_grad=False))
    expected = model(x)
    apply_mixed_precision(model, torch.bfloat16)
    out = model(x)
    assert out.dtype == torch.bfloat16 and model.get_parameter("table").dtype == torch.int64
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


class OwnLinear(nn.Linear):
    """A layer of a user."""


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda m: apply_activation_checkpoint(m, mode="ful"), "mode = 'ful'; use one of none, selective, full, memory"),
        (lambda m: apply_compile(["0"]), "blocks: '0' is not a module; pass a ModuleDict, a ModuleList or a seq"),
        (lambda m: apply_float8(m, Float8()), "float8 converts no layer of Sequential (the scaling is 'none'; set 'tensorwise')"),
        (lambda m: apply_float8(m, Float8(scaling="tensorwise")), "float8 converts no layer of Sequential (0: too small)"),
        (
            lambda m: apply_float8(m, Float8(scaling="tensorwise", layers=("*",))),
            "float8.scaling = 'tensorwise' requires multiples of 16, but 0 is 12 x 16; exclude it with float8.skip",
        ),
        (
            lambda m: apply_float8(nn.Sequential(OwnLinear(16, 16)), Float8(scaling="tensorwise", layers=("*",))),
            "0 is a OwnLinear, whose forward float8 would replace; exclude it with float8.skip",
        ),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_reported(apply: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        apply(nn.Sequential(nn.Linear(16, 12)))
    assert str(caught.value).startswith(message)


class Decoder(nn.Module):
    """A model that a pipeline can split, with an ordinary tied head."""

    first_stage_modules = ("tok_embeddings",)
    last_stage_modules = ("output",)

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.tok_embeddings: Any = nn.Embedding(32, 16)
        self.layers = nn.ModuleDict({str(i): nn.Linear(16, 16) for i in range(num_blocks)})
        self.output: Any = nn.Linear(16, 32, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = h + layer(h).relu()
        if self.output is None:
            return h
        logits: Tensor = self.output(h)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Batch:
    def __init__(self, tokens: Tensor) -> None:
        self.inputs = {"tokens": tokens}
        self.labels = tokens.roll(-1, 1)


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
        lambda: Pipeline(Decoder(), mesh, schedule="2f2b", split=[2, 2]),
        lambda: apply_context(Decoder().layers, context),
        lambda: context_position_ids(30, context),
    )
    return [user_error(attempt) for attempt in attempts]


def test_a_model_that_cannot_be_split_is_reported(ranks: Ranks) -> None:
    for errors in ranks(2).run(_refusals):
        assert [error.partition(";")[0] for error in errors] == [
            "a mesh of pipeline 1 x replicate 1 x shard 2 x context 1 x tensor 2 has 4 ranks, but there are 2 processes",
            "Sequential cannot be split into pipeline stages: it has no layers, tok_embeddings, output, first_stage_modules, "
            "last_stage_modules",
            "split = [1, 2] has 2 stages and 3 blocks, but the schedule 1f1b over 2 ranks takes 2 stages, and the model has 4 "
            "blocks",
            "schedule = '2f2b'",
            "context parallelism replaces the submodule attention.attend, which Linear does not have",
            "context parallelism over 2 ranks splits a sequence into 4 chunks, which do not divide its 30 tokens",
        ]


def _compiled(sequence_parallel: bool) -> tuple[float, int, int]:
    torch._dynamo.reset()
    counters.clear()
    model: Any = seeded(fsdp_tensor.Transformer)
    reference = copy.deepcopy(model)
    tokens = fsdp_tensor.batch_of(0)[:, :-1]
    reference(tokens).square().mean().backward()
    apply_tensor(model, fsdp_tensor.PLAN, mesh_of("cpu", tensor=2).tensor, sequence_parallel=sequence_parallel)
    apply_activation_checkpoint(model.blocks, mode="full")
    apply_compile(model.blocks, backend=FAST)
    model(tokens).square().mean().backward()
    difference = max(
        ((full_tensor(model.get_parameter(name).grad) - p.grad).abs().max() / p.grad.abs().max()).item()
        for name, p in reference.named_parameters()
        if ".k.bias" not in name and p.grad is not None  # the gradient of the keys' bias is 0
    )
    return difference, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_compiled_blocks_of_a_plain_module_share_one_graph(ranks: Ranks, sequence_parallel: bool) -> None:
    for difference, graphs, graph_breaks in ranks(2).run(_compiled, sequence_parallel):
        assert difference < 1e-5
        assert (graphs, graph_breaks) == (1, 0)


def test_the_styles_are_documented() -> None:
    text = (ROOT / "docs/extending.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| ", text, flags=re.MULTILINE) == list(STYLES)
