"""Distillation under every layout equals one process, for teachers of another width, depth and family than the student."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoints import assert_equal_state
from tests.launching import recorded
from tests.parity import ALL_GATHER, COMPILED, FULL, LORA, SELECTIVE, Parity, parallelism_of, tiers
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
from titanlike.tools.data.train_tokenizer import train as train_tokenizer

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

# The models, the layout, the number of sequences in a micro-batch, and other sections of a recipe.
CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "2 micro-batches": ("llama", {}, 4, {}),
    "DDP": ("gpt", dict(replicate=2), 2, {}),
    "FSDP": ("llama", dict(shard=2), 2, {}),
    "FSDP, tied teacher": ("tied", dict(shard=2), 2, {}),
    "HSDP": ("gpt", dict(replicate=2, shard=2), 1, {}),
    "TP": ("llama", dict(tensor=2), 4, {}),
    "TP, tied heads": ("both tied", dict(tensor=2), 4, REVERSE),
    "TP, soft-capped logits": ("soft-capped", dict(tensor=2), 4, REVERSE),
    "CP": ("llama", dict(context=2), 4, {}),
    "CP x TP, reverse, chunks": ("gpt", dict(context=2, tensor=2), 4, REVERSE | CHUNKS),
    "CP x FSDP, chats": ("llama", dict(context=2, shard=2), 2, CHATS),
    "TP x FSDP": ("both tied", dict(tensor=2, shard=2), 2, {}),
    "EP": ("experts", dict(shard=2, expert=2), 2, {}),
    "EP x TP": ("experts", dict(shard=2, tensor=2, expert=2), 2, REVERSE),
    "EP x CP": ("experts", dict(context=2, expert=2), 4, {}),
    "TP x FSDP, LoRA": ("llama", dict(tensor=2, shard=2), 2, LORA),
    "HSDP, LoRA": ("gpt", dict(replicate=2, shard=2), 1, LORA),
    # Their heads have different sizes, too.
    "TP x FSDP, compiled, selective": ("tied", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE | REVERSE),
    "FSDP, never resharded": ("llama", dict(shard=2, reshard_after_forward="never"), 2, {}),
    "FSDP, always resharded": ("tied", dict(shard=2, reshard_after_forward="always"), 2, {}),
    "CP x TP, top-k": ("llama", dict(context=2, tensor=2), 4, TOP_K | CHUNKS | CHATS),
    "TP x FSDP, top-k, compiled": ("tied", dict(tensor=2, shard=2), 2, TOP_K | CHATS | COMPILED),
    "CP, full checkpointing": ("gpt", dict(context=2), 4, FULL),
}
QUICK = (
    "FSDP",
    "HSDP",
    "CP x TP, reverse, chunks",
    "EP",
    "TP x FSDP",
    "CP x FSDP, chats",
    "TP x FSDP, compiled, selective",
)
SLOW = (
    "2 micro-batches",
    "TP, tied heads",
    "EP x TP",
    "TP x FSDP, LoRA",
    "TP, soft-capped logits",
    "CP x TP, top-k",
)


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


@pytest.mark.parametrize("case", tiers(CASES, QUICK, SLOW))
def test_a_layout_matches_one_process(parity: Parity, tmp_path: Path, case: str) -> None:
    models, layout, local, sections = CASES[case]
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

    whole = train(ranks(2), run("whole", 5))
    train(ranks(2), run("parts", 3))
    parts = train(ranks(2), run("parts", 5))
    assert_equal_state(parts.state, whole.state)
    assert parts.losses == whole.losses and parts.losses[-1] != parts.losses[-2]
    for key in ("kl", "cross_entropy", "validation_kl", "validation_cross_entropy"):
        assert recorded(tmp_path / "whole", key)
    assert recorded(tmp_path / "whole", "kl") == recorded(tmp_path / "parts", "kl")
    loss, divergence, cross_entropy = (recorded(tmp_path / "whole", key)[0] for key in ("loss", "kl", "cross_entropy"))
    assert loss == pytest.approx((divergence + cross_entropy) / 2, rel=1e-6)
    changed = distillation_recipe(tmp_path, "parts", training=dict(steps=6), parallelism=Parallelism(shard=2))
    with pytest.raises(AssertionError, match=r'distillation\.teacher was ".*/teacher", now "random"\. Restore'):
        ranks(2).run(train_on_rank, changed)


@pytest.mark.parametrize(("processes", "float8"), [(1, {}), (2, {}), (2, ALL_GATHER)])
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

    whole = train(ranks(2), run("whole", 4, LLAMA.vocab_size, parallelism=Parallelism(shard=2)))
    assert_same(train(ranks(2), run("logits", 4, 0, parallelism=Parallelism(shard=2))), whole)
    train(ranks(2), run("parts", 2, LLAMA.vocab_size, parallelism=Parallelism(shard=2)))
    with mock.patch("titanlike.run.distillation.build_frozen_model", side_effect=AssertionError("not in the cache")):
        parts = train(ranks(2), run("parts", 4, LLAMA.vocab_size, parallelism=Parallelism(shard=2)))
    assert_equal_state(parts.state, whole.state)
    assert parts.losses == whole.losses
    assert_same(train(ranks(1), run("other", 4, LLAMA.vocab_size)), whole)
    assert len(list((tmp_path / "cache/distillation").glob("teacher-*"))) == 1  # it does not depend on the layout


def test_a_teacher_with_another_tokenizer_or_other_sizes_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_text("the cat and the dog and the end of the day\n" * 20)
    train_tokenizer([str(text)], file, vocab_size=270)
    encodings = {"teacher": "bytes", "other": str(file)}
    for name, encoding in encodings.items():
        sections: dict[str, Any] = dict(tokenizer=dict(encoding=encoding), validation=dict(interval=0))
        train(ranks(1), tiny(tmp_path, name, model=WIDE, training=dict(steps=1), **sections))
    recipe = distillation_recipe(tmp_path, "run", distillation=dict(teacher=str(tmp_path / "other")))
    with pytest.raises(
        AssertionError,
        match=r"has the tokenizer '.*tokenizer\.json', which differs from tokenizer\.encoding = 'bytes': 'Ā' has the id 0, and ",
    ):
        ranks(1).run(train_on_rank, recipe)
    teacher = dict(teacher=str(tmp_path / "teacher"))
    recipe = distillation_recipe(tmp_path, "run", distillation=teacher)
    other = dataclasses.replace(recipe, teacher=dataclasses.replace(WIDE, rope_theta=1e4))
    problem = r"distillation\.teacher = '.*teacher' has rope_theta = 500000\.0, but teacher\.rope_theta = 10000\.0"
    with pytest.raises(AssertionError, match=problem):
        ranks(1).run(train_on_rank, other)


def test_the_logits_of_all_tokens_never_exist(ranks: Ranks, tmp_path: Path) -> None:
    """Of neither model."""
    recipe = distillation_recipe(tmp_path, "run", training=dict(loss_chunk=128, local_batch_size=8, steps=1))
    largest = ranks(1).run(largest_logits, recipe)[0]
    assert largest == 128 * LLAMA.vocab_size  # of 8 x 32 tokens
