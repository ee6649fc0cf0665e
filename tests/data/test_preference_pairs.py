"""Preference pairs: records, tokens, packing, the losses of pairs, and the recipes that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.loss_errors import linear_cross_entropy
from tests.preferences import write_pairs
from tests.training import changed
from titanlike.config import UserError
from titanlike.config.dpo import Preference, PreferenceData
from titanlike.config.finetune import Lora
from titanlike.config.sections import Tokenizer
from titanlike.data.batches.preference_sequences import open_sources
from titanlike.data.batches.sources import Sources
from titanlike.data.documents.preference_pairs import preference_pair_of
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chat_template import ChatTemplate, build_chat_template
from titanlike.data.tokens.preference_tokens import encode_pair
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE
from titanlike.losses.preferences import Answers, preference_loss
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.checks import check_recipe

EOS = 256
USER = {"role": "user", "content": "a?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def open_pairs(file: Path, *, seq_len: int = 96, validate: bool = False, **keys: Any) -> Sources:
    section = PreferenceData(**({"path": str(file), "holdout_every": 0, "cache": str(file.parent / "cache")} | keys))
    return open_sources(
        section, build_tokenizer(Tokenizer()), seq_len=seq_len, global_batch_size=4, seed=0, validate=validate
    )


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a?", "chosen": "b", "rejected": "c"},
        {"prompt": [USER], "chosen": [answer("b")], "rejected": [answer("c")]},
        {"prompt": "a?", "chosen": [answer("b")], "rejected": [answer("c")]},
        {"chosen": [USER, answer("b")], "rejected": [USER, answer("c")]},
        {"prompt": "a?", "chosen": [USER, answer("b")], "rejected": [USER, answer("c")]},  # as UltraFeedback has it
        {"prompt": [USER], "chosen": [USER, answer("b")], "rejected": [USER, answer("c")]},
        {"question": "a?", "chosen": answer("b"), "rejected": {"from": "gpt", "value": "c"}, "prompt": None},
    ],
)
def test_a_pair_is_read_from_every_common_format(record: dict[str, Any]) -> None:
    pair = preference_pair_of(record)
    assert pair.chosen.messages == [USER, answer("b")]
    assert pair.rejected.messages == [USER, answer("c")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"^no field 'rejected', or an empty one; its fields are prompt, chosen; name"),
        (
            {"chosen": [USER, answer("b")], "rejected": [answer("c?"), answer("c")]},
            "different prompts: message 0 differs, and",
        ),
        (
            {"chosen": [USER, answer("b"), USER], "rejected": [USER, answer("b"), answer("c")]},
            "prompts: message 2 differs",
        ),
    ],
)
def test_a_record_without_a_pair_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        preference_pair_of(record)


def test_only_the_answers_that_differ_are_labels() -> None:
    template = build_chat_template("", build_tokenizer(Tokenizer()))
    shared = [USER, answer("same"), {"role": "user", "content": "go on"}]
    record = {"chosen": [*shared, answer("good one")], "rejected": [*shared, answer("good two")]}
    (chosen, labels), (rejected, other_labels) = encode_pair(preference_pair_of(record), template)
    # The whole answer, although both begin alike, and not the earlier one.
    assert bytes(chosen[labels][:-1].tolist()).decode() == "good one" and chosen[labels][-1] == EOS
    assert bytes(rejected[other_labels][:-1].tolist()).decode() == "good two"
    with pytest.raises(BadRecord, match=r"^chosen and rejected are the same$"):
        encode_pair(preference_pair_of({"prompt": "a", "chosen": "b", "rejected": "b"}), template)


def test_every_epoch_has_both_halves_of_each_pair_once_in_one_sequence(tmp_path: Path) -> None:
    source: Any = open_pairs(write_pairs(tmp_path / "pairs.jsonl")).training
    assert source.describe(15).startswith("60 preference pairs, 4,273 tokens (1,053 of answers) in 55 sequences")
    dataset = source.datasets[0]
    seen: list[int] = []
    for index in range(dataset.num_sequences):
        tokens, loss_mask, ids = (each[0] for each in dataset.read(np.array([index]))[:3])
        documents = list(dict.fromkeys(ids.tolist()))
        assert documents == sorted(documents), "a block mask skips blocks by the range of their ids"
        if documents[-1] == 120:  # padding
            documents.pop()
            assert set(tokens[ids == 120]) == {EOS} and not loss_mask[ids == 120].any()
        seen += documents
        assert all(
            second == first + 1 and first % 2 == 0
            for first, second in zip(documents[::2], documents[1::2], strict=True)
        )
        assert all(loss_mask[ids == document].any() for document in documents)
    assert sorted(seen) == list(range(120))


def test_a_long_pair_is_truncated_at_the_end_of_the_longer_conversation(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    records = [("b", "c" * 99), ("b" * 99, "c" * 99), ("b" * 40, "c" * 40)]
    path.write_text("".join(json.dumps({"prompt": "a", "chosen": b, "rejected": c}) + "\n" for b, c in records))

    def lengths(**keys: Any) -> list[tuple[int, int]]:
        dataset: Any = open_pairs(path, **keys).training
        (dataset,) = dataset.datasets
        numbers = [number for group in dataset.bins for number in group]
        return sorted(tuple(dataset.kept[number].tolist()) for number in numbers)

    full = [len(f"user\na{'.'}assistant\n") + size + 1 for size in (1, 40)]
    assert lengths() == sorted([(full[0], 97 - full[0]), (48, 48), (48, 48)])
    with pytest.raises(UserError, match=r"has no preference pair for training: 3 in all, 3 that training\.seq_len"):
        lengths(long_chats="skip")
    assert lengths(long_chats="skip", seq_len=140) == [(full[0], full[0] + 98), (full[1], full[1])]
    with pytest.raises(UserError, match=r"3 that training\.seq_len = 20 leaves without an answer"):
        lengths(seq_len=20)


def test_pairs_that_are_equal_after_truncation_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    records = [("b" * 90 + "c", "b" * 99), ("b" * 9 + "c" * 90, "b" * 99), ("d", "e"), ("b" * 99, "b" * 98)]
    path.write_text("".join(json.dumps({"prompt": "a", "chosen": b, "rejected": c}) + "\n" for b, c in records))
    source: Any = open_pairs(path).training
    [dataset] = source.datasets
    assert sorted(number for group in dataset.bins for number in group.tolist()) == [1, 2]
    assert source.describe(1).startswith(
        "2 preference pairs, "
    ) and ", 2 skipped as equal after truncation," in source.describe(1)
    path.write_text(path.read_text().splitlines()[0])
    with pytest.raises(UserError, match=r"has no preference pair for training: 1 in all, 1 equal after truncation$"):
        open_pairs(path)


def test_a_pair_of_a_template_with_several_sequences_is_the_last_answer(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else m.content[0] }}{% endfor %}"
        "{{ '>' if add_generation_prompt }}"
    )
    template = ChatTemplate(source, build_tokenizer(Tokenizer()))
    before = [USER, answer(">same"), {"role": "user", "content": "b?"}]
    record = {"chosen": [*before, answer(">cc")], "rejected": [*before, answer(">rr")]}
    encoded = encode_pair(preference_pair_of(record), template)
    assert [bytes(tokens.tolist()) for tokens, _ in encoded] == [b"a?>b?>cc", b"a?>b?>rr"]
    assert [bytes(tokens[labels].tolist()) for tokens, labels in encoded] == [b"cc", b"rr"]
    record["chosen"][1] = answer(">other")
    with pytest.raises(BadRecord, match=r"^chosen and rejected differ in several answers, of which the chat template"):
        encode_pair(preference_pair_of(record), template)


def test_held_out_pairs_and_those_of_a_mixture_have_their_own_numbers(tmp_path: Path) -> None:
    paths = [str(write_pairs(tmp_path / f"{name}.jsonl", count)) for name, count in (("a", 20), ("b", 30))]
    held_out: Any = open_pairs(tmp_path, path="", mixture=tuple(paths), holdout_every=5, validate=True)

    def numbers(source: Any) -> set[int]:
        found = set()
        for dataset in source.datasets:
            for index in range(dataset.num_sequences):
                ids = dataset.read(np.array([index])).document_ids
                padding = 2 * (dataset.first_pair + dataset.num_pairs_in_all)
                found |= {document // 2 for document in ids[ids != padding].tolist()}
        return found

    assert numbers(held_out.validation) == {n for n in range(50) if n % 5 == 4}
    assert numbers(held_out.training) == {n for n in range(50) if n % 5 != 4}


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_the_losses_of_tokens_and_their_gradients_are_those_of_torch(chunk: int, soft_cap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((2, 9, 8), (40, 8)))
    labels = torch.randint(0, 40, (2, 9), generator=generator)
    labels[0, 3:5] = IGNORE
    scale = torch.randn(2, 9, generator=generator)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        logits = x.double() @ weight.double().t()
        logits = (logits / soft_cap).tanh() * soft_cap if soft_cap else logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 9)

    expected = reference(x, weight)
    gradients = torch.autograd.grad((expected * scale).sum(), (x, weight))
    losses = linear_cross_entropy(x, weight, labels, chunk=chunk, soft_cap=soft_cap, reduction="none")
    assert losses.shape == (2, 9) and (losses[0, 3:5] == 0).all()
    torch.testing.assert_close(losses.double(), expected)
    for found, wanted in zip(torch.autograd.grad((losses * scale).sum(), (x, weight)), gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    # Without a weight, x are the logits; with a frozen one, only x has a gradient.
    logits = (x @ weight.t()).detach().requires_grad_()
    whole = linear_cross_entropy(logits, None, labels, chunk=chunk, soft_cap=soft_cap, reduction="none")
    torch.testing.assert_close(whole, losses)
    (found,) = torch.autograd.grad((whole * scale).sum(), logits)
    torch.testing.assert_close(found @ weight, gradients[0])
    frozen = linear_cross_entropy(x, weight.detach(), labels, chunk=chunk, soft_cap=soft_cap, reduction="none")
    torch.testing.assert_close(torch.autograd.grad((frozen * scale).sum(), x)[0], gradients[0])


def test_the_losses_of_pairs_are_those_of_the_papers() -> None:
    log_probs = torch.tensor([[[-3.0, -5.0], [-2.0, -1.0], [0.0, 0.0]]], dtype=torch.float64)
    reference = torch.tensor([[[-4.0, -4.5], [-1.0, -3.0], [-9.0, -9.0]]], dtype=torch.float64)
    answers = Answers(log_probs, torch.tensor([[[2.0, 4.0], [1.0, 5.0], [0.0, 0.0]]], dtype=torch.float64))

    def sigmoid(x: float) -> float:
        return 1 / (1 + np.exp(-x))

    def loss(**keys: Any) -> tuple[float, dict[str, float]]:
        section = Preference(**keys)
        value, metrics = preference_loss(section, answers, reference if section.has_reference else None)
        return value.item(), {name: each.item() for name, each in metrics.items()}

    margins = 0.5 * np.array([1.0 + 0.5, -1.0 - 2.0])
    value, metrics = loss(beta=0.5)
    assert value == pytest.approx(-np.log(sigmoid(margins)).sum())
    assert metrics == pytest.approx({
        "rewards/chosen": 0.5 * (1.0 - 1.0), "rewards/rejected": 0.5 * (-0.5 + 2.0), "rewards/margins": margins.sum(),
        "rewards/accuracies": 1.0, "logps/chosen": -5.0, "logps/rejected": -6.0, "kl": (1.0 - 0.5 - 1.0 + 2.0) / 2,
    })  # fmt: skip
    smoothed, _ = loss(beta=0.5, label_smoothing=0.2)
    assert smoothed == pytest.approx((-0.8 * np.log(sigmoid(margins)) - 0.2 * np.log(sigmoid(-margins))).sum())
    ipo, metrics = loss(loss="ipo", beta=0.5)
    assert ipo == pytest.approx((1.0 / 2 + 0.5 / 4 - 1.0) ** 2 + (-1.0 / 1 - 2.0 / 5 - 1.0) ** 2)
    assert metrics["rewards/margins"] == pytest.approx(margins.sum())
    simpo, metrics = loss(loss="simpo", beta=2.0, simpo_gamma=0.3)
    means = 2.0 * np.array([-3.0 / 2 + 5.0 / 4, -2.0 + 1.0 / 5])
    assert simpo == pytest.approx(-np.log(sigmoid(means - 0.3)).sum())
    assert metrics["rewards/margins"] == pytest.approx(means.sum()) and "kl" not in metrics
    assert metrics["rewards/accuracies"] == 0.0  # both pairs are wrong
    # A pair with equal rewards is half right: that is the accuracy before the first step.
    equal = preference_loss(Preference(), answers, log_probs)[1]
    assert equal["rewards/accuracies"].item() == 1.0 and equal["rewards/margins"].item() == 0.0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            dict(preference=dict(reference="adapter_off")),
            "'adapter_off' disables LoRA adapters, but lora.rank = 0; set",
        ),
        (
            dict(parallelism=dict(pipeline=2)),
            "parallelism.pipeline = 2: the loss of a pair needs the sums of both answers",
        ),
        (dict(training=dict(z_loss=1e-4)), "training.z_loss = 0.0001 is no part of a preference loss; set it to 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(sections: dict[str, Any], message: str) -> None:
    base = changed(DpoRecipe(), data=dict(source="synthetic_preference"))
    check_recipe(base, 2)
    with pytest.raises(UserError) as refused:
        check_recipe(changed(base, **sections), 2)
    assert message in str(refused.value)


def test_the_default_reference_needs_no_second_model_with_lora(tmp_path: Path) -> None:
    recipe = DpoRecipe()
    adapted = changed(recipe, lora=Lora(rank=4))
    assert (recipe.reference, adapted.reference) == ("model", "adapter_off")
    assert "lora    rank 4, " in adapted.summary_lines()[0] and "lora" not in recipe.summary_lines()[0]
    assert changed(recipe, preference=dict(loss="simpo")).reference == "none"
    file = tmp_path / "recipe.toml"
    file.write_text('[data]\nsource = "preference"\n[preference]\nbeta = 0.2\n')
    with pytest.raises(UserError) as refused:
        load(PretrainRecipe, file)
    assert 'preference: unknown key; recipes/dpo.py has it; set program = "dpo"' in str(refused.value)
    assert 'data.source = "preference" is for the program dpo; set program = "dpo"' in str(refused.value)
