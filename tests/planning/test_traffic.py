"""The calls and bytes of every collective of a step, by kind and mesh axis: those that the planner computes are those counted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.balanced_experts import balanced_exchanges
from tests.fake_group import fake_process_group
from tests.parity import MUON_ATTENTION, parallelism_of
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
    QWEN3_MOE,
    SHARED_EXPERTS,
    T5,
    tiny,
)
from titanlike.config.dpo import PreferenceData
from titanlike.parallelisms.mesh import build_mesh
from titanlike.tools.planning.job import Job

LLAMA, GPT = (replace(MODELS[name], num_layers=4) for name in ("llama", "gpt"))
TIED = replace(LLAMA, tied_head=True)
# Three ranks divide none of these sizes.
ODD = replace(LLAMA, dim=60, num_heads=2, num_kv_heads=2, ffn_dim=92, vocab_size=322)
WIDE = dict(v_head_dim=24)  # for float8, whose sizes are multiples of 16
UNBALANCED = replace(QWEN3_MOE, balance_loss=0.0)
FSDP, TP, CP, PP, EP = dict(shard=2), dict(tensor=2), dict(context=2), dict(pipeline=2), dict(expert=2)
FSDP4, HSDP, ZBV = dict(shard=4), dict(replicate=2, shard=2), dict(pipeline=2, pipeline_schedule="zbv")
ALWAYS, NEVER = dict(reshard_after_forward="always"), dict(reshard_after_forward="never")
LAST = dict(gradient_sync="last_microbatch")
FULL, SELECTIVE = ({"activation_checkpoint": dict(mode=mode)} for mode in ("full", "selective"))
MASKS = {"data": dict(document_masks=True)}
MUON = {"optimizer": MUON_ATTENTION, "run": dict(device="cpu")}
CLIP = {"optimizer": MUON_ATTENTION | dict(muon_qk_clip=1.0), "run": dict(device="cpu")}
PAIRS = {"data": PreferenceData(source="synthetic_preference")}
TEACHER = {"teacher": replace(LLAMA, dim=96, num_heads=6, num_layers=5), "distillation": dict(teacher="random")}
SOFTENED = {"distillation": dict(teacher="random", temperature=2.0, loss="reverse_kl")}


def training(**values: Any) -> dict[str, Any]:
    return {"training": values}


def float8(scaling: str = "tensorwise", **values: Any) -> dict[str, Any]:
    return {"float8": dict(scaling=scaling, layers=("*",), emulate=True, **values)}


def lora(*layers: str) -> dict[str, Any]:
    return {"lora": dict(rank=4, layers=layers)}


TWO, CHUNKS = training(local_batch_size=2), training(loss_chunk=20)
GATHER = float8(all_gather=True)


def slow(name: str, layout: dict[str, Any], model: Any, sections: dict[str, Any]) -> Any:
    return pytest.param(layout, model, sections, id=name, marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated")  # by the fake group
@pytest.mark.parametrize(
    ("layout", "model", "sections"),
    [
        pytest.param(HSDP, LLAMA, {}, id="HSDP"),
        pytest.param(TP | FSDP, GPT, TWO, id="TP x FSDP"),
        pytest.param(ZBV | FSDP, LLAMA, TWO, id="PP zbv x FSDP"),
        pytest.param(PP | CP, GPT, TWO, id="PP 1f1b x CP"),
        slow("FSDP, last micro-batch", FSDP | LAST, LLAMA, {}),
        slow("FSDP, uneven", dict(shard=3), ODD, training(global_batch_size=12)),
        slow("HSDP, Muon", HSDP, LLAMA, MUON),
        slow("PP 1f1b x FSDP, tied", FSDP | PP, TIED, TWO),
        slow("PP 1f1b x FSDP, always resharded", FSDP | PP | ALWAYS, LLAMA, training(local_batch_size=1)),
        slow(
            "PP interleaved x FSDP, 4 stages per rank",
            FSDP | PP | dict(pipeline_schedule="interleaved_1f1b", pipeline_stages=4), replace(LLAMA, num_layers=8), TWO,
        ),
        slow("TP, full checkpointing, chunks", TP, LLAMA, FULL | CHUNKS),
        slow("TP x FSDP, dropout, full checkpointing", TP | FSDP, replace(GPT, dropout=0.1), FULL | TWO),
        slow("TP, float8 without wk, with the head", TP, LLAMA, float8(skip=("wk",), head=True)),
        slow("TP, float8 rowwise without w2 and block 0", TP, LLAMA, float8("rowwise", skip=("w2", "layers.0"))),
        slow("TP x FSDP, float8 all-gather", TP | FSDP, LLAMA, GATHER),
        slow("CP, float8", CP, LLAMA, float8()),
        slow("TP x FSDP, OLMo-2", TP | FSDP, OLMO2, {}),
        slow("CP x TP, Gemma 2, full checkpointing", CP | TP, GEMMA2, FULL),
        slow("TP x FSDP, BERT", TP | FSDP, BERT, {}),
        slow("CP x TP, ModernBERT, document masks", CP | TP, MODERNBERT, MASKS),
        slow("CP, LoRA", CP, LLAMA, lora("wq", "layers.1.attention.wk")),
        slow("MoE, CP x TP, full checkpointing", CP | TP, SHARED_EXPERTS, FULL),
        slow("MoE, EP x HSDP", HSDP | EP, QWEN3_MOE, {}),
        slow("MoE, EP x TP, selective checkpointing", FSDP | TP | EP, SHARED_EXPERTS, SELECTIVE),
        slow("MoE, EP x FSDP, LoRA", FSDP4 | EP, QWEN3_MOE, lora("attention")),
        slow("MLA, EP x TP", FSDP | TP | EP, DEEPSEEK_V3, {}),
        slow("MLA, TP x FSDP, float8 all-gather", TP | FSDP, replace(DEEPSEEK_V3, **WIDE), GATHER),
        slow("MLA, CP, LoRA", CP, DEEPSEEK_V2, lora("wq", "layers.2.attention.wkv_b")),
        slow("Sinks, EP x TP", FSDP | TP | EP, GPT_OSS, {}),
        slow("QK-clip, CP x TP, full checkpointing", CP | TP, DEEPSEEK_V2, CLIP | FULL),
        slow("T5, TP x FSDP", TP | FSDP, T5, {}),
        slow("T5, TP, full checkpointing, chunks", TP, T5, FULL | CHUNKS),
        slow("MTP, EP x TP", FSDP | TP | EP, replace(MULTI_TOKEN, **WIDE), {}),
        slow("DPO, FSDP, never resharded", FSDP | NEVER, LLAMA, PAIRS),
        slow("DPO, CP x TP", CP | TP, TIED, PAIRS),
        slow("DPO, TP x FSDP, LoRA", TP | FSDP, LLAMA, PAIRS | lora() | CHUNKS),
        slow("DPO, HSDP, LoRA with a second model", HSDP, LLAMA, PAIRS | lora() | {"preference": dict(reference="model")}),
        slow("DPO, EP x TP", FSDP | TP | EP, UNBALANCED, PAIRS),
        slow("Distillation, CP x TP, chunks", CP | TP, TIED, TEACHER | SOFTENED | MASKS | CHUNKS),
        slow("Distillation, EP x TP", FSDP | TP | EP, QWEN3_MOE, TEACHER | {"teacher": SHARED_EXPERTS}),
        slow("Distillation, HSDP, tied teacher, LoRA", HSDP | ALWAYS, LLAMA, TEACHER | {"teacher": TIED} | lora()),
    ],
)  # fmt: skip
def test_the_traffic_of_each_pipeline_rank_is_planned(
    tmp_path: Path, layout: dict[str, Any], model: Any, sections: dict[str, Any]
) -> None:
    parallelism = parallelism_of(layout)
    values = dict(compute_dtype="bfloat16", seq_len=32) | sections.get("training", {})
    recipe = tiny(tmp_path, "run", model=model, parallelism=parallelism, **sections | {"training": values})
    world_size = math.prod(parallelism.dimensions().values())
    job = Job(recipe, world_size)
    for pipeline_rank in range(job.layout.pipeline):
        first = pipeline_rank * world_size // job.layout.pipeline
        with (
            fake_process_group(first, world_size),
            balanced_exchanges(),
            mock.patch("tests.training.mesh_of", build_mesh),
        ):
            assert count(recipe) == (planned(job, pipeline_rank), pipeline_rank)
