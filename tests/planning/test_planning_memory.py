"""Memory from formulas against that of simulated steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulated_memory.jobs import job
from tests.simulated_memory.simulate import simulate
from titanlike.config.optimizer import OptimizerGroup
from titanlike.models.bert.config import BERT_SIZES, BertConfig
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.moe.config import MixtralConfig, Qwen3MoeConfig
from titanlike.models.olmo2.config import Olmo2Config
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory


def mixture(published: Any, num_gpus: int = 8, *, further: int = 0, **sections: dict[str, Any]) -> Job:
    """Returns a published size with three blocks, which predicts a number of further tokens."""
    base = job("llama3_8b", num_gpus, **{"training": dict(seq_len=4096, local_batch_size=1)} | sections)
    cls, size = published
    model = cls(**{"size": size, **cls.sizes[size], "num_layers": 3} | ({"num_mtp_layers": further} if further else {}))
    return Job(replace(base.recipe, model=model), num_gpus)


def bert(**sections: dict[str, Any]) -> Job:
    """Returns BERT base on 8 GPUs."""
    base = job("modernbert_base", 8, **sections, training=dict(seq_len=512))
    return Job(replace(base.recipe, model=BertConfig(size="base", **BERT_SIZES["base"])), 8)


FEW = dict(num_layers=3)  # as many as FSDP gathers at a time
BOTH = dict(model=FEW, teacher=FEW)
MUON = dict(groups=(OptimizerGroup(pattern="layers.*.weight", optimizer="muon"),))
QWEN3_MOE, MIXTRAL = (Qwen3MoeConfig, "30B-A3B"), (MixtralConfig, "8x7B")
MOONLIGHT = DeepseekV3Config, "Moonlight-16B"
NONE, SELECTIVE, FULL = (dict(activation_checkpoint=dict(mode=mode)) for mode in ("none", "selective", "full"))
EIGHT = dict(local_batch_size=1, global_batch_size=16)  # micro-batches of a pipeline
LAST = dict(parallelism=dict(gradient_sync="last_microbatch"), training=dict(local_batch_size=1, global_batch_size=32))
LONG = dict(model=FEW, training=dict(global_batch_size=8), parallelism=dict(context=4))


def last_microbatch() -> Job:
    return job("llama3_8b", 8, model=FEW, **LAST)


@pytest.mark.parametrize(
    ("planned", "rank"),
    [
        # tests/planning/test_planning_null_gpu.py has the shipped recipes, whose blocks are compiled.
        pytest.param(lambda: job("gpt2_124m", 1, model=FEW), 0, id="one GPU"),
        pytest.param(lambda: job("llama3_8b", 8, model=FEW, parallelism=dict(tensor=2)), 0, id="TP x FSDP, selective"),
        pytest.param(
            lambda: job("llama3_8b", 8, model=dict(num_layers=8), parallelism=dict(pipeline=4, shard=2), training=EIGHT),
            1, id="PP x FSDP, second rank",
        ),
        pytest.param(
            lambda: mixture(QWEN3_MOE, 16, parallelism=dict(expert=4), training=dict(seq_len=4096, local_batch_size=4)),
            0, id="MoE, EP x FSDP, selective",
        ),
        pytest.param(last_microbatch, 0, id="FSDP, last micro-batch"),
        pytest.param(
            lambda: job("llama3_8b", 8, model=FEW, lora=dict(rank=16), **FULL, **LAST), 0, id="LoRA, FSDP, last micro-batch",
        ),
        pytest.param(lambda: job("llama3_8b_128k", 32, **NONE, **LONG), 0, id="CP x FSDP, 128k"),
        pytest.param(lambda: job("llama3_8b_float8", 8, model=FEW), 0, id="float8", marks=pytest.mark.slow),
        pytest.param(
            lambda: job("gemma3_4b", 8, model=FEW, parallelism=dict(tensor=2), **SELECTIVE),
            0, id="Gemma 3, TP x FSDP, selective", marks=pytest.mark.slow,
        ),
        pytest.param(lambda: bert(parallelism=dict(tensor=2), **FULL), 0, id="BERT, TP, full", marks=pytest.mark.slow),
        pytest.param(
            lambda: job("t5_base", 8, parallelism=dict(tensor=2), **FULL), 0, id="T5, TP, full", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: job("t5_base", 8, data=dict(source="text", prompt_field="source")),
            0, id="T5, pairs", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: mixture((Olmo2Config, "7B"), parallelism=dict(tensor=2), **NONE),
            0, id="OLMo-2, TP x FSDP", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: job("dpo_llama3_8b", 8, model=FEW, lora=dict(rank=16), parallelism=dict(tensor=2)),
            0, id="DPO, LoRA, TP x FSDP", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: job("distill_llama3_1b", 8, **BOTH, training=dict(loss_chunk=1024), parallelism=dict(tensor=2)),
            0, id="Distillation, TP x FSDP, chunks", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: mixture(MOONLIGHT, further=1, parallelism=dict(tensor=2), **FULL),
            0, id="MTP, TP x FSDP, full", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: job("llama3_8b", 8, model=FEW, optimizer=MUON, **FULL), 0, id="Muon, FSDP, full", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: mixture(MIXTRAL, parallelism=dict(expert=8), **FULL), 0, id="MoE, EP, full", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_formulas_give_the_memory_of_a_simulated_step(planned: Callable[[], Job], rank: int) -> None:
    formula, simulated = memory(planned(), rank), simulate(planned(), rank)
    assert formula.allocated == pytest.approx(simulated.allocated, rel=0.05)
    assert formula.reserved == pytest.approx(simulated.reserved, rel=0.05)
    assert formula.fragmentation == simulated.fragmentation


def test_gradients_that_replace_what_has_accumulated_need_no_more_memory() -> None:
    planned = last_microbatch()
    before, after = memory(planned), memory(job("llama3_8b", 8, model=FEW, training=LAST["training"]))
    # Before the last reduction, a rank has all gradients in float32, instead of its eighth.
    gradients = 4 * planned.recipe.model.num_parameters() * 7 / 8
    assert before.allocated - after.allocated == pytest.approx(gradients, rel=0.01)
    assert before.reserved == pytest.approx(1.055 * before.allocated)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        (dict(optimizer=dict(state_dtype="bfloat16")), False),
        (dict(activation_checkpoint=dict(mode="none")), True),
        (dict(training=dict(local_batch_size=2)), True),
        (dict(training=dict(loss_chunk=0)), True),
        (dict(parallelism=dict(gradient_sync="last_microbatch")), True),
        (dict(parallelism=dict(reshard_after_forward="never")), True),
        (dict(parallelism=dict(shard=4, replicate=2)), True),
        (dict(parallelism=dict(cpu_offload=True)), False),
    ],
)
def test_a_change_needs_more_or_less_memory(changes: dict[str, dict[str, Any]], more: bool) -> None:
    before, after = (memory(job("llama3_8b", 8, **sections)).allocated for sections in ({}, changes))
    assert (after > before) is more
    assert after != before


def test_states_are_sharded_over_all_gpus() -> None:
    few, many = (memory(job("llama3_8b", count)).moments[-1].usage for count in (8, 128))
    per_gpu = 16 * job("llama3_8b", 8).recipe.model.num_parameters() / 8
    assert few.parameters + few.gradients + few.optimizer == pytest.approx(per_gpu, rel=0.01)
    assert many.parameters == pytest.approx(few.parameters / 16, rel=0.01)
