"""Preference optimization under every layout equals one process, whatever provides the log-probabilities of the reference model."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import assert_equal_state
from tests.launching import recorded, records
from tests.parity import (
    ALL_GATHER,
    COMPILED,
    DEFAULT,
    EVERY,
    FULL,
    LORA,
    SELECTIVE,
    SLOW,
    Parity,
    Row,
    parallelism_of,
    rows_of,
)
from tests.pool import Ranks
from tests.preferences import preference_recipe
from tests.training import GEMMA2, GPT_, LLAMA, QWEN3, QWEN3_MOE, largest_logits, train, train_on_rank
from titanlike.config.sections import Parallelism

MODELS: dict[str, Any] = {
    "llama": LLAMA,
    "gpt": GPT_,
    "tied": QWEN3,
    "soft-capped": GEMMA2,
    "experts": dataclasses.replace(QWEN3_MOE, balance_loss=0.0, balance_bias_rate=0.01),
}
IPO: dict[str, Any] = {"preference": dict(loss="ipo")}
SIMPO: dict[str, Any] = {"preference": dict(loss="simpo", beta=2.0)}
SECOND_MODEL: dict[str, Any] = {"preference": dict(reference="model")}
PRECOMPUTED: dict[str, Any] = {"preference": dict(reference="precomputed")}

CASES: dict[str, Row] = {
    "2 micro-batches": (SLOW, "llama", {}, 4, {}),
    "HSDP": (EVERY, "gpt", dict(replicate=2, shard=2), 1, {}),
    "TP, tied head": (SLOW, "tied", dict(tensor=2), 4, {}),
    "TP, soft-capped logits": (EVERY, "soft-capped", dict(tensor=2), 4, {}),
    "CP x TP": (DEFAULT, "gpt", dict(context=2, tensor=2), 4, {}),
    "EP": (SLOW, "experts", dict(shard=2, expert=2), 2, {}),
    "EP x CP": (EVERY, "experts", dict(context=2, expert=2), 4, {}),
    "TP x FSDP, LoRA": (DEFAULT, "llama", dict(tensor=2, shard=2), 2, LORA),
    "CP x FSDP, LoRA, second model": (EVERY, "gpt", dict(context=2, shard=2), 2, LORA | SECOND_MODEL),
    "CP x TP, precomputed": (DEFAULT, "llama", dict(context=2, tensor=2), 4, PRECOMPUTED),
    "HSDP, LoRA, precomputed": (SLOW, "llama", dict(replicate=2, shard=2), 1, LORA | PRECOMPUTED),
    "CP x FSDP, IPO": (SLOW, "llama", dict(context=2, shard=2), 2, IPO),
    "TP x FSDP, SimPO": (SLOW, "gpt", dict(tensor=2, shard=2), 2, SIMPO),
    "TP, compiled, selective": (SLOW, "llama", dict(tensor=2), 4, COMPILED | SELECTIVE),
    "FSDP, LoRA, compiled, full": (EVERY, "llama", dict(shard=2), 2, LORA | COMPILED | FULL),
}


@pytest.mark.parametrize(("model", "layout", "local", "sections"), rows_of(CASES))
def test_a_layout_matches_one_process(
    parity: Parity, tmp_path: Path, model: str, layout: dict[str, Any], local: int, sections: dict[str, Any]
) -> None:
    sections = sections | {"parallelism": parallelism_of(layout), "training": dict(local_batch_size=local)}
    parity(preference_recipe(parity.folder, tmp_path.name, model=MODELS[model], **sections))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    # Of a second model, whose weights are in no checkpoint; of adapters, whose frozen weights are in it; and of a table.
    train(ranks(1), preference_recipe(tmp_path, "base", training=dict(steps=2), optimizer=dict(lr=3e-3)))
    initial = dict(initial=str(tmp_path / "base"))
    losses = {}
    for reference in ("model", "adapter_off", "precomputed"):
        lora = LORA if reference == "adapter_off" else {}

        def run(name: str, steps: int, lora: dict[str, Any] = lora, reference: str = reference) -> Any:
            return preference_recipe(
                tmp_path, f"{name}-{reference}", training=dict(steps=steps), preference=dict(reference=reference),
                parallelism=Parallelism(shard=2), checkpoint=initial, schedule=dict(warmup_steps=0, decay="none"), **lora,
            )  # fmt: skip

        whole = train(ranks(2), run("whole", 3))
        losses[reference] = whole.losses
        train(ranks(2), run("parts", 2))
        shutil.rmtree(tmp_path / "cache/preferences")  # the table is computed again, and not with the trained weights
        parts = train(ranks(2), run("parts", 3))
        assert_equal_state(parts.state, whole.state)
        assert parts.losses == whole.losses and parts.losses[-1] != parts.losses[-2]
        assert recorded(tmp_path / f"parts-{reference}", "kl")[-1] != 0.0
    assert losses["model"] == losses["precomputed"]


@pytest.mark.parametrize(("processes", "float8"), [(2, {}), (2, ALL_GATHER)])
def test_the_second_model_computes_as_the_initial_one(
    ranks: Ranks, tmp_path: Path, processes: int, float8: dict[str, Any]
) -> None:
    training = dict(steps=1, compute_dtype="bfloat16")
    sections: dict[str, Any] = dict(training=training, validation=dict(interval=0), float8=float8)
    for name in ("drawn", "loaded"):
        initial = dict(initial=str(tmp_path / "drawn") if name == "loaded" else "")
        train(ranks(processes), preference_recipe(tmp_path, name, checkpoint=initial, **sections))
        first = records(tmp_path / name)[0]
        assert first["kl"] == first["rewards/margins"] == 0.0 and first["logps/chosen"] < 0.0


def test_the_reference_has_no_dropout(ranks: Ranks, tmp_path: Path) -> None:
    model = dataclasses.replace(GPT_, dropout=0.1)
    found = [
        train(ranks(1), preference_recipe(tmp_path, name, model=model, preference=dict(reference=name))).losses
        for name in ("model", "precomputed")
    ]
    assert found[0] == found[1] and found[0][0] != pytest.approx(0.693147, abs=1e-4)


def test_a_resume_with_another_reference_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks(1), preference_recipe(tmp_path, "run"))
    changed = preference_recipe(tmp_path, "run", training=dict(steps=4), checkpoint=dict(initial=str(tmp_path / "run")))
    with pytest.raises(
        AssertionError, match=r'checkpoint\.initial was "", now ".*/run"\. Restore these values to resume'
    ):
        ranks(1).run(train_on_rank, changed)


def test_the_logits_of_all_tokens_never_exist(ranks: Ranks, tmp_path: Path) -> None:
    """Neither in the forward passes of both models nor in the backward pass."""
    recipe = preference_recipe(tmp_path, "run", training=dict(loss_chunk=128, local_batch_size=8, steps=1))
    largest = ranks(1).run(largest_logits, recipe)[0]
    assert largest == 128 * LLAMA.vocab_size  # of 8 x 96 tokens
