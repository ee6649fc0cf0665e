"""Compilation, activation checkpointing and mixed precision: parity with a plain run, and their effect."""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.parity import COMPILED, FAST, Parity
from tests.pool import Ranks
from tests.training import LLAMA, MODELS, Observer, Operations, build, tiny, train, train_on_rank
from titanlike.config.sections import ActivationCheckpoint, Compile, Training
from titanlike.models.common.init import initialize
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.compile import apply_compile
from titanlike.recipe import PretrainRecipe
from titanlike.run import loop


def two_steps(folder: Path, **sections: Any) -> PretrainRecipe:
    return tiny(folder, "run", **sections | {"training": dict(steps=2) | sections.get("training", {})})


@pytest.mark.parametrize(("mode", "model"), [("selective", "llama"), ("full", "gpt")])
def test_activation_checkpointing_does_not_change_results(
    parity: Parity, tmp_path: Path, model: str, mode: Any
) -> None:
    recomputing = dict(activation_checkpoint=ActivationCheckpoint(mode=mode), parallelism=dict(shard=2))
    parity(two_steps(tmp_path, model=MODELS[model], **recomputing))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [dict(mode="selective"), dict(mode="memory_budget", memory_budget=0.2), dict(mode="full")], ids=str
)
def test_compiled_checkpointing_does_not_change_results(
    ranks: Ranks, parity: Parity, tmp_path: Path, options: dict[str, Any]
) -> None:
    recomputing = COMPILED | dict(activation_checkpoint=ActivationCheckpoint(**options))
    try:
        parity(two_steps(tmp_path, parallelism=dict(shard=2, reshard_after_forward="always"), **recomputing))
    finally:
        ranks(2).run(_reset_memory_budget)


def _reset_memory_budget() -> None:
    torch._functorch.config.activation_memory_budget = 1.0
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_does_not_change_results(parity: Parity, tmp_path: Path) -> None:
    layout = dict(compile=Compile(backend="inductor"), parallelism=dict(shard=1, tensor=2))
    parity(two_steps(tmp_path, training=dict(local_batch_size=4), **layout))


def test_bfloat16_stays_near_float32(ranks: Ranks, parity: Parity, tmp_path: Path) -> None:
    found = train(ranks(1), two_steps(tmp_path, training=dict(compute_dtype="bfloat16")))
    plain = parity.one_process(two_steps(tmp_path))
    # 8 bits of mantissa: an error of 0.4% per operation, less in the mean over tokens
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(plain.losses), rtol=5e-3, atol=0)
    assert found.losses != plain.losses


@pytest.mark.parametrize(
    ("compute", "master"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_dtypes_of_compute_weights_and_gradients(ranks: Ranks, compute: Any, master: Any) -> None:
    found = ranks(1).run(_dtypes, Training(compute_dtype=compute, master_dtype=master))[0]
    assert found == {"matmul": f"torch.{compute}", "weight": f"torch.{master}", "gradient": f"torch.{master}"}


def _dtypes(training: Training) -> dict[str, str]:
    model, _ = build(tiny(Path(), "", training=training))
    dtypes = set()

    def observe(func: Any, args: Any, result: Any) -> None:
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            dtypes.add(result.dtype)

    with Observer(observe):
        model(torch.zeros(1, 8, dtype=torch.long)).float().sum().backward()
    weight = model.get_parameter("layers.0.feed_forward.w1.weight")
    assert weight.grad is not None
    (dtype,) = dtypes
    return {"matmul": str(dtype), "weight": str(weight.dtype), "gradient": str(weight.grad.dtype)}


def operations_of(counts: Counter[str]) -> tuple[int, int]:
    """Returns the numbers of matmuls and of calls of attention."""
    prefix = "_scaled_dot_product"
    attentions = [n for name, n in counts.items() if name.startswith(prefix) and not name.endswith("backward")]
    return counts["mm"] + counts["addmm"], sum(attentions)


@pytest.mark.parametrize(
    ("options", "matmuls", "attentions"),
    [
        # Each of 3 Llama blocks has 7 matmuls, of which the last is not needed for gradients, and 1 attention.
        (dict(mode="none"), 0, 0),
        (dict(mode="full"), 18, 3),
        (dict(mode="selective"), 9, 0),  # a block saves 4 of its 7 matmuls, and the attention
    ],
    ids=lambda value: value["mode"] if isinstance(value, dict) else "",
)
def test_number_of_recomputed_operations(options: dict[str, Any], matmuls: int, attentions: int) -> None:
    with torch.device("meta"):
        model = build_model(LLAMA)
    initialize(model, torch.device("cpu"), 0)
    names = list(model.state_dict())
    apply_activation_checkpoint(blocks(model), **options)
    with Operations() as forward:
        loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
    with Operations() as backward:
        loss.backward()
    assert operations_of(forward.counts)[0] == 22  # with the head
    assert operations_of(backward.counts) == (2 * 22 + matmuls, attentions)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("model", MODELS)
def test_all_blocks_share_one_compiled_graph(model: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    with torch.device("meta"):
        built = build_model(MODELS[model])
    initialize(built, torch.device("cpu"), 0)
    names = list(built.state_dict())
    apply_compile(blocks(built), backend=FAST)
    for _ in range(3):
        built(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert list(built.state_dict()) == names


def _collections(recipe: PretrainRecipe, interval: int) -> tuple[list[int], int]:
    """Returns the generations that the recipe collects, and the number of automatic collections after the first of them."""
    default, loop.COLLECTION_INTERVAL = loop.COLLECTION_INTERVAL, interval
    explicit: list[int] = []
    collections: list[int] = []
    before: list[int] = []
    collect = gc.collect

    def patched(generation: int = 2) -> int:
        explicit.append(generation)
        before.append(len(collections))
        return collect(generation)

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.collect = patched  # type: ignore[assignment]
    gc.callbacks.append(callback)
    try:
        train_on_rank(recipe)
    finally:
        gc.callbacks.remove(callback)
        gc.collect = collect
        loop.COLLECTION_INTERVAL = default
    return explicit, len(collections) - before[0] - len(explicit)


def test_garbage_collection_runs_only_at_the_interval(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(checkpoint=dict(enabled=False), validation=dict(interval=0))
    for interval, times in ((1, 7), (2, 4), (8, 1)):  # a full collection after the first step, generation 1 later
        recipe = tiny(tmp_path, f"every{interval}", training=dict(steps=8), **options)
        assert ranks(1).run(_collections, recipe, interval) == [([2] + [1] * times, 0)]


@pytest.mark.slow
def test_a_smaller_memory_budget_saves_less() -> None:
    def saved_bytes(budget: float) -> int:
        torch._dynamo.reset()
        with torch.device("meta"):
            model = build_model(LLAMA)
        initialize(model, torch.device("cpu"), 0)
        apply_activation_checkpoint(blocks(model), mode="memory_budget", memory_budget=budget)
        apply_compile(blocks(model), backend=FAST)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(torch.zeros(2, 32, dtype=torch.long))
        return sum(sizes)

    try:
        full, half, none = saved_bytes(1.0), saved_bytes(0.5), saved_bytes(0.0)
    finally:
        _reset_memory_budget()
    assert none < half < full
