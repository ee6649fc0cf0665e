"""The accuracy of masked tokens is that of one process under every layout: ranks that share a vocabulary compare their logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launching import records
from tests.pool import Ranks
from tests.training import BERT, tiny, train_on_rank, world_size
from titanlike.config.sections import Parallelism
from titanlike.losses.accuracy import LossAndAccuracy, num_correct
from titanlike.losses.chunked import Logits


def validated(ranks: Ranks, folder: Path, name: str, **layout: Any) -> dict[str, float]:
    """Returns what validations after training on few tokens have recorded."""
    parallelism = Parallelism(**({"shard": 1} | layout))
    training = dict(steps=4, local_batch_size=2, loss_chunk=7)
    optimizer = dict(lr=3e-2)
    recipe = tiny(folder, name, model=BERT, parallelism=parallelism, training=training, optimizer=optimizer,
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
