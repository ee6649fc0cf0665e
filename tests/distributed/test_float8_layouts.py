"""Float8 under every layout: the numbers of one process, bytes on the wire, scales that are never stale, exact resumes."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.test_checkpoint import drop_last, load_and_save_elsewhere
from tests.parity import FAST
from tests.pool import Pool
from tests.training import assert_same, build, tiny, train, whole
from titanlike.checkpoint import read_whole
from titanlike.config import PretrainRecipe
from titanlike.config.model_configs import GPTConfig, LlamaConfig
from titanlike.config.sections import Parallelism
from titanlike.distributed import collectives
from titanlike.float8.all_gather import Shard
from titanlike.models.loss import cross_entropy_sum
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.context import context_position_ids

Ranks = Callable[[int], Pool]

MODELS: dict[str, Any] = {
    "llama": LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=320),
    "gpt": GPTConfig(dim=64, num_layers=2, num_heads=4, vocab_size=320),
}
FLOAT8: dict[str, Any] = dict(scaling="tensorwise", skip_small=False, emulate=True)
ALL_GATHER: dict[str, Any] = FLOAT8 | dict(all_gather=True)


def recipe_for(
    folder: Path, name: str, layout: dict[str, Any], float8: dict[str, Any], **sections: Any
) -> PretrainRecipe:
    model = MODELS[sections.pop("model", "llama")]
    model = dataclasses.replace(model, num_layers=sections.pop("layers", model.num_layers))
    # Rounded numbers jump: what one step rounds otherwise, large steps would blow up.
    small = dict(lr=1e-3, eps=1e-4) | sections.pop("optimizer", {})
    training = dict(local_batch_size=2, steps=3) | sections.pop("training", {})
    sections = dict(validation=dict(interval=3, batches=1)) | sections
    return tiny(
        folder, name, model=model, parallelism=Parallelism(**layout), float8=float8, optimizer=small, training=training,
        **sections,
    )  # fmt: skip


COMPILED: dict[str, Any] = {"compile": dict(mode="block", backend=FAST)}
FULL: dict[str, Any] = {"activation_checkpoint": dict(mode="full")}
SELECTIVE: dict[str, Any] = {"activation_checkpoint": dict(mode="selective")}
slow = pytest.mark.slow


def _gradients(recipe: PretrainRecipe, seeds: int = 1) -> list[dict[str, Tensor]]:
    """The loss and the gradients that each of some micro-batches makes, summed over all ranks that read the same."""
    torch._dynamo.reset()
    model, mesh = build(recipe)
    places = context_position_ids(32, mesh.context)
    copies = mesh.num_data_ranks  # each of which makes the same gradient
    results = []
    for seed in range(seeds):
        tokens = torch.randint(0, 320, (2, 33), generator=torch.Generator().manual_seed(seed))
        logits = model(tokens=tokens[:, :-1][:, places], position_ids=places[None])
        loss = cross_entropy_sum(logits, tokens[:, 1:][:, places], mesh.vocab_group) / 64
        loss.backward()
        total = collectives.all_reduce_sum(loss.detach().clone(), [mesh.context.get_group()])
        found = {name: whole(p.grad) / copies for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": total, **found})
        model.zero_grad()
    return results


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-4)).item() for n in expected)


# A layout, the keys of `[float8]`, and what else the recipe says.
WAYS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "one-gathered": ({}, ALL_GATHER, {}),
    "FSDP-gathered": (dict(shard=2), ALL_GATHER, {}),
    "TP": (dict(tensor=2), FLOAT8, {}),
    "TP-compiled": (dict(tensor=2), FLOAT8, COMPILED),
    "CP": (dict(context=2), FLOAT8, {}),
    "TP-FSDP-gathered": (dict(tensor=2, shard=2), ALL_GATHER, {}),
    "TP-FSDP-compiled": (dict(tensor=2, shard=2), ALL_GATHER, COMPILED | SELECTIVE),
    "TP-FSDP-full": (dict(tensor=2, shard=2), ALL_GATHER, FULL),
    "FSDP-uneven": (dict(shard=3), ALL_GATHER, {}),
    "FSDP-selective": (dict(shard=2), ALL_GATHER, SELECTIVE),
    "HSDP-gathered": (dict(replicate=2, shard=2), ALL_GATHER, {}),
    "CP-TP-gathered": (dict(context=2, tensor=2), ALL_GATHER, {}),
    "CP-FSDP-compiled": (dict(context=2, shard=2), FLOAT8, COMPILED | FULL),
    "TP-some": (dict(tensor=2), FLOAT8 | dict(layers=("wq", "feed_forward")), {}),
    "TP-mx": (dict(tensor=2), FLOAT8 | dict(scaling="mxfp8", skip=("wk", "wv")), {}),
    "FSDP-rows": (dict(shard=2), FLOAT8 | dict(scaling="rowwise"), {}),
    "FSDP-gw": (dict(shard=2), FLOAT8 | dict(scaling="rowwise_with_gw_hp"), COMPILED),
    "TP-head": (dict(tensor=2), FLOAT8 | dict(head=True), {}),
}
# Those that are in every run; in the second tier all others, and of GPT, which has other matrices and the same modules, some.
QUICK = {("llama", name) for name in ("one-gathered", "FSDP-gathered", "TP", "CP")}
OF_GPT = ("FSDP-gathered", "TP", "CP-TP-gathered", "TP-FSDP-compiled")


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, id=f"{model}-{way}", marks=[] if (model, way) in QUICK else [slow])
        for model, ways in (("llama", WAYS), ("gpt", OF_GPT))
        for way in ways
    ],
)
def test_every_layout_rounds_as_one_process_does(ranks: Ranks, tmp_path: Path, model: str, way: str) -> None:
    layout, float8, sections = WAYS[way]
    alone, shared = (
        recipe_for(tmp_path, name, where, how, model=model, **what)
        for name, where, how, what in (("a", {}, float8 | dict(all_gather=False), {}), ("b", layout, float8, sections))
    )
    expected = ranks(1).run(_gradients, alone, 3)[0]
    found = [
        apart(made, one)
        for rank in ranks(math.prod(layout.values())).run(_gradients, shared, 3)
        for made, one in zip(rank, expected, strict=True)
    ]
    # A sum that differs in its last digit may be rounded to the other side. That is rare, and it is not much.
    assert sorted(found)[len(found) // 2] < 1e-4 and max(found) < 0.05, found


@slow
def test_a_rank_may_have_nothing_of_a_weight(ranks: Ranks, tmp_path: Path) -> None:
    """Four rows over three ranks: two, two and none."""
    shape = LlamaConfig(dim=64, num_layers=1, num_heads=16, num_kv_heads=1, ffn_dim=128, vocab_size=320)
    alone, shared = (
        dataclasses.replace(recipe_for(tmp_path, "a", layout, ALL_GATHER), model=shape)
        for layout in ({}, dict(shard=3))
    )
    (expected,) = ranks(1).run(_gradients, alone)[0]
    assert expected["layers.0.attention.wk.weight"].shape[0] == 4
    for (found,) in ranks(3).run(_gradients, shared):
        assert apart(found, expected) < 0.05


@slow
@pytest.mark.parametrize("model", MODELS)
def test_scales_by_rows_are_found_where_the_rows_are(ranks: Ranks, tmp_path: Path, model: str) -> None:
    """Under tensor parallelism a rank has a part of some rows: its scale may be finer, and a power of two all the same."""
    float8 = FLOAT8 | dict(scaling="rowwise")
    (expected,) = ranks(1).run(_gradients, recipe_for(tmp_path, "a", {}, float8, model=model))[0]
    (exact,) = ranks(1).run(_gradients, recipe_for(tmp_path, "b", {}, {}, model=model))[0]
    for (found,) in ranks(2).run(_gradients, recipe_for(tmp_path, "c", dict(tensor=2), float8, model=model)):
        assert apart(found, expected) < apart(expected, exact)


@pytest.mark.parametrize(
    ("layout", "float8"),
    [
        pytest.param(dict(tensor=2, shard=2), ALL_GATHER, id="TP-FSDP", marks=slow),
        pytest.param(dict(pipeline=2, shard=2), ALL_GATHER, id="PP-FSDP", marks=slow),
        pytest.param(
            dict(pipeline=2, pipeline_schedule="zbv", tensor=2), ALL_GATHER, id="PPzbv-TP", marks=pytest.mark.every
        ),
    ],
)
def test_a_run_is_that_of_one_process_and_resumes_bit_for_bit(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any], float8: dict[str, Any]
) -> None:
    options: dict[str, Any] = dict(training=dict(steps=4), checkpoint=dict(interval=2), layers=4)
    alone = train(ranks(1), recipe_for(tmp_path, "one", {}, FLOAT8, **options))
    recipe = recipe_for(tmp_path, "run", layout, float8, **options)
    found = train(ranks(4), recipe)
    assert_same(found, alone, loss=1e-4, norm=2e-3, weights=0.1)
    assert found.state["model"].keys() == alone.state["model"].keys()
    assert found.state["optimizer"].keys() == alone.state["optimizer"].keys()
    for _ in range(2):
        drop_last(tmp_path / "run")
        again = train(ranks(4), recipe)
        assert (again.losses, again.gradient_norms, again.validation) == (
            found.losses, found.gradient_norms, found.validation,
        )  # fmt: skip
        for kind, tensors in found.state.items():
            for name, value in tensors.items():
                assert torch.equal(value, again.state[kind][name]), name


@slow
def test_what_float8_saves_any_layout_loads(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(training=dict(steps=2), checkpoint=dict(interval=2))
    saver = recipe_for(tmp_path, "run", dict(tensor=2, shard=2), ALL_GATHER, **options)
    saved = train(ranks(4), saver).state
    for name, processes, layout, float8 in (
        ("plain", 1, {}, {}), ("sharded", 2, dict(shard=2), {}), ("piped", 2, dict(pipeline=2), ALL_GATHER),
    ):  # fmt: skip
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        loader = dataclasses.replace(recipe_for(tmp_path, name, layout, float8, **options), run=saver.run)
        ranks(processes).run(load_and_save_elsewhere, loader, tmp_path / name / "checkpoints")
        moved = read_whole(tmp_path / name / "checkpoints" / "step-00000002")
        for kind, tensors in saved.items():
            assert moved[kind].keys() == tensors.keys()
            for key, value in tensors.items():
                assert type(value) is Tensor and torch.equal(value, moved[kind][key]), key


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank hands to gathers, by the kind of number."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "all_gather" in name or "allgather" in name:
            sent = args[1] if "_allgather_base_" in name else args[0]
            if name.startswith(("c10d", "_c10d")):
                self.bytes[sent.dtype] = self.bytes.get(sent.dtype, 0) + sent.numel() * sent.element_size()
        return func(*args, **(kwargs or {}))


def _sent(recipe: PretrainRecipe, backward: bool) -> dict[torch.dtype, int]:
    model, _ = build(recipe)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with torch.no_grad():
        model(tokens=tokens)  # scales are found, groups are made
    with torch.set_grad_enabled(backward), Sent() as sent:
        logits = model(tokens=tokens)
    if backward:
        with Sent() as sent:
            logits.float().sum().backward()
    return sent.bytes


def test_fsdp_gathers_one_byte_a_number(ranks: Ranks, tmp_path: Path) -> None:
    shape = MODELS["llama"]
    matrices = sum(outputs * inputs for outputs, inputs in shape.matrices().values()) - shape.vocab_size * shape.dim
    others = shape.num_parameters() - matrices
    bf16: dict[str, Any] = dict(training=dict(compute_dtype="bfloat16"))
    layout = dict(shard=2, reshard_after_forward="always")
    for sent in ranks(2).run(_sent, recipe_for(tmp_path, "a", layout, FLOAT8, **bf16), False):
        assert sent == {torch.bfloat16: 2 * (matrices + others) // 2}
    for sent in ranks(2).run(_sent, recipe_for(tmp_path, "b", layout, ALL_GATHER, **bf16), False):
        assert sum(sent.values()) == (matrices + 2 * others) // 2  # a rank sends its half
        assert sent[torch.uint8] >= matrices // 2


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_tensor_parallelism_gathers_one_byte_a_number(ranks: Ranks, tmp_path: Path, backward: bool) -> None:
    """Forward in front of attention and feed-forward, backward behind both. The head is bfloat16, and its own."""
    shape, bf16 = MODELS["llama"], dict(compute_dtype="bfloat16")
    tokens = 2 * 32 // 2 * shape.dim  # of the stream, which a rank has and sends
    for sent in ranks(2).run(_sent, recipe_for(tmp_path, "a", dict(tensor=2), FLOAT8, training=bf16), backward):
        assert sent[torch.uint8] == 2 * shape.num_layers * tokens
        # The embedding's gradient is gathered as the head's tokens are.
        assert sent == {torch.uint8: 2 * shape.num_layers * tokens, torch.bfloat16: 2 * tokens}


def _graphs(recipe: PretrainRecipe) -> tuple[int, int]:
    torch._dynamo.reset()
    counters.clear()
    model, _ = build(recipe)
    for _ in range(2):
        model(tokens=torch.zeros(2, 32, dtype=torch.long)).float().sum().backward()
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize(
    ("layout", "float8"),
    [
        pytest.param(dict(shard=2), ALL_GATHER, id="FSDP"),
        pytest.param(dict(tensor=2), FLOAT8, id="TP", marks=slow),
    ],
)
def test_one_compiled_block_serves_all(
    ranks: Ranks, tmp_path: Path, layout: dict[str, int], float8: dict[str, Any]
) -> None:
    assert ranks(2).run(_graphs, recipe_for(tmp_path, "a", layout, float8, **COMPILED)) == [(1, 0)] * 2


def _scales_after_steps(recipe: PretrainRecipe) -> list[float]:
    """How far each scale that was gathered with is from the one of the weight as it is, after each of some steps."""
    model, _ = build(recipe)
    optimizer = build_optimizer(model, recipe.optimizer)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    weights: list[Any] = [p for p in model.parameters() if isinstance(getattr(p, "_local_tensor", None), Shard)]

    def worst() -> float:
        with torch.no_grad():
            model(tokens=tokens)
        found = 0.0
        for weight in weights:
            shard: Any = weight._local_tensor
            largest = DTensor(shard.stored, weight._spec, requires_grad=False).full_tensor().abs().max().double()
            found = max(found, abs(float(shard.scaling.scale / (448.0 / largest)) - 1.0))
        return found

    results = [worst()]
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        results.append(worst())
    state = get_model_state_dict(model)
    set_model_state_dict(model, {name: value * 2.0 for name, value in state.items()})
    return [*results, worst()]


@pytest.mark.parametrize(
    ("layout", "state"), [(dict(shard=2), "full"), (dict(shard=2), "8bit"), (dict(pipeline=2), "full")], ids=str
)
def test_a_scale_is_never_stale(ranks: Ranks, tmp_path: Path, layout: dict[str, Any], state: str) -> None:
    layout = layout | dict(reshard_after_forward="always")
    recipe = recipe_for(tmp_path, "a", layout, ALL_GATHER, optimizer=dict(lr=0.3, state_dtype=state))
    for found in ranks(2).run(_scales_after_steps, recipe):
        assert len(found) == 4 and max(found) < 1e-6, found
