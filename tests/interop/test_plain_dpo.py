"""Preference optimization equals a plain loop with transformers: losses, rewards and the norms of gradients, step by step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.interop.models import CONFIGS, export_model, model_of
from tests.pool import Ranks
from tests.preferences import preference_recipe, write_pairs
from tests.training import train
from titanlike.config.sections import Tokenizer
from titanlike.data.batches.preference_sequences import open_sources
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.recipe.dpo import DpoRecipe

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours

SEQ_LEN, STEPS, LR, EPS = 256, 5, 1e-3, 1e-4


@pytest.fixture(
    scope="module",
    params=["grouped-query", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "Qwen3-MoE"))],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model in a Hugging Face folder with a chat template, and a file of pairs beside it."""
    folder = tmp_path_factory.mktemp("base")
    config: Any = dataclasses.replace(CONFIGS[request.param], vocab_size=304)
    if config.has_field("balance_loss"):
        config = dataclasses.replace(config, balance_loss=0.0)
    export_model(model_of(config), config, folder / "hf")
    (folder / "hf/chat_template.jinja").write_text(build_chat_template("", build_tokenizer(Tokenizer())).source)
    write_pairs(folder / "pairs.jsonl")
    return config, folder


def recipe_of(folder: Path, name: str, base: tuple[Any, Path], **sections: Any) -> DpoRecipe:
    config, source = base
    training = dict(steps=STEPS, seq_len=SEQ_LEN, global_batch_size=4, local_batch_size=2, max_norm=1e9)
    return preference_recipe(
        folder, name, model=config, data=dict(path=str(source / "pairs.jsonl"), holdout_every=0),
        tokenizer=Tokenizer(encoding=str(source / "hf")), checkpoint=dict(initial=str(source / "hf")),
        optimizer=dict(lr=LR, eps=EPS, weight_decay=0.0), schedule=dict(warmup_steps=0, decay="none"),
        validation=dict(interval=0), training=training | sections.pop("training", {}), **sections,
    )  # fmt: skip


def conversations(folder: Path) -> list[list[tuple[list[int], list[int]]]]:
    """Returns the tokens of both conversations of each pair, and which are those of the answer, as transformers has them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "hf")
    found = []
    for line in (folder / "pairs.jsonl").read_text().splitlines():
        record, pair = json.loads(line), []
        for name in ("chosen", "rejected"):
            messages = record[name]
            if "prompt" in record:
                messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": messages}]
            ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)
            pair.append((ids, [0] * len(prompt["input_ids"]) + [1] * (len(ids) - len(prompt["input_ids"]))))
        found.append(pair)
    return found


def log_prob(model: Any, ids: list[int], mask: list[int]) -> Tensor:
    """Returns the log-probability of the tokens of an answer, without padding or other documents."""
    probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    of_labels: Tensor = probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return of_labels[torch.tensor(mask[1:], dtype=torch.bool)].sum()


def plain_loop(folder: Path, section: DpoRecipe) -> dict[str, Any]:
    """Trains with transformers as the paper has it, one conversation at a time. In float64, which its experts do not support."""
    dtype = torch.float32 if section.model.num_experts else torch.float64
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "hf").to(dtype) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    pairs, beta = conversations(folder), section.preference.beta
    source = open_sources(
        section.data, build_tokenizer(section.tokenizer), seq_len=SEQ_LEN, global_batch_size=4, seed=0, validate=False
    ).training
    out: dict[str, Any] = {"loss": [], "rewards/chosen": [], "rewards/rejected": [], "rewards/margins": [], "norm": []}
    for step in range(1, STEPS + 1):
        batch = source.read(step, range(4))
        assert batch.document_ids is not None
        numbers = sorted({int(n) // 2 for n in batch.document_ids.flatten() if n < 2 * len(pairs)})
        assert len(numbers) > 4, "several pairs in a sequence"
        losses, rewards = [], []
        for number in numbers:
            with torch.no_grad():
                expected = [log_prob(reference, *each) for each in pairs[number]]
            ratios = [log_prob(policy, *each) - other for each, other in zip(pairs[number], expected, strict=True)]
            losses.append(-F.logsigmoid(beta * (ratios[0] - ratios[1])))
            rewards.append([beta * ratio.item() for ratio in ratios])
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [each.grad for each in policy.parameters() if each.grad is not None]
        optimizer.step()
        chosen, rejected = torch.tensor(rewards).mean(0).tolist()
        for name, value in zip(out, (loss.item(), chosen, rejected, chosen - rejected), strict=False):
            out[name].append(value)
        out["norm"].append(torch.stack([each.norm() for each in gradients]).norm().item())
    return out


def records(recipe: DpoRecipe) -> list[dict[str, Any]]:
    lines = Path(recipe.run.dir, recipe.run.name, "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if "loss" in each]


def test_five_steps_equal_a_plain_loop(ranks: Ranks, tmp_path: Path, base: Any) -> None:
    recipe = recipe_of(tmp_path, "run", base)
    expected = plain_loop(base[1], recipe)
    train(ranks(1), recipe)
    found = records(recipe)
    assert expected["loss"][-1] < expected["loss"][0] - 0.01
    loss_error = 2e-4 if recipe.model.num_experts else 1e-6  # of transformers in float32
    for step, record in enumerate(found):
        assert abs(record["loss"] - expected["loss"][step]) <= loss_error
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
            assert record[name] == pytest.approx(expected[name][step], rel=5 * loss_error, abs=5 * loss_error)
        assert record["grad_norm"] == pytest.approx(expected["norm"][step], rel=100 * loss_error)
