"""Compilation, activation checkpointing and offloading, and mixed precision: what they change, and what they do not."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.checkpoints import assert_identical
from tests.parity import COMPILED, DEFAULT, EVERY, FULL, SLOW, Tier, rows_of
from tests.pool import Ranks
from tests.training import GPT_, LLAMA, Observer, Operations, build, result, tiny, train_on_rank, world_size
from titanlike.config.sections import Training
from titanlike.models.common.init import initialize
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms import activation_offload
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.activation_offload import _Host, apply_activation_offload
from titanlike.recipe import PretrainRecipe


@pytest.mark.parametrize(
    ("compute", "master"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_dtypes_of_compute_weights_and_gradients(ranks: Ranks, compute: Any, master: Any) -> None:
    found = ranks(1).run(_dtypes, Training(compute_dtype=compute, master_dtype=master))[0]
    assert found == {"matmul": f"torch.{compute}", "weight": f"torch.{master}", "gradient": f"torch.{master}"}


def _dtypes(training: Training) -> dict[str, str]:
    model, _ = build(tiny(Path(), "", training=training))
    dtypes = set()

    def observe(func: Any, args: Any, result: Any) -> None:
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            dtypes.add(result.dtype)

    with Observer(observe):
        model(torch.zeros(1, 8, dtype=torch.long)).float().sum().backward()
    weight = model.get_parameter("layers.0.feed_forward.w1.weight")
    assert weight.grad is not None
    (dtype,) = dtypes
    return {"matmul": str(dtype), "weight": str(weight.dtype), "gradient": str(weight.grad.dtype)}


def operations_of(counts: Counter[str]) -> tuple[int, int]:
    """Returns the numbers of matmuls and of calls of attention."""
    prefix = "_scaled_dot_product"
    attentions = [n for name, n in counts.items() if name.startswith(prefix) and not name.endswith("backward")]
    return counts["mm"] + counts["addmm"], sum(attentions)


@pytest.mark.parametrize(
    ("options", "matmuls", "attentions"),
    [
        # Each of 2 Llama blocks has 7 matmuls, of which the last is not needed for gradients, and 1 attention.
        (dict(mode="none"), 0, 0),
        (dict(mode="full"), 12, 2),
        (dict(mode="selective"), 6, 0),  # a block saves 4 of its 7 matmuls, and the attention
    ],
    ids=lambda value: value["mode"] if isinstance(value, dict) else "",
)
def test_number_of_recomputed_operations(options: dict[str, Any], matmuls: int, attentions: int) -> None:
    with torch.device("meta"):
        model = build_model(LLAMA)
    initialize(model, torch.device("cpu"), 0)
    names = list(model.state_dict())
    apply_activation_checkpoint(blocks(model), **options)
    with Operations() as forward:
        loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
    with Operations() as backward:
        loss.backward()
    assert operations_of(forward.counts)[0] == 15  # with the head
    assert operations_of(backward.counts) == (2 * 15 + matmuls, attentions)
    assert list(model.state_dict()) == names


@contextmanager
def offloaded() -> Iterator[list[_Host]]:
    """Yields what is offloaded, which is tensors of any size."""
    made: list[_Host] = []
    initialize = _Host.__init__

    def record(host: _Host, *arguments: Any) -> None:
        made.append(host)
        initialize(host, *arguments)

    with patch.object(activation_offload, "MIN_BYTES", 1), patch.object(_Host, "__init__", record):
        yield made


def _train(recipe: PretrainRecipe) -> int:
    """Trains, and offloads tensors of any size. Returns the number of copies to the host."""
    with offloaded() as made:
        train_on_rank(recipe)
    return len(made)


CASES: dict[str, tuple[Tier, dict[str, Any]]] = {
    "one process, full, bfloat16": (
        DEFAULT, dict(parallelism=dict(shard=1), training=dict(compute_dtype="bfloat16", steps=2)) | FULL,
    ),
    "FSDP, compiled": (SLOW, dict(parallelism=dict(shard=2)) | COMPILED),
    "TP, GPT": (SLOW, dict(parallelism=dict(shard=1, tensor=2), model=GPT_)),
    "PP zbv": (
        EVERY,
        dict(parallelism=dict(shard=1, pipeline=2, pipeline_schedule="zbv"), model=replace(LLAMA, num_layers=4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sections", rows_of(CASES))
def test_a_run_is_the_same_to_the_bit(ranks: Ranks, tmp_path: Path, sections: dict[str, Any]) -> None:
    plain = tiny(tmp_path, "plain", **{"training": dict(steps=2)} | sections)
    section = replace(plain.activation_checkpoint, offload=True)
    offloading = replace(plain, activation_checkpoint=section, run=replace(plain.run, name="offloading"))
    pool = ranks(world_size(plain))
    assert set(pool.run(_train, plain)) == {0}
    assert min(pool.run(_train, offloading)) >= 5
    assert_identical(result(offloading), result(plain))


class Block(nn.Module):
    """Keeps its input, both halves of `hidden`, which are views of it, and the activation of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up(x).chunk(2)
        return x + self.down(torch.cat([first.sigmoid() * first, second.sigmoid() * second]))


@pytest.mark.parametrize(("mode", "copies"), [("none", 6), ("full", 1)])
def test_what_a_block_keeps_is_copied_once_and_freed(mode: Any, copies: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(16, 32)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    apply_activation_checkpoint(list(model), mode=mode)
    apply_activation_offload(list(model))
    with offloaded() as made:
        loss = model(x).square().sum()
    # Neither the weights nor what the last block keeps.
    assert [tuple(host.copy.shape) for host in made].count((16, 32)) == 3
    assert len(made) == 3 * copies
    assert all(host.source is None for host in made)  # the device memory is free before the backward pass
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, gradients, expected))
    assert all(host.fetched is None for host in made)
