"""A resume is exact to the bit under every kind of layout, and another layout loads the values that one has saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import assert_equal_state, assert_identical, drop_last, reshard
from tests.layouts import stream_of, training_batches
from tests.parity import ALL_GATHER, DEFAULT, EVERY, MUON, SLOW, parallelism_of, rows_of
from tests.pool import Ranks
from tests.training import GPT_, LLAMA, SHARED_EXPERTS, assert_same, result, tiny, train, world_size
from titanlike.models.llama.config import LlamaConfig

FOUR = replace(LLAMA, num_layers=4)
DROPOUT = replace(GPT_, num_layers=4, dropout=0.1)
ZBV_TP = dict(pipeline=2, pipeline_schedule="zbv", tensor=2)
TP_FSDP = dict(tensor=2, shard=2)
EP_TP = dict(shard=2, tensor=2, expert=2)
# On each rank, whole blocks of 8-bit states.
WIDE = LlamaConfig(dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=256, vocab_size=320)
EIGHT_BIT: dict[str, Any] = dict(
    training=dict(master_dtype="bfloat16"), optimizer=dict(state_dtype="8bit", stochastic_rounding=True)
)
FLOAT8: dict[str, Any] = dict(float8=ALL_GATHER)
MUON_LAYERS: dict[str, Any] = dict(optimizer=MUON)
EXPERTS = replace(SHARED_EXPERTS, dim=128, ffn_dim=128)

RESUMED: dict[str, tuple[Any, ...]] = {
    "one process": (DEFAULT, LLAMA, {}, {}),
    "PP x FSDP, dropout": (DEFAULT, DROPOUT, dict(pipeline=2, shard=2), {}),
    "PP zbv x TP, dropout": (SLOW, DROPOUT, ZBV_TP, {}),
    "FSDP, 8-bit": (DEFAULT, WIDE, dict(shard=2), EIGHT_BIT),
    "TP x FSDP, 8-bit": (SLOW, WIDE, TP_FSDP, EIGHT_BIT),
    "TP x FSDP, float8": (SLOW, replace(WIDE, dim=64), TP_FSDP, FLOAT8),
    "PP zbv x TP, float8": (EVERY, replace(WIDE, num_layers=4), ZBV_TP, FLOAT8),
    "TP x FSDP, Muon": (SLOW, FOUR, TP_FSDP, MUON_LAYERS),
    "EP x TP": (SLOW, SHARED_EXPERTS, EP_TP, {}),
}


@pytest.mark.parametrize(("model", "layout", "sections"), rows_of(RESUMED))
def test_a_resumed_run_is_bit_exact(
    ranks: Ranks, tmp_path: Path, model: Any, layout: dict[str, Any], sections: dict[str, Any]
) -> None:
    training = dict(steps=4, local_batch_size=2) | sections.get("training", {})
    recipe = tiny(
        tmp_path, "run", model=model, parallelism=parallelism_of(layout), checkpoint=dict(interval=2),
        **{"validation": dict(interval=2)} | sections | {"training": training},
    )  # fmt: skip
    pool = ranks(world_size(recipe))
    expected = train(pool, recipe)
    for _ in range(2 if layout == {} else 1):  # a second resume, from a checkpoint of a resumed run
        drop_last(tmp_path / "run")
        assert_identical(train(pool, recipe), expected)


@pytest.mark.parametrize("layout", [dict(shard=4), pytest.param(ZBV_TP, marks=pytest.mark.slow)], ids=str)
def test_a_stream_resumes_bit_for_bit_and_on_another_layout_with_the_same_text(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any]
) -> None:
    options: dict[str, Any] = dict(
        model=FOUR, data=stream_of(tmp_path), training=dict(steps=4), checkpoint=dict(interval=2)
    )
    recipe = tiny(tmp_path, "run", parallelism=parallelism_of(layout), **options)
    uninterrupted = train(ranks(4), recipe)
    expected = ranks(1).run(training_batches, tiny(tmp_path, "single", **options))[0]
    drop_last(tmp_path / "run")
    assert_identical(train(ranks(4), recipe), uninterrupted)
    drop_last(tmp_path / "run")
    single = tiny(tmp_path, "run", **options)
    batches = ranks(1).run(training_batches, single)[0]
    assert len(batches) == 2
    for actual, wanted in zip(batches, expected[2:], strict=True):
        assert torch.equal(actual["tokens"], wanted["tokens"])
    assert result(single).losses == pytest.approx(uninterrupted.losses, rel=1e-5)


# The tier, the model, the layout that saves, those that load, other sections, and those of the layout that saves.
MOVED: dict[str, tuple[Any, ...]] = {
    "FSDP": (DEFAULT, FOUR, dict(shard=2), [{}, dict(pipeline=2, pipeline_schedule="zbv")], {}, {}),
    "TP x FSDP, tied": (SLOW, replace(GPT_, num_layers=4), TP_FSDP, [ZBV_TP, {}], {}, {}),
    "PP zbv x TP": (SLOW, FOUR, ZBV_TP, [dict(context=2, shard=2), dict(replicate=2, shard=2), {}], {}, {}),
    "TP x FSDP, 8-bit": (SLOW, WIDE, TP_FSDP, [{}, dict(pipeline=2)], EIGHT_BIT, {}),
    "TP x FSDP, float8": (SLOW, WIDE, TP_FSDP, [{}, dict(pipeline=2)], {}, FLOAT8),
    "EP x TP": (SLOW, EXPERTS, EP_TP, [dict(shard=4, expert=4), TP_FSDP, {}], {}, {}),
    "EP, Muon": (SLOW, EXPERTS, dict(shard=4, expert=4), [dict(replicate=2, shard=2, expert=2), {}], MUON_LAYERS, {}),
}


@pytest.mark.parametrize(("model", "layout", "loaders", "sections", "saver"), rows_of(MOVED))
def test_other_layouts_load_the_same_values(
    ranks: Ranks, tmp_path: Path, model: Any, layout: dict[str, Any], loaders: list[Any], sections: Any, saver: Any
) -> None:
    """Loading and saving without a step in between preserves every weight and every moment."""
    training = dict(steps=2) | sections.get("training", {})
    options = {"model": model} | sections | {"training": training}
    recipe = tiny(tmp_path, "run", parallelism=parallelism_of(layout), **options | saver)
    saved = train(ranks(world_size(recipe)), recipe).state
    for number, loader in enumerate(loaders):
        other = tiny(tmp_path, "run", parallelism=parallelism_of(loader), **options)
        moved = reshard(ranks(world_size(other)), recipe, other, tmp_path / str(number))
        assert_equal_state(moved, saved)


@pytest.mark.parametrize(
    ("layout", "moved", "optimizer"),
    [
        pytest.param(dict(shard=2), {}, {}, id="FSDP to one process"),
        pytest.param(TP_FSDP, dict(pipeline=2, shard=2), MUON, id="Muon", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_under_another_layout(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any], moved: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """It reads the same data, and agrees up to rounding."""
    training = dict(steps=4, local_batch_size=2)
    options: dict[str, Any] = dict(model=FOUR, training=training, checkpoint=dict(interval=2), optimizer=optimizer)
    first, second = (tiny(tmp_path, "run", parallelism=parallelism_of(each), **options) for each in (layout, moved))
    expected = train(ranks(world_size(first)), first)
    drop_last(tmp_path / "run")
    assert_same(train(ranks(world_size(second)), second), expected, weights=1e-3 if optimizer else 1e-4)
