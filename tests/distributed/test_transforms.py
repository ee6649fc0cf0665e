"""Compilation, activation checkpointing and mixed precision: parity with a plain run, and their effect."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Ranks
from tests.training import LLAMA, Observer, Operations, build, tiny
from titanlike.config.sections import Training
from titanlike.models.common.init import initialize
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint


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
        # Each of 3 Llama blocks has 7 matmuls, of which the last is not needed for gradients, and 1 attention.
        (dict(mode="none"), 0, 0),
        (dict(mode="full"), 18, 3),
        (dict(mode="selective"), 9, 0),  # a block saves 4 of its 7 matmuls, and the attention
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
    assert operations_of(forward.counts)[0] == 22  # with the head
    assert operations_of(backward.counts) == (2 * 22 + matmuls, attentions)
    assert list(model.state_dict()) == names
