"""Memory from formulas against that of simulated steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_memory.simulate import simulate
from titanlike.config.optimizer import OptimizerGroup
from titanlike.models.bert.config import BERT_SIZES, BertConfig
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.moe.config import MixtralConfig, Qwen3MoeConfig
from titanlike.models.olmo2.config import Olmo2Config
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.programs import load_known

RECIPES = Path(__file__).parents[2] / "train_configs"


def job(name: str, num_gpus: int, **sections: dict[str, Any]) -> Job:
    """Returns a shipped recipe with changes, by default without compilation."""
    path = RECIPES / f"{name}.toml"
    recipe: PretrainRecipe = PretrainRecipe()
    if name.startswith(("dpo", "distill", "modernbert", "t5", "seq2seq")):
        recipe = load_known(path, {})
    else:
        recipe = load(FinetuneRecipe if "lora" in sections else PretrainRecipe, path)
    sections = {"compile": dict(mode="none")} | sections
    changes: dict[str, Any] = {key: replace(getattr(recipe, key), **values) for key, values in sections.items()}
    return Job(replace(recipe, **changes), num_gpus)


def mixture(published: Any, num_gpus: int = 8, *, further: int = 0, **sections: dict[str, Any]) -> Job:
    """Returns a published size with four blocks, which predicts a number of further tokens."""
    base = job("llama3_8b", num_gpus, **{"training": dict(seq_len=4096, local_batch_size=1)} | sections)
    cls, size = published
    model = cls(**{"size": size, **cls.sizes[size], "num_layers": 4} | ({"num_mtp_layers": further} if further else {}))
    return Job(replace(base.recipe, model=model), num_gpus)


def bert(**sections: dict[str, Any]) -> Job:
    """Returns BERT base on 8 GPUs."""
    base = job("modernbert_base", 8, **sections, training=dict(seq_len=512))
    return Job(replace(base.recipe, model=BertConfig(size="base", **BERT_SIZES["base"])), 8)


COMPILED = dict(mode="block")
ONE = dict(local_batch_size=1, global_batch_size=64)
PIPELINE = dict(pipeline=4, shard=2)
FOUR = dict(num_layers=4)
BOTH = dict(model=FOUR, teacher=FOUR)
MUON = dict(groups=(OptimizerGroup(pattern="layers.*.weight", optimizer="muon"),))
QWEN3_MOE, MIXTRAL = (Qwen3MoeConfig, "30B-A3B"), (MixtralConfig, "8x7B")
MOONLIGHT = DeepseekV3Config, "Moonlight-16B"
NONE, SELECTIVE, FULL = (dict(activation_checkpoint=dict(mode=mode)) for mode in ("none", "selective", "full"))
LAST = dict(parallelism=dict(gradient_sync="last_microbatch"), training=dict(local_batch_size=1, global_batch_size=32))
LONG = dict(model=FOUR, training=dict(global_batch_size=8), parallelism=dict(context=4))
CASES: dict[str, tuple[Job, int]] = {
    "one GPU": (job("gpt2_124m", 1), 0),
    "TP x FSDP, selective": (job("llama3_8b", 8, parallelism=dict(tensor=2)), 0),
    "PP x FSDP, second rank": (job("llama3_8b", 8, parallelism=PIPELINE, training=ONE), 1),
    "MoE, EP x FSDP, selective": (
        mixture(QWEN3_MOE, 16, parallelism=dict(expert=4), training=dict(seq_len=4096, local_batch_size=4)), 0,
    ),
    "FSDP, last micro-batch": (job("llama3_8b", 8, model=FOUR, **LAST), 0),
    "LoRA, FSDP, last micro-batch": (job("llama3_8b", 8, model=FOUR, lora=dict(rank=16), **FULL, **LAST), 0),
    "LoRA, FSDP, selective": (job("llama3_8b", 8, model=FOUR, lora=dict(rank=16)), 0),
    "DPO, FSDP, second model": (job("dpo_llama3_8b", 8, model=FOUR), 0),
    "ModernBERT, FSDP": (job("modernbert_base", 8), 0),
    "T5": (job("seq2seq_debug", 1), 0),
    "Distillation, FSDP": (job("distill_llama3_1b", 8, model=FOUR, teacher=FOUR), 0),
    "FSDP, CPU offload": (job("llama3_8b", 8, model=FOUR, parallelism=dict(cpu_offload=True)), 0),
    "CP x FSDP, 128k": (job("llama3_8b_128k", 32, **NONE, **LONG), 0),
}  # fmt: skip
SLOW_CASES: dict[str, tuple[Job, int]] = {
    "FSDP": (job("llama3_8b", 8, **NONE), 0),
    "FSDP, full": (job("llama3_8b", 8, **FULL), 0),
    "float8": (job("llama3_8b_float8", 8, model=FOUR), 0),
    "FSDP, selective, compiled": (job("llama3_8b", 8, compile=COMPILED), 0),
    "PP x FSDP, compiled": (job("llama3_8b", 8, compile=COMPILED, parallelism=PIPELINE, training=ONE), 0),
    "Qwen2, TP x FSDP, selective": (job("qwen2_5_7b", 8, model=FOUR, parallelism=dict(tensor=2)), 0),
    "Gemma 3, TP x FSDP, selective": (job("gemma3_4b", 8, model=FOUR, parallelism=dict(tensor=2), **SELECTIVE), 0),
    "BERT, selective": (bert(**SELECTIVE), 0),
    "BERT, TP, full": (bert(parallelism=dict(tensor=2), **FULL), 0),
    "T5, TP, full": (job("t5_base", 8, parallelism=dict(tensor=2), **FULL), 0),
    "T5, FSDP, selective, compiled": (job("t5_base", 8, compile=COMPILED, **SELECTIVE), 0),
    "T5, pairs": (job("t5_base", 8, data=dict(source="text", prompt_field="source")), 0),
    "OLMo-2, TP x FSDP": (mixture((Olmo2Config, "7B"), parallelism=dict(tensor=2), **NONE), 0),
    "MoE, FSDP": (mixture(QWEN3_MOE, **NONE), 0),
    "DPO, LoRA, TP x FSDP": (job("dpo_llama3_8b", 8, model=FOUR, lora=dict(rank=16), parallelism=dict(tensor=2)), 0),
    "DPO, compiled, chunks": (
        job(
            "dpo_llama3_8b",
            8,
            model=FOUR,
            compile=COMPILED,
            training=dict(loss_chunk=1024),
            parallelism=dict(context=2),
        ),
        0,
    ),
    "Distillation, TP x FSDP, chunks": (
        job("distill_llama3_1b", 8, **BOTH, training=dict(loss_chunk=1024), parallelism=dict(tensor=2)),
        0,
    ),
    "Distillation, LoRA, compiled": (job("distill_llama3_1b", 8, **BOTH, lora=dict(rank=16), compile=COMPILED), 0),
    "MTP, FSDP": (mixture(MOONLIGHT, further=1, **NONE), 0),
    "MTP, TP x FSDP, full": (mixture(MOONLIGHT, further=1, parallelism=dict(tensor=2), **FULL), 0),
    "Muon, FSDP, full": (job("llama3_8b", 8, model=FOUR, optimizer=MUON, **FULL), 0),
    "MoE, EP, full": (mixture(MIXTRAL, parallelism=dict(expert=8), **FULL), 0),
}


@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES.values())],
    ids=[*CASES, *SLOW_CASES],
)  # fmt: skip
def test_formulas_give_the_memory_of_a_simulated_step(case: tuple[Job, int]) -> None:
    planned, rank = case
    formula, simulated = memory(planned, rank), simulate(planned, rank)
    assert formula.allocated == pytest.approx(simulated.allocated, rel=0.05)
    assert formula.reserved == pytest.approx(simulated.reserved, rel=0.05)
    assert formula.fragmentation == simulated.fragmentation


def test_gradients_that_replace_what_has_accumulated_need_no_more_memory() -> None:
    planned = CASES["FSDP, last micro-batch"][0]
    before, after = memory(planned), memory(job("llama3_8b", 8, model=FOUR, training=LAST["training"]))
    # Before the last reduction, a rank has all gradients in float32, instead of its eighth.
    gradients = 4 * planned.recipe.model.num_parameters() * 7 / 8
    assert before.allocated - after.allocated == pytest.approx(gradients, rel=0.01)
    assert before.reserved == pytest.approx(1.055 * before.allocated)


def test_a_deep_model_is_extrapolated_from_a_few_blocks() -> None:
    deep = job("llama3_8b", 8, model=dict(num_layers=12), activation_checkpoint=dict(mode="full"))
    with pytest.MonkeyPatch.context() as patch:
        found = simulate(deep)
        patch.setattr("tests.simulated_memory.simulate.DEPTH", 11)
        all_blocks = simulate(deep)
    assert [moment.label for moment in found.moments if "block" in moment.label] == [
        moment.label for moment in all_blocks.moments if "block" in moment.label
    ]
    for moment, expected in zip(found.moments, all_blocks.moments, strict=True):
        assert moment.usage.total == pytest.approx(expected.usage.total, rel=0.01), moment.label


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
