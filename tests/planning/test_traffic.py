"""The calls and bytes of every collective of a step, by kind and mesh axis: those that the planner computes are those counted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity import CASES, MUON_ATTENTION
from tests.parity import Case as ParityCase
from tests.pool import Ranks
from tests.traffic import count, planned
from tests.training import (
    BERT,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA2,
    GPT_OSS,
    MODELS,
    MODERNBERT,
    MULTI_TOKEN,
    OLMO2,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SHARED_EXPERTS,
    T5,
    tiny,
)
from titanlike.config.dpo import PreferenceData
from titanlike.config.sections import Parallelism
from titanlike.tools.planning.job import Job


def assert_planned(ranks: Ranks, folder: Path, model: Any, layout: dict[str, Any], **sections: Any) -> None:
    """Asserts that the traffic of each rank is what the planner computes."""
    parallelism = Parallelism(**({"shard": 1} | layout))
    sections["training"] = dict(compute_dtype="bfloat16", seq_len=32) | sections.get("training", {})
    recipe = tiny(folder, "run", model=model, parallelism=parallelism, **sections)
    world_size = math.prod(parallelism.dimensions().values())
    job = Job(recipe, world_size)
    for rank, (found, pipeline_rank) in enumerate(ranks(world_size).run(count, recipe)):
        assert found == planned(job, pipeline_rank), f"rank {rank}"


QUICK = ("HSDP", "TP x FSDP", "PP zbv x FSDP", "PP 1f1b x CP")


def tier(case: ParityCase, model: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a case of the parity table: a sixth of them are slow tests, and the models alternate."""
    index = CASES.index(case)
    is_turn = len(case.models) == 1 or index % 2 == list(MODELS).index(model)
    if is_turn and case.name in QUICK:
        return []
    return [pytest.mark.slow if is_turn and index % 6 == 0 and "compile" not in case.sections else pytest.mark.every]


@pytest.mark.parametrize(
    ("case", "model"),
    [
        pytest.param(case, model, id=f"{case.name}-{model}", marks=tier(case, model))
        for case in CASES
        for model in case.models
    ],
)
def test_layouts_of_the_parity_table(ranks: Ranks, tmp_path: Path, case: ParityCase, model: str) -> None:
    config = replace(MODELS[model], num_layers=4, **({"dropout": case.dropout} if case.dropout else {}))
    sections = dict(case.sections, training=dict(local_batch_size=case.local_batch_size))
    assert_planned(ranks, tmp_path, config, case.layout, **sections)


LLAMA, GPT = (replace(MODELS[name], num_layers=4) for name in ("llama", "gpt"))
TIED = replace(LLAMA, tied_head=True)
ODD = replace(
    LLAMA, dim=60, num_heads=2, num_kv_heads=2, ffn_dim=92, vocab_size=322
)  # three ranks divide none of these
FSDP, TP, CP, PP, ZBV = dict(shard=2), dict(tensor=2), dict(context=2), dict(pipeline=2), dict(pipeline_schedule="zbv")
ALWAYS, NEVER = dict(reshard_after_forward="always"), dict(reshard_after_forward="never")
LAST = dict(gradient_sync="last_microbatch")
FULL, SELECTIVE = ({"activation_checkpoint": dict(mode=mode)} for mode in ("full", "selective"))


def training(**values: Any) -> dict[str, Any]:
    return {"training": values}


def float8(scaling: str = "tensorwise", **values: Any) -> dict[str, Any]:
    return {"float8": dict(scaling=scaling, layers=("*",), emulate=True, **values)}


def lora(*layers: str) -> dict[str, Any]:
    return {"lora": dict(rank=4, layers=layers)}


TWO = training(local_batch_size=2)
GATHER = float8(all_gather=True)
MASKS = {"data": dict(document_masks=True)}

# Name: layout, model, other sections. Those whose name starts with * run with `-m every` only.
OTHERS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "*FSDP, always resharded": (FSDP | ALWAYS, LLAMA, {}),
    "*FSDP, never resharded": (FSDP | NEVER, LLAMA, {}),
    "FSDP, last micro-batch": (FSDP | LAST, LLAMA, {}),
    "*HSDP, last micro-batch": (FSDP | LAST | dict(replicate=2), LLAMA, {}),
    "*FSDP, reduction in bfloat16": (FSDP, LLAMA, training(reduce_dtype="bfloat16")),
    "*FSDP, tied": (FSDP, TIED, {}),
    "PP 1f1b x FSDP, tied": (FSDP | PP, TIED, TWO),
    "*PP 1f1b x FSDP, always resharded": (FSDP | PP | ALWAYS, LLAMA, training(local_batch_size=1)),
    "PP interleaved x FSDP, 4 stages per rank": (
        FSDP | PP | dict(pipeline_schedule="interleaved_1f1b", pipeline_stages=4),
        replace(LLAMA, num_layers=8),
        TWO,
    ),
    "*TP, full checkpointing": (TP, LLAMA, FULL),
    "TP, chunked loss": (TP, LLAMA, training(loss_chunk=20)),
    "*CP, document masks": (CP, LLAMA, MASKS),
    "FSDP, uneven": (dict(shard=3), ODD, training(global_batch_size=12)),
    "*FSDP, float8 all-gather": (FSDP, LLAMA, GATHER),
    "*TP, float8": (TP, LLAMA, float8()),
    "*TP, float8, gpt": (TP, GPT, float8()),
    "*TP, float8 rowwise": (TP, LLAMA, float8("rowwise")),
    "*TP, float8 without wk": (TP, LLAMA, float8(skip=("wk",))),
    "*TP, float8 without w2 and block 0": (TP, LLAMA, float8(skip=("w2", "layers.0"))),
    "*TP, float8 with the head": (TP, LLAMA, float8(head=True)),
    "*TP x FSDP, float8": (TP | FSDP, LLAMA, float8()),
    "TP x FSDP, float8 all-gather": (TP | FSDP, LLAMA, GATHER),
    "*CP, float8": (CP, LLAMA, float8()),
    "*TP x FSDP, Qwen2": (TP | FSDP, QWEN2, {}),
    "*TP x FSDP, Qwen3": (TP | FSDP, QWEN3, {}),
    "TP x FSDP, OLMo-2": (TP | FSDP, OLMO2, {}),
    "*TP, OLMo-2, full checkpointing": (TP, OLMO2, FULL),
    "*TP, OLMo-2, LoRA": (TP, OLMO2, lora("wq", "w2")),
    "TP x FSDP, Gemma 2": (TP | FSDP, GEMMA2, {}),
    "*CP x TP, Gemma 2, full checkpointing": (CP | TP, GEMMA2, FULL),
    "TP x FSDP, BERT": (TP | FSDP, BERT, {}),
    "*TP x FSDP, BERT, full checkpointing": (TP | FSDP, BERT, FULL),
    "*PP 1f1b x TP, ModernBERT": (PP | TP, MODERNBERT, TWO),
    "CP x TP, ModernBERT, document masks": (CP | TP, MODERNBERT, MASKS),
    "*FSDP, LoRA": (FSDP, LLAMA, lora()),
    "*TP x FSDP, LoRA": (TP | FSDP, LLAMA, lora()),
    "*TP, LoRA, gpt": (TP, GPT, lora("wq", "w2")),
    "*CP, LoRA": (CP, LLAMA, lora("wq", "layers.1.attention.wk")),
}
EP, FSDP4 = dict(expert=2), dict(shard=4)
COMPILED = {"compile": dict(mode="block", backend="aot_eager")}
OTHERS |= {
    "*MoE, FSDP": (FSDP, QWEN3_MOE, {}),
    "*MoE, TP": (TP, QWEN3_MOE, {}),
    "MoE, CP x TP, full checkpointing": (CP | TP, SHARED_EXPERTS, FULL),
    "MoE, EP": (FSDP | EP, QWEN3_MOE, {}),
    "*MoE, EP, full checkpointing": (FSDP | EP, QWEN3_MOE, FULL),
    "MoE, EP x FSDP": (FSDP4 | EP, SHARED_EXPERTS, {}),
    "MoE, EP x TP": (FSDP | TP | EP, SHARED_EXPERTS, {}),
    "*MoE, FSDP, fewer experts than ranks": (FSDP4, replace(QWEN3_MOE, num_experts=3), {}),
    "*MoE, TP, shared experts": (TP, SHARED_EXPERTS, {}),
    "*MoE, CP": (CP, QWEN3_MOE, {}),
    "*MoE, EP x HSDP": (FSDP | EP | dict(replicate=2), QWEN3_MOE, {}),
    "*MoE, EP x CP": (CP | FSDP | EP, SHARED_EXPERTS, {}),
    "*MoE, EP x TP x FSDP": (FSDP4 | TP | EP, QWEN3_MOE, {}),
    "*MoE, EP x FSDP, full checkpointing": (FSDP4 | EP, QWEN3_MOE, FULL),
    "*MoE, EP x TP, shared experts, selective checkpointing": (FSDP | TP | EP, SHARED_EXPERTS, SELECTIVE),
    "*MoE, EP, selective checkpointing": (FSDP | EP, QWEN3_MOE, SELECTIVE),
    "*MoE, EP x PP 1f1b x FSDP": (FSDP4 | PP | EP, SHARED_EXPERTS, training(local_batch_size=1, global_batch_size=16)),
    "*MoE, EP x PP zbv x FSDP": (FSDP | PP | ZBV | EP, QWEN3_MOE, TWO),
    "*MoE, EP x FSDP, always resharded": (FSDP4 | EP | ALWAYS, QWEN3_MOE, {}),
    "*MoE, EP x FSDP, last micro-batch": (FSDP4 | EP | LAST, QWEN3_MOE, {}),
    "*MoE, EP x FSDP, compiled": (FSDP4 | EP, QWEN3_MOE, COMPILED),
    "*MoE, EP, compiled, selective checkpointing": (FSDP | EP, QWEN3_MOE, COMPILED | SELECTIVE),
    "*MoE, EP x FSDP, LoRA": (FSDP4 | EP, QWEN3_MOE, lora("attention")),
    "*MoE, EP x FSDP, float8 all-gather": (FSDP4 | EP, QWEN3_MOE, GATHER),
}
OTHERS |= {
    "MLA, EP x TP": (FSDP | TP | EP, DEEPSEEK_V3, {}),
    "*MLA, CP x TP, full checkpointing": (CP | TP, DEEPSEEK_V2, FULL),
    "*MLA, EP x PP zbv x FSDP": (FSDP | PP | ZBV | EP, DEEPSEEK_V3, TWO),
    "*MLA, TP x FSDP, float8 all-gather": (TP | FSDP, replace(DEEPSEEK_V3, v_head_dim=24), GATHER),
    "*MLA, TP, float8": (TP, replace(DEEPSEEK_V3, v_head_dim=24), float8()),
    "*MLA, TP x FSDP, Muon": (TP | FSDP, DEEPSEEK_V3, {"optimizer": MUON_ATTENTION, "run": dict(device="cpu")}),
    "*MLA, TP, LoRA": (TP, DEEPSEEK_V3, lora("attention")),
    "*MLA, CP, LoRA": (CP, DEEPSEEK_V2, lora("wq", "layers.2.attention.wkv_b")),
}
OTHERS |= {
    "Sinks, EP x TP": (FSDP | TP | EP, GPT_OSS, {}),
    "*Sinks, TP": (TP, GPT_OSS, {}),
    "*Sinks, CP x TP, full checkpointing": (CP | TP, GPT_OSS, FULL),
    "*Sinks, CP, document masks": (CP, GPT_OSS, MASKS),
    "*Sinks, EP x TP x FSDP": (FSDP4 | TP | EP, GPT_OSS, {}),
    "*Sinks, FSDP, fewer experts than ranks": (FSDP4, replace(GPT_OSS, num_experts=3), {}),
    "*Sinks, EP x PP zbv x FSDP": (FSDP | PP | ZBV | EP, GPT_OSS, TWO),
    "*Sinks, TP x FSDP, float8 all-gather": (TP | FSDP, GPT_OSS, GATHER),
    "*Sinks, TP x FSDP, Muon": (TP | FSDP, GPT_OSS, {"optimizer": MUON_ATTENTION, "run": dict(device="cpu")}),
    "*Sinks, EP x FSDP, LoRA": (FSDP4 | EP, GPT_OSS, lora("attention")),
    "T5, TP x FSDP": (TP | FSDP, T5, {}),
    "*T5, FSDP, always resharded": (FSDP | ALWAYS, T5, {}),
    "*T5, FSDP, never resharded": (FSDP | NEVER, T5, {}),
    "*T5, HSDP": (FSDP | dict(replicate=2), T5, {}),
    "*T5, TP, full checkpointing": (TP, T5, FULL | training(loss_chunk=20)),
}
CLIP = {"optimizer": MUON_ATTENTION | dict(muon_qk_clip=1.0), "run": dict(device="cpu")}
OTHERS |= {
    "QK-clip, TP x FSDP": (TP | FSDP, DEEPSEEK_V3, CLIP),
    "*QK-clip, CP x TP, full checkpointing": (CP | TP, DEEPSEEK_V2, CLIP | FULL),
    "*QK-clip, PP x FSDP": (FSDP | PP, DEEPSEEK_V3, CLIP | TWO),
}
MULTI_TOKEN = replace(MULTI_TOKEN, v_head_dim=24)
OTHERS |= {
    "MTP, EP x TP": (FSDP | TP | EP, MULTI_TOKEN, {}),
    "*MTP, CP x TP, full checkpointing": (CP | TP, MULTI_TOKEN, FULL),
    "*MTP, TP x FSDP, chunks": (TP | FSDP, MULTI_TOKEN, training(loss_chunk=20)),
    "*MTP, TP, float8": (TP, MULTI_TOKEN, float8()),
}
PAIRS = {"data": PreferenceData(source="synthetic_preference")}
UNBALANCED = replace(QWEN3_MOE, balance_loss=0.0)
OTHERS |= {
    "DPO, FSDP": (FSDP, LLAMA, PAIRS),
    "DPO, CP x TP": (CP | TP, TIED, PAIRS),
    "DPO, TP x FSDP, LoRA": (TP | FSDP, LLAMA, PAIRS | lora() | training(loss_chunk=20)),
    "*DPO, HSDP, LoRA with a second model": (
        FSDP | dict(replicate=2), LLAMA, PAIRS | lora() | {"preference": dict(reference="model")},
    ),
    "*DPO, CP x FSDP, full checkpointing": (CP | FSDP, LLAMA, PAIRS | FULL),
    "*DPO, TP, SimPO": (TP, LLAMA, PAIRS | {"preference": dict(loss="simpo")}),
    "*DPO, EP x FSDP": (FSDP4 | EP, UNBALANCED, PAIRS),
    "*DPO, EP x TP": (FSDP | TP | EP, UNBALANCED, PAIRS),
    "*DPO, FSDP, never resharded": (FSDP | NEVER, LLAMA, PAIRS),
}  # fmt: skip
TEACHER = {"teacher": replace(LLAMA, dim=96, num_heads=6, num_layers=5), "distillation": dict(teacher="random")}
TIED_TEACHER = TEACHER | {"teacher": TIED}
SOFTENED = {"distillation": dict(teacher="random", temperature=2.0, loss="reverse_kl")}
OTHERS |= {
    "Distillation, FSDP": (FSDP, LLAMA, TEACHER),
    "Distillation, CP x TP, chunks": (CP | TP, TIED, TEACHER | SOFTENED | MASKS | training(loss_chunk=20)),
    "Distillation, EP x TP": (FSDP | TP | EP, QWEN3_MOE, TEACHER | {"teacher": SHARED_EXPERTS}),
    "*Distillation, TP x FSDP, tied teacher, LoRA": (TP | FSDP, LLAMA, TIED_TEACHER | lora()),
    "*Distillation, HSDP, always resharded": (FSDP | ALWAYS | dict(replicate=2), GPT, TIED_TEACHER),
    "*Distillation, FSDP, never resharded": (FSDP | NEVER, LLAMA, TEACHER),
    "*Distillation, CP x FSDP, full checkpointing": (CP | FSDP, LLAMA, TEACHER | FULL),
    "*Distillation, EP x CP": (CP | FSDP | EP, SHARED_EXPERTS, TEACHER | {"teacher": QWEN3_MOE}),
    "*Distillation, TP x FSDP, float8": (TP | FSDP, LLAMA, TEACHER | float8()),
    "*Distillation, FSDP, float8 all-gather": (FSDP, LLAMA, TEACHER | GATHER),
    "*Distillation, TP, float8 with the head": (TP, LLAMA, TEACHER | float8(head=True)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.every if name.startswith("*") else pytest.mark.slow) for name in OTHERS],
)
def test_other_recipes(ranks: Ranks, tmp_path: Path, name: str) -> None:
    layout, model, sections = OTHERS[name]
    assert_planned(ranks, tmp_path, model, layout, **sections)
