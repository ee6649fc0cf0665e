"""Distillation under every layout equals one process, for teachers of another width, depth and family than the student."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoints import assert_equal_state
from tests.launching import recorded
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
from tests.training import (
    GEMMA2,
    GPT_,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    SHARED_EXPERTS,
    assert_same,
    largest_logits,
    tiny,
    train,
    train_on_rank,
)
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Parallelism

WIDE = dataclasses.replace(LLAMA, dim=96, num_heads=6, num_layers=4, ffn_dim=128)
# The student and the teacher.
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LLAMA, WIDE),
    "gpt": (GPT_, WIDE),
    "tied": (LLAMA, QWEN3),
    "both tied": (dataclasses.replace(QWEN3, num_layers=2), QWEN3),
    "soft-capped": (GEMMA2, GEMMA2),
    "experts": (QWEN3_MOE, SHARED_EXPERTS),
}
REVERSE: dict[str, Any] = {"distillation": dict(loss="reverse_kl", temperature=2.0, label_weight=0.25)}
CHATS: dict[str, Any] = {"data": ChatData(holdout_every=4)}
TOP_K: dict[str, Any] = {"distillation": dict(top_k=7, temperature=1.5)}
CHUNKS: dict[str, Any] = {"training": dict(loss_chunk=20)}

CASES: dict[str, Row] = {
    "2 micro-batches": (SLOW, "llama", {}, 4, {}),
    "FSDP, never resharded": (EVERY, "llama", dict(shard=2, reshard_after_forward="never"), 2, {}),
    "HSDP": (EVERY, "gpt", dict(replicate=2, shard=2), 1, {}),
    "TP, tied heads": (SLOW, "both tied", dict(tensor=2), 4, REVERSE),
    "TP, soft-capped logits": (SLOW, "soft-capped", dict(tensor=2), 4, REVERSE),
    "CP x TP, reverse, chunks": (DEFAULT, "gpt", dict(context=2, tensor=2), 4, REVERSE | CHUNKS),
    "CP x FSDP, chats": (DEFAULT, "llama", dict(context=2, shard=2), 2, CHATS),
    "EP": (SLOW, "experts", dict(shard=2, expert=2), 2, {}),
    "EP x TP": (EVERY, "experts", dict(shard=2, tensor=2, expert=2), 2, REVERSE),
    "TP x FSDP, LoRA": (SLOW, "llama", dict(tensor=2, shard=2), 2, LORA),
    # Their heads have different sizes, too.
    "TP, compiled, selective": (SLOW, "tied", dict(tensor=2), 4, COMPILED | SELECTIVE | REVERSE),
    "CP x TP, top-k": (SLOW, "llama", dict(context=2, tensor=2), 4, TOP_K | CHUNKS | CHATS),
    "CP, full checkpointing": (EVERY, "gpt", dict(context=2), 4, FULL),
}


def distillation_recipe(folder: Path, name: str, *, models: str = "llama", **sections: Any) -> Any:
    """Returns a small recipe with a teacher that has random weights."""
    student, teacher = MODELS[models]
    training = dict(steps=2) | sections.pop("training", {})
    distillation = dict(teacher="random") | sections.pop("distillation", {})
    validation = dict(interval=2, batches=1)
    if isinstance(data := sections.get("data"), ChatData):
        training = dict(seq_len=64) | training
        file = folder / "chats.jsonl"
        if not file.exists():
            records = ({"prompt": f"{n}?", "completion": "yes" * (n % 7 + 1)} for n in range(60))
            file.write_text("".join(json.dumps(record) + "\n" for record in records))
        sections["data"] = dataclasses.replace(data, path=str(file), cache=str(folder / "cache"))
    return tiny(
        folder, name, model=student, teacher=teacher, distillation=distillation, training=training,
        **{"validation": validation, **sections},
    )  # fmt: skip


@pytest.mark.parametrize(("models", "layout", "local", "sections"), rows_of(CASES))
def test_a_layout_matches_one_process(
    parity: Parity, tmp_path: Path, models: str, layout: dict[str, Any], local: int, sections: dict[str, Any]
) -> None:
    training = dict(local_batch_size=local) | sections.get("training", {})
    sections = sections | {"parallelism": parallelism_of(layout), "training": training}
    parity(distillation_recipe(parity.folder, tmp_path.name, models=models, **sections))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks(1), tiny(tmp_path, "teacher", model=WIDE, training=dict(steps=2)))

    def run(name: str, steps: int) -> Any:
        return distillation_recipe(
            tmp_path, name, training=dict(steps=steps), distillation=dict(teacher=str(tmp_path / "teacher")),
            parallelism=Parallelism(shard=2), schedule=dict(warmup_steps=0, decay="none"),
        )  # fmt: skip

    whole = train(ranks(2), run("whole", 3))
    train(ranks(2), run("parts", 2))
    parts = train(ranks(2), run("parts", 3))
    assert_equal_state(parts.state, whole.state)
    assert parts.losses == whole.losses and parts.losses[-1] != parts.losses[-2]
    for key in ("kl", "cross_entropy", "validation_kl", "validation_cross_entropy"):
        assert recorded(tmp_path / "whole", key)
    assert recorded(tmp_path / "whole", "kl") == recorded(tmp_path / "parts", "kl")
    loss, divergence, cross_entropy = (recorded(tmp_path / "whole", key)[0] for key in ("loss", "kl", "cross_entropy"))
    assert loss == pytest.approx((divergence + cross_entropy) / 2, rel=1e-6)
    changed = distillation_recipe(tmp_path, "parts", training=dict(steps=4), parallelism=Parallelism(shard=2))
    with pytest.raises(AssertionError, match=r'distillation\.teacher was ".*/teacher", now "random"\. Restore'):
        ranks(2).run(train_on_rank, changed)


@pytest.mark.parametrize(("processes", "float8"), [(2, {}), (2, ALL_GATHER)])
def test_a_student_that_is_its_teacher_has_no_divergence(
    ranks: Ranks, tmp_path: Path, processes: int, float8: dict[str, Any]
) -> None:
    sections: dict[str, Any] = dict(
        training=dict(steps=1, compute_dtype="bfloat16", local_batch_size=4), float8=float8, validation=dict(interval=0)
    )
    train(ranks(processes), tiny(tmp_path, "teacher", **sections))
    initial = str(tmp_path / "teacher")
    recipe = tiny(
        tmp_path, "run", teacher=LLAMA, distillation=dict(teacher=initial), checkpoint=dict(initial=initial), **sections
    )
    train(ranks(processes), recipe)
    assert recorded(tmp_path / "run", "kl") == [0.0]


def test_the_likeliest_tokens_are_computed_once(ranks: Ranks, tmp_path: Path) -> None:
    """A resume finds them, also under another layout, and with all tokens the loss is that of the logits."""
    train(ranks(1), tiny(tmp_path, "teacher", model=WIDE, training=dict(steps=1), validation=dict(interval=0)))
    teacher = dict(teacher=str(tmp_path / "teacher"), loss="reverse_kl")

    def run(name: str, steps: int, top_k: int, **sections: Any) -> Any:
        return distillation_recipe(
            tmp_path, name, data=CHATS["data"], training=dict(steps=steps, local_batch_size=4),
            distillation=teacher | dict(top_k=top_k), schedule=dict(warmup_steps=0, decay="none"), **sections,
        )  # fmt: skip

    whole = train(ranks(2), run("whole", 2, LLAMA.vocab_size, parallelism=Parallelism(shard=2)))
    assert_same(train(ranks(2), run("logits", 2, 0, parallelism=Parallelism(shard=2))), whole)
    train(ranks(2), run("parts", 1, LLAMA.vocab_size, parallelism=Parallelism(shard=2)))
    with mock.patch("titanlike.run.distillation.build_frozen_model", side_effect=AssertionError("not in the cache")):
        parts = train(ranks(2), run("parts", 2, LLAMA.vocab_size, parallelism=Parallelism(shard=2)))
    assert_equal_state(parts.state, whole.state)
    assert parts.losses == whole.losses
    assert_same(train(ranks(1), run("other", 2, LLAMA.vocab_size)), whole)
    assert len(list((tmp_path / "cache/distillation").glob("teacher-*"))) == 1  # it does not depend on the layout


def test_the_logits_of_all_tokens_never_exist(ranks: Ranks, tmp_path: Path) -> None:
    """Of neither model."""
    recipe = distillation_recipe(tmp_path, "run", training=dict(loss_chunk=128, local_batch_size=8, steps=1))
    largest = ranks(1).run(largest_logits, recipe)[0]
    assert largest == 128 * LLAMA.vocab_size  # of 8 x 32 tokens
