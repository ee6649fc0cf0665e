"""What every layout has in common with one process beside its numbers: first weights, data, the sample, checkpoints."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes import pretrain
from tests.distributed.test_checkpoint import drop_last, load_and_save_elsewhere
from tests.distributed.test_parity import model_of
from tests.pool import Pool
from tests.training import MODELS, assert_same, build, result, tiny, train, train_here, whole
from titanlike.checkpoint import read_whole
from titanlike.config import PretrainRecipe
from titanlike.config.sections import Parallelism, Sample
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.text.tokenizer import build_tokenizer
from titanlike.generate import generate

Ranks = Callable[[int], Pool]

# Four processes each.
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": dict(shard=4),
    "HSDP": dict(replicate=2, shard=2),
    "TP-FSDP": dict(tensor=2, shard=2),
    "CP-FSDP": dict(context=2, shard=2),
    "PP-FSDP": dict(pipeline=2, shard=2),
    "PPzbv-TP": dict(pipeline=2, pipeline_schedule="zbv", tensor=2),
}


def recipe_for(folder: Path, name: str, model: str, layout: str | None, **sections: Any) -> PretrainRecipe:
    parallelism = Parallelism(**LAYOUTS[layout]) if layout else Parallelism()
    return tiny(folder, name, model=model_of(model, sections.pop("dropout", 0.0)), parallelism=parallelism, **sections)


def _first_weights(recipe: PretrainRecipe) -> dict[str, Tensor]:
    model, _ = build(recipe)
    copies = getattr(model, "copies", {})
    return {copies.get(name, name): whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_weights_are_those_of_one_process(ranks: Ranks, tmp_path: Path, layout: str, model: str) -> None:
    alone = ranks(1).run(_first_weights, recipe_for(tmp_path, "one", model, None))[0]
    seen = set()
    for weights in ranks(4).run(_first_weights, recipe_for(tmp_path, "four", model, layout)):
        for name, value in weights.items():
            assert torch.equal(value, alone[name]), name
        seen |= weights.keys()
    assert seen == alone.keys()


def _batches_seen(recipe: PretrainRecipe) -> list[dict[str, Tensor]]:
    """What this rank trains on in each step, with the place of each token: its sequence in the batch, its position."""
    seen = []
    original = pretrain.forward_backward

    def watched(model: Any, microbatches: Any, mesh: Any) -> Any:
        step = {name: torch.cat([batch.inputs[name] for batch in microbatches]) for name in microbatches[0].inputs}
        step["labels"] = torch.cat([batch.labels for batch in microbatches])
        first = mesh.data_rank * step["labels"].shape[0]
        seen.append(step | {"sequence": torch.arange(first, first + step["labels"].shape[0])})
        return original(model, microbatches, mesh)

    pretrain.forward_backward = watched
    try:
        train_here(recipe)
    finally:
        pretrain.forward_backward = original
    return seen


@pytest.mark.parametrize("layout", ["HSDP", "CP-FSDP", pytest.param("PPzbv-TP", marks=pytest.mark.slow)])
def test_every_token_is_read_in_the_order_of_one_process(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    options: dict[str, Any] = dict(
        training=dict(steps=3), checkpoint=dict(enabled=False), validation=dict(interval=0), dropout=0.1
    )
    alone = ranks(1).run(_batches_seen, recipe_for(tmp_path, "one", "llama", None, **options))[0]
    found = ranks(4).run(_batches_seen, recipe_for(tmp_path, "four", "llama", layout, **options))
    for step, everything in enumerate(alone):
        covered = torch.zeros_like(everything["tokens"], dtype=torch.bool)
        for rank in found:
            mine = rank[step]
            places = mine["sequence"][:, None], mine["position_ids"]
            for name in ("tokens", "labels", "dropout_bits"):
                assert torch.equal(mine[name], everything[name][places])
            covered[places] = True
        assert covered.all()


def _noise_where(recipe: PretrainRecipe) -> tuple[bool, bool]:
    """Whether tokens come with dropout's random bits in training, and in validation."""
    found: list[bool] = []
    original = pretrain.validate

    def watched(model: Any, batches: Any, *others: Any) -> float:
        found.append("dropout_bits" in batches.microbatches(1)[0].inputs)
        return original(model, batches, *others)

    pretrain.validate = watched
    try:
        trained = "dropout_bits" in _batches_seen(recipe)[0]
    finally:
        pretrain.validate = original
    return trained, found[0]


def test_nothing_is_dropped_in_validation(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(_noise_where, recipe_for(tmp_path, "run", "llama", None, dropout=0.1)) == [(True, False)]
    assert ranks(1).run(_noise_where, recipe_for(tmp_path, "none", "llama", None)) == [(False, False)]


def _sample(recipe: PretrainRecipe) -> str:
    model, mesh = build(recipe)
    tokenizer = build_tokenizer(TokenizerSection())
    return generate(
        # Longer than the window, which is no multiple of what the layouts want.
        model,
        mesh,
        tokenizer,
        Sample(tokens=8, prompt="def ", temperature=0.7),
        context_length=7,
        seed=0,
    )


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_every_layout_writes_the_sample_of_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    alone = ranks(1).run(_sample, recipe_for(tmp_path, "one", model, None))[0]
    for layout in LAYOUTS:
        assert ranks(4).run(_sample, recipe_for(tmp_path, layout, model, layout)) == [alone] * 4, layout


@pytest.mark.parametrize(
    "model", [pytest.param("llama", marks=pytest.mark.slow), pytest.param("gpt", marks=pytest.mark.every)]
)
def test_what_one_layout_saves_others_load(ranks: Ranks, tmp_path: Path, model: str) -> None:
    options: dict[str, Any] = dict(training=dict(steps=2), checkpoint=dict(interval=1))
    recipes = {layout: recipe_for(tmp_path, layout, model, layout, **options) for layout in LAYOUTS}
    recipes["alone"] = recipe_for(tmp_path, "alone", model, None, **options)
    pools = {layout: ranks(1 if layout == "alone" else 4) for layout in recipes}
    order = list(recipes)
    for index, (saver, recipe) in enumerate(recipes.items()):
        saved = train(pools[saver], recipe).state
        assert {name for name in saved["optimizer"]} == {
            f"{name}.{kind}" for name in saved["model"] for kind in ("exp_avg", "exp_avg_sq", "step")
        }
        # Each reads what two others wrote, each is read by two others and by one process.
        for loader in {"alone", *(order[(index + step) % len(order)] for step in (1, 3))} - {saver}:
            there = tmp_path / f"{saver} to {loader}" / "checkpoints"
            there.mkdir(parents=True)
            as_saved = dataclasses.replace(recipes[loader], run=recipe.run)
            pools[loader].run(load_and_save_elsewhere, as_saved, there)
            moved = read_whole(there / "step-00000002")
            assert moved.keys() == saved.keys()
            for kind, tensors in saved.items():
                assert moved[kind].keys() == tensors.keys()
                for name, value in tensors.items():
                    assert torch.equal(value, moved[kind][name]), f"{saver} to {loader}: {name}"


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        pytest.param("TP-FSDP", "PPzbv-TP", marks=pytest.mark.every),
        pytest.param("PPzbv-TP", "CP-FSDP", marks=pytest.mark.slow),
    ],
)
def test_another_layout_trains_on(ranks: Ranks, tmp_path: Path, saver: str, loader: str) -> None:
    options: dict[str, Any] = dict(training=dict(steps=6), checkpoint=dict(interval=3))
    whole = train(ranks(4), recipe_for(tmp_path, "run", "gpt", saver, **options))
    drop_last(tmp_path / "run")
    assert_same(train(ranks(4), recipe_for(tmp_path, "run", "gpt", loader, **options)), whole)


FLOAT8: dict[str, Any] = dict(scaling="tensorwise", skip_small=False, emulate=True)


@pytest.mark.parametrize(
    ("layout", "float8"),
    [
        pytest.param("PP-FSDP", {}, id="PP-FSDP"),
        *(pytest.param(name, {}, id=name, marks=pytest.mark.slow) for name in ("CP-FSDP", "PPzbv-TP")),
        *(
            pytest.param(name, FLOAT8, id=f"{name}-float8", marks=pytest.mark.slow)
            for name in ("FSDP", "HSDP", "TP-FSDP", "PP-FSDP")
        ),
    ],
)
def test_a_resumed_run_is_the_run_bit_for_bit(
    ranks: Ranks, tmp_path: Path, layout: str, float8: dict[str, Any]
) -> None:
    """With dropout, and while the checkpoint that it is resumed from was being written beside the next steps."""
    recipe = recipe_for(
        tmp_path, "run", "gpt", layout, training=dict(steps=4), checkpoint=dict(interval=2), dropout=0.1, float8=float8
    )
    whole = train(ranks(4), recipe)
    for _ in range(2):  # the second resume is where others break
        drop_last(tmp_path / "run")
        again = train(ranks(4), recipe)
        assert again.losses == whole.losses
        assert again.gradient_norms == whole.gradient_norms
        for kind, tensors in whole.state.items():
            for name, value in tensors.items():
                assert torch.equal(value, again.state[kind][name]), name
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert result(recipe).losses == whole.losses


def _copies_agree(recipe: PretrainRecipe) -> list[tuple[str, Tensor]]:
    """Names and values of this rank's ends after a few steps, the copy of a tied weight by its own name."""
    kept: list[Any] = []
    original = pretrain.build_optimizer

    def watched(model: Any, *others: Any) -> Any:
        kept.append(model)
        return original(model, *others)

    pretrain.build_optimizer = watched
    try:
        train_here(recipe)
    finally:
        pretrain.build_optimizer = original
    ends = [(name, p) for name, p in kept[0].named_parameters() if name in ("tok_embeddings.weight", "output.weight")]
    return [(name, whole(p)) for name, p in ends]


ROUNDED: dict[str, Any] = dict(training=dict(master_dtype="bfloat16"), optimizer=dict(stochastic_rounding=True))


@pytest.mark.parametrize(("schedule", "sections"), [("1f1b", {}), ("zbv", {}), ("1f1b", ROUNDED)], ids=str)
def test_a_tied_head_stays_equal_to_its_embedding(
    ranks: Ranks, tmp_path: Path, schedule: str, sections: dict[str, Any]
) -> None:
    layout = Parallelism(pipeline=2, pipeline_schedule=schedule)
    recipe = tiny(tmp_path, "run", model=model_of("gpt"), parallelism=layout, **sections)
    found = [end for rank in ranks(2).run(_copies_agree, recipe) for end in rank]
    assert sorted(name for name, _ in found) == ["output.weight", "tok_embeddings.weight"]
    assert torch.equal(found[0][1], found[1][1])
