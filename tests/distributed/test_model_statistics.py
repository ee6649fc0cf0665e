"""What a run records of its model under every layout: the balance of experts, terms of the loss, statistics of parameters, and the
accuracy of masked tokens."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.launching import records
from tests.parity import COMPILED, DEFAULT, DOCUMENTS, EVERY, FULL, MOE_MODELS, SELECTIVE, SLOW, Tier, rows_of
from tests.pool import Pool, Ranks
from tests.training import (
    BERT,
    LLAMA,
    MIXTRAL,
    MULTI_TOKEN,
    QWEN3_MOE,
    build,
    deep,
    tiny,
    train,
    train_on_rank,
    world_size,
)
from titanlike.config.sections import Parallelism
from titanlike.losses import IGNORE
from titanlike.losses.accuracy import LossAndAccuracy, num_correct
from titanlike.losses.chunked import Logits
from titanlike.metrics.model_statistics import model_statistics
from titanlike.models.common.experts import routers

Z_LOSS = 0.01
TERMS = ("z_loss", "balance_loss", "mtp_loss", "experts/max_load", "experts/entropy")
MODELS: dict[str, Any] = MOE_MODELS | {
    "llama": LLAMA,
    "not balanced": dataclasses.replace(MIXTRAL, balance_loss=0.0, num_experts=8),
}

# The tier, the model, the layout and other sections.
CASES: dict[str, tuple[Tier, str, dict[str, Any], dict[str, Any]]] = {
    "HSDP": (SLOW, "not balanced", dict(replicate=2, shard=2), {}),
    "TP x FSDP": (DEFAULT, "shared experts", dict(tensor=2, shard=2), {}),
    "PP zbv x TP": (SLOW, "not balanced", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), {}),
    "PP zbv, a stage without experts": (EVERY, "deepseek_v3", dict(pipeline=2, pipeline_schedule="zbv"), {}),
    "EP x TP": (SLOW, "multi-token", dict(shard=2, tensor=2, expert=2), {}),
    "MTP, CP x TP, documents": (DEFAULT, "multi-token", dict(context=2, tensor=2), DOCUMENTS),
    "MTP, TP x FSDP, compiled, selective": (EVERY, "multi-token", dict(tensor=2, shard=2), COMPILED | SELECTIVE),
    "dense, CP x TP": (EVERY, "llama", dict(context=2, tensor=2), {}),
}


def terms_of(pool: Pool, recipe: Any) -> list[dict[str, float]]:
    """Trains, and returns the terms in each record of a step."""
    train(pool, recipe)
    found = [record for record in records(Path(recipe.run.dir, recipe.run.name)) if "loss" in record]
    return [{name: record[name] for name in TERMS if name in record} for record in found]


@pytest.mark.parametrize(("model", "layout", "sections"), rows_of(CASES))
def test_every_layout_records_what_one_process_records(
    ranks: Ranks, tmp_path: Path, model: str, layout: dict[str, Any], sections: dict[str, Any]
) -> None:
    sizes = dict(steps=2, z_loss=Z_LOSS, loss_chunk=20)
    shape = deep(MODELS[model]) if "pipeline" in layout else MODELS[model]
    data = {name: value for name, value in sections.items() if name == "data"}
    one = tiny(tmp_path, "one", model=shape, training=sizes | dict(local_batch_size=8), **data)
    expected = terms_of(ranks(1), one)
    sizes_of = {"shard": 1} | layout
    size = 8 // (sizes_of.get("replicate", 1) * sizes_of["shard"] * sizes_of.get("pipeline", 1) * 2)
    several = tiny(
        tmp_path, "several", model=shape, training=sizes | dict(local_batch_size=size),
        parallelism=Parallelism(**sizes_of), **sections,
    )  # fmt: skip
    found = terms_of(ranks(world_size(several)), several)
    names = {"z_loss", *(("experts/max_load", "experts/entropy") if model != "llama" else ())}
    names |= {"balance_loss"} if getattr(MODELS[model], "balance_loss", 0.0) else set()
    names |= {"mtp_loss"} if model == "multi-token" else set()
    assert [one.keys() for one in expected] == [one.keys() for one in found] == [names, names]
    for step in range(2):
        for name in names:
            # Sums of integers are equal; others are rounded in another order.
            tolerance = 0.0 if name.startswith("experts/") else 1e-5
            assert found[step][name] == pytest.approx(expected[step][name], rel=tolerance, abs=0), (step, name)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum").item()


def _counted_by_hand(folder: Path, checkpointed: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the statistics of a step of two micro-batches, and those of plain loops over tokens and experts."""
    config = MULTI_TOKEN
    sections = FULL if checkpointed else {}
    recipe = tiny(folder, "run", model=config, training=dict(z_loss=Z_LOSS, loss_chunk=7), **sections)
    model: Any
    model, _ = build(recipe)
    found = model_statistics(model, torch.device("cpu"))
    assert found is not None
    chosen: dict[int, list[list[int]]] = {}  # experts of each token, by router
    probs: dict[int, list[torch.Tensor]] = {}
    heads: list[tuple[torch.Tensor, torch.Tensor]] = []
    recomputes = False
    for number, router in enumerate(routers(model)):

        def seen(router: Any, inputs: Any, routes: Any, number: int = number) -> None:
            if recomputes:
                return
            chosen.setdefault(number, []).extend(routes.indices.flatten(0, 1).tolist())
            with torch.no_grad():
                scores = (inputs[0].float() @ router.weight.T).sigmoid()
                probs.setdefault(number, []).append((scores / scores.sum(-1, keepdim=True)).flatten(0, 1))

        router.register_forward_hook(seen)
    model.output.register_forward_pre_hook(lambda _, inputs: heads.append((inputs[0].detach(), inputs[1])))
    generator = torch.Generator().manual_seed(3)
    number, batches = 0, []
    for _ in range(2):
        tokens = torch.randint(320, (2, 32), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[0, 9:17] = IGNORE
        following = torch.stack([tokens.roll(-n, 1) for n in (1, 2)], -1)
        next_labels = torch.stack([tokens.roll(-n, 1) for n in (2, 3)], -1)
        next_labels[1, 20:] = IGNORE
        batches.append(labels)
        number += int((labels != IGNORE).sum())
        loss = model(tokens, labels=labels, next_tokens=following, next_labels=next_labels)
        recomputes = True
        loss.backward()
        recomputes = False
    measured = {name: value.item() for name, value in found.measure().items()}
    found.reset()
    assert all(router.load is None for router in routers(model)) and found.terms.sums is None

    expected = dict.fromkeys(TERMS, 0.0)
    for x, labels in heads:
        logits = x @ model.output.weight.T
        squares = logits[:2].logsumexp(-1).square()[labels[:2] != IGNORE]
        expected["z_loss"] += Z_LOSS * squares.sum().item() / number
        expected["mtp_loss"] += cross_entropy(logits[2:], labels[2:]) / 2 / number
    loads = []
    for tokens_of_router in chosen.values():
        loads.append([sum(expert in token for token in tokens_of_router) for expert in range(8)])
    total = 2 * 2 * 32 * 3
    assert all(sum(load) == total for load in loads)
    expected["experts/max_load"] = max(max(load) * 8 / total for load in loads)
    entropies = [-sum(n / total * math.log(n / total) for n in load if n) / math.log(8) for load in loads]
    expected["experts/entropy"] = min(entropies)
    for sequence in range(4):  # of all micro-batches
        labels = batches[sequence // 2][sequence % 2]
        rows = range(32 * sequence, 32 * sequence + 32)
        balance, num_routed = 0.0, 32 * len(chosen)
        for expert in range(8):
            f = sum(expert in chosen[number][token] for number in chosen for token in rows) / num_routed
            flat = [torch.cat(each) for each in probs.values()]
            p = sum(each[token, expert].item() for each in flat for token in rows) / num_routed
            balance += 8 * f * p
        expected["balance_loss"] += balance * int((labels != IGNORE).sum()) / number
    return measured, expected


@pytest.mark.parametrize("checkpointed", [False, True])
def test_statistics_equal_plain_loops(ranks: Ranks, tmp_path: Path, checkpointed: bool) -> None:
    [(found, expected)] = ranks(1).run(_counted_by_hand, tmp_path, checkpointed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert 1 < found["experts/max_load"] <= 8 and 0 < found["experts/entropy"] < 1


def test_records_are_of_their_step_and_not_of_those_between(ranks: Ranks, tmp_path: Path) -> None:
    """A record each two steps has the same values as one each step."""
    training = dict(steps=4, local_batch_size=8)
    each, second = (
        terms_of(ranks(1), tiny(tmp_path, f"every-{n}", model=QWEN3_MOE, training=training, metrics=dict(interval=n)))
        for n in (1, 2)
    )
    assert second == [each[0], each[1], each[3]]


INTERVAL = 2


def statistics_of(folder: Path) -> dict[tuple[int, str], float]:
    return {
        (record["step"], name): value
        for record in records(folder)
        for name, value in record.items()
        if name.startswith("layers/")
    }


@pytest.mark.parametrize(
    "layout",
    [
        dict(shard=1, tensor=2),
        pytest.param(dict(pipeline=2, shard=2), marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(ranks: Ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    metrics = dict(layer_interval=INTERVAL)
    expected = tiny(tmp_path, "one", metrics=metrics)
    train(ranks(1), expected)
    sharded = tiny(tmp_path, "sharded", metrics=metrics, parallelism=layout)
    train(ranks(world_size(sharded)), sharded)
    one, other = statistics_of(tmp_path / "one"), statistics_of(tmp_path / "sharded")
    assert {step for step, _ in one} == {2, 4}
    assert len(one) == 2 * 3 * (2 * 9 + 3)  # steps, statistics, parameters of the blocks and around them
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=2e-3, abs=1e-7), key
    ratios = [value for (_, name), value in one.items() if "update_ratio" in name]
    assert all(0 < ratio < 1 for ratio in ratios)
    last = [record for record in records(tmp_path / "sharded") if "loss" in record][-1]
    assert last["max_memory_gib"] >= 0.999 * last["memory_gib"] > 0  # gathered in float32, and rounded
    assert 0 <= last["slowest_rank"] < world_size(sharded)
    assert last["slowest_rank_ratio"] >= 1


def validated(ranks: Ranks, folder: Path, name: str, **layout: Any) -> dict[str, float]:
    """Returns what validations after training on few tokens have recorded."""
    parallelism = Parallelism(**({"shard": 1} | layout))
    training = dict(steps=4, local_batch_size=2, loss_chunk=7)
    optimizer = dict(lr=3e-2)
    recipe = tiny(folder, name, model=deep(BERT), parallelism=parallelism, training=training, optimizer=optimizer,
                  validation=dict(interval=4, batches=6))  # fmt: skip
    ranks(world_size(recipe)).run(train_on_rank, recipe)
    [found] = [record for record in records(folder / name) if "validation_accuracy" in record]
    return {key: found[key] for key in ("validation_loss", "validation_accuracy")}


def count_on_rank(logits: torch.Tensor, labels: torch.Tensor) -> tuple[int, list[float]]:
    """Returns what this rank finds with its shard of the vocabulary: the number of correct labels, and the values of a head."""
    group = dist.group.WORLD
    shard = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    head = LossAndAccuracy(chunk=5, vocab_group=group)
    return int(num_correct(shard, labels, group)), head(Logits(shard[None]), labels[None]).tolist()


def test_ranks_that_share_a_vocabulary_find_the_largest_logit(ranks: Ranks) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 12), torch.randint(0, 12, (40,))
    labels[:20] = logits[:20].argmax(-1)
    correct = int((logits.argmax(-1) == labels).sum())
    loss = float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    for found, (of_head, number) in ranks(2).run(count_on_rank, logits, labels):
        assert found == number == correct >= 20
        assert of_head == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [dict(context=2), dict(pipeline=2, tensor=2)], ids=str)
def test_the_accuracy_is_that_of_one_process(ranks: Ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    expected = validated(ranks, tmp_path, "one")
    found = validated(ranks, tmp_path, "run", **layout)
    assert 0.0 < expected["validation_accuracy"] < 1.0
    assert found["validation_accuracy"] == pytest.approx(expected["validation_accuracy"], abs=1e-9)
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)
