"""Properties that do not depend on the layout: initial weights, data order, samples, checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes import pretrain
from tests.layouts import LAYOUTS, recipe_for, stream_of, training_batches
from tests.pool import Ranks
from tests.training import MODELS, build, deep, full_tensor, tiny, train_on_rank
from titanlike.config.sections import Parallelism, Sample
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.evaluator import Evaluator
from titanlike.recipe import PretrainRecipe


def _initial_weights(recipe: PretrainRecipe) -> dict[str, Tensor]:
    model, _ = build(recipe)
    copies = getattr(model, "copies", {})
    return {copies.get(name, name): full_tensor(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("layout", "model"), [*zip(LAYOUTS, [*MODELS] * 3, strict=True)])
def test_initial_weights_match_one_process(ranks: Ranks, tmp_path: Path, layout: str, model: str) -> None:
    baseline = ranks(1).run(_initial_weights, recipe_for(tmp_path, "one", model, None))[0]
    names = set()
    for weights in ranks(4).run(_initial_weights, recipe_for(tmp_path, "four", model, layout)):
        for name, value in weights.items():
            assert torch.equal(value, baseline[name]), name
        names |= weights.keys()
    assert names == baseline.keys()


@pytest.mark.parametrize(
    ("layout", "source"),
    [("HSDP", "stream"), ("CP-FSDP", "synthetic"), pytest.param("PPzbv-TP", "synthetic", marks=pytest.mark.slow)],
)
def test_data_order_matches_one_process(ranks: Ranks, tmp_path: Path, layout: str, source: str) -> None:
    options: dict[str, Any] = dict(
        training=dict(steps=3), checkpoint=dict(enabled=False), validation=dict(interval=0), dropout=0.1,
        data=stream_of(tmp_path) if source == "stream" else dict(source=source),
    )  # fmt: skip
    baseline = ranks(1).run(training_batches, recipe_for(tmp_path, "one", "gpt", None, **options))[0]
    found = ranks(4).run(training_batches, recipe_for(tmp_path, "four", "gpt", layout, **options))
    for step, batch in enumerate(baseline):
        covered = torch.zeros_like(batch["tokens"], dtype=torch.bool)
        for rank in found:
            local = rank[step]
            indices = local["sequence"][:, None], local["position_ids"]
            for name in ("tokens", "labels", "dropout_bits"):
                assert torch.equal(local[name], batch[name][indices])
            covered[indices] = True
        assert covered.all()


def _sample(recipe: PretrainRecipe) -> str:
    model, mesh = build(recipe)
    tokenizer = build_tokenizer(TokenizerSection())
    sample = Sample(tokens=8, prompt="def ", temperature=0.7)
    training = dataclasses.replace(recipe.training, seq_len=7)  # does not divide by the sizes of the layouts
    evaluator = Evaluator(recipe.evaluation, sample, recipe.data, training, recipe.model, tokenizer, 0)
    return evaluator.sample_text(model, mesh)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_generated_text_matches_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    baseline = ranks(1).run(_sample, recipe_for(tmp_path, "one", model, None))[0]
    for layout in ("HSDP", "CP-FSDP", "PPzbv-TP"):
        assert ranks(4).run(_sample, recipe_for(tmp_path, layout, model, layout)) == [baseline] * 4, layout


def _tied_weights(recipe: PretrainRecipe) -> list[tuple[str, Tensor]]:
    """Returns this rank's embedding and head weights after a few steps."""
    models: list[Any] = []
    original = pretrain.build_optimizer

    def patched(model: Any, *others: Any) -> Any:
        models.append(model)
        return original(model, *others)

    pretrain.build_optimizer = patched
    try:
        train_on_rank(recipe)
    finally:
        pretrain.build_optimizer = original
    tied = [(name, p) for name, p in models[0].named_parameters() if name in ("tok_embeddings.weight", "output.weight")]
    return [(name, full_tensor(p)) for name, p in tied]


STOCHASTIC_ROUNDING: dict[str, Any] = dict(
    training=dict(master_dtype="bfloat16"), optimizer=dict(stochastic_rounding=True)
)


@pytest.mark.parametrize(("schedule", "sections"), [("zbv", {}), ("1f1b", STOCHASTIC_ROUNDING)], ids=str)
def test_a_tied_head_stays_equal_to_the_embedding(
    ranks: Ranks, tmp_path: Path, schedule: str, sections: dict[str, Any]
) -> None:
    layout = Parallelism(pipeline=2, pipeline_schedule=schedule)
    recipe = tiny(tmp_path, "run", model=deep(MODELS["gpt"]), parallelism=layout, **sections)
    found = [weight for rank in ranks(2).run(_tied_weights, recipe) for weight in rank]
    assert sorted(name for name, _ in found) == ["output.weight", "tok_embeddings.weight"]
    assert torch.equal(found[0][1], found[1][1])
