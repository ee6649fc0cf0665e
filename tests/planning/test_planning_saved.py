"""What compiled blocks keep for their backward pass, from formulas against the compiler's partitioner."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulated_memory.compiled import saved_by_blocks
from tests.simulated_memory.jobs import job
from titanlike.tools.planning.activations import block_activations, weight_copies
from titanlike.tools.planning.job import Job


def compiled(name: str, mode: str, **layout: int) -> Job:
    """Returns a shipped recipe on 8 GPUs with a block of each kind, compiled, and with micro-batches of one sequence."""
    found = job(
        name,
        8,
        compile=dict(mode="block"),
        activation_checkpoint=dict(mode=mode),
        parallelism=dict(tensor=1, pipeline=1, expert=1) | layout,
        training=dict(local_batch_size=1, global_batch_size=8),
    )
    model: Any = found.recipe.model
    fewer = dict(num_dense_layers=1) if model.num_dense_layers else {}
    model = replace(model, num_layers=2, **fewer)
    return replace(found, recipe=replace(found.recipe, model=model))


@pytest.mark.parametrize(
    ("name", "mode", "layout"),
    [
        ("llama3_8b", "selective", dict(context=2)),
        ("gemma2_9b", "none", {}),
        ("qwen3_30b_a3b", "selective", dict(expert=4)),
        ("deepseek_v2_lite", "none", {}),
        pytest.param("llama3_8b", "none", dict(tensor=2, context=2), marks=pytest.mark.slow),
        pytest.param("llama3_8b", "full", {}, marks=pytest.mark.slow),
        pytest.param("gemma3_12b", "selective", dict(tensor=2), marks=pytest.mark.slow),
        pytest.param("qwen3_30b_a3b", "none", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_30b_a3b", "full", dict(tensor=2, expert=4), marks=pytest.mark.slow),
        pytest.param("deepseek_v3_671b", "selective", dict(tensor=2, expert=4), marks=pytest.mark.slow),
    ],
)
def test_formulas_give_what_compiled_blocks_save(name: str, mode: str, layout: dict[str, int]) -> None:
    planned = compiled(name, mode, **layout)
    found = saved_by_blocks(planned)
    assert len(found) == planned.recipe.model.num_layers
    for index, size in enumerate(found):
        formula = block_activations(planned, index).saved * planned.tokens + weight_copies(planned, index)[1]
        assert formula == pytest.approx(size, rel=0.005), f"block {index}"
