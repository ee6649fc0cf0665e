"""What compiled blocks keep for their backward pass, from formulas against the compiler's partitioner."""

from dataclasses import replace
from typing import Any

import pytest

from tests.planning.test_planning_memory import job
from tests.simulated_memory.compiled import saved_by_blocks
from titanlike.tools.planning.activations import block_activations, weight_copies
from titanlike.tools.planning.job import Job


def compiled(name: str, num_gpus: int, mode: str, *, tensor: int = 1, **parallelism: int) -> Job:
    """Returns the job of a shipped recipe with a block of each kind, compiled, with a micro-batch of one sequence."""
    found = job(
        name,
        num_gpus,
        compile=dict(mode="block"),
        activation_checkpoint=dict(mode=mode),
        parallelism=dict(tensor=tensor, pipeline=1, expert=1) | parallelism,
        training=dict(local_batch_size=1, global_batch_size=num_gpus),
    )
    model: Any = found.recipe.model
    fewer = dict(num_dense_layers=1) if model.num_dense_layers else {}
    model = replace(model, num_layers=2, **fewer)
    return replace(found, recipe=replace(found.recipe, model=model))


CP = dict(context=2)
EP = dict(expert=4)
CASES: dict[str, Job] = {
    "Llama": compiled("llama3_8b", 8, "none"),
    "Llama, CP": compiled("llama3_8b", 8, "none", **CP),
    "Llama, CP, selective": compiled("llama3_8b", 8, "selective", **CP),
    "Gemma 2": compiled("gemma2_9b", 8, "none"),
    "Qwen3 MoE, EP, selective": compiled("qwen3_30b_a3b", 8, "selective", **EP),
    "DeepSeek-V2-Lite": compiled("deepseek_v2_lite", 8, "none"),
    "DeepSeek-V2-Lite, selective": compiled("deepseek_v2_lite", 8, "selective"),
}
SLOW_CASES: dict[str, Job] = {
    "Llama, one GPU": compiled("llama3_1b", 1, "none"),
    "Llama, selective": compiled("llama3_8b", 8, "selective"),
    "Llama, full": compiled("llama3_8b", 8, "full"),
    "Llama, TP": compiled("llama3_8b", 8, "none", tensor=2),
    "Llama, TP x CP, selective": compiled("llama3_8b", 8, "selective", tensor=2, **CP),
    "Gemma 2, TP": compiled("gemma2_9b", 8, "none", tensor=2),
    "Gemma 2, selective": compiled("gemma2_9b", 8, "selective"),
    "Gemma 3": compiled("gemma3_12b", 8, "none"),
    "Gemma 3, TP, selective": compiled("gemma3_12b", 8, "selective", tensor=2),
    "Qwen3 MoE": compiled("qwen3_30b_a3b", 8, "none"),
    "Qwen3 MoE, selective": compiled("qwen3_30b_a3b", 8, "selective"),
    "Qwen3 MoE, EP": compiled("qwen3_30b_a3b", 8, "none", **EP),
    "Qwen3 MoE, EP, full": compiled("qwen3_30b_a3b", 8, "full", **EP),
    "Qwen3 MoE, EP x TP": compiled("qwen3_30b_a3b", 8, "none", tensor=2, **EP),
    "Qwen3 MoE, EP x TP, selective": compiled("qwen3_30b_a3b", 8, "selective", tensor=2, **EP),
    "DeepSeek-V2-Lite, CP": compiled("deepseek_v2_lite", 8, "none", **CP),
    "DeepSeek-V2-Lite, EP, selective": compiled("deepseek_v2_lite", 8, "selective", **EP),
    "DeepSeek-V3": compiled("deepseek_v3_671b", 8, "none"),
    "DeepSeek-V3, EP x TP, selective": compiled("deepseek_v3_671b", 8, "selective", tensor=2, **EP),
}


@pytest.mark.parametrize(
    "planned", [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES.values())],
    ids=[*CASES, *SLOW_CASES],
)  # fmt: skip
def test_formulas_give_what_compiled_blocks_save(planned: Job) -> None:
    found = saved_by_blocks(planned)
    assert len(found) == planned.recipe.model.num_layers
    for index, size in enumerate(found):
        formula = block_activations(planned, index).saved * planned.tokens + weight_copies(planned, index)[1]
        assert formula == pytest.approx(size, rel=0.005), f"block {index}"
