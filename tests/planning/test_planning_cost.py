"""The time model of the planner: operators against closed formulas, and how time follows from hardware, layout and recipe."""

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import planner_validation
from tests.training import tiny
from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titanlike.models.common.lora import apply_lora
from titanlike.models.common.rope import rotary_angles
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.gemma.config import Gemma2Config
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.moe.config import MoeConfig, Qwen3MoeConfig
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.finetune import lora_of
from titanlike.tools.planning.collectives import Links
from titanlike.tools.planning.experts import largest_load
from titanlike.tools.planning.hardware import Hardware, hardware_names, load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.operators import Counts
from titanlike.tools.planning.program import Program
from titanlike.tools.planning.ranges import ANCHORED, DENSE_ERRORS, MIXTURE_ERRORS, RANGES, Errors, Range
from titanlike.tools.planning.step_time import OVERLAP_SLOWDOWN, Rank, StepTime, step_time
from titanlike.tools.planning.traffic import traffic
from titanlike.tools.planning.workload import Passes, Workload

LLAMA_8B = LlamaConfig(**{"size": "3.1-8B", **LlamaConfig.sizes["3.1-8B"]})
H100 = load_hardware("h100")
RESULTS = Path(planner_validation.__file__).parent / "results" / "planner_validation.json"
TENSORWISE = Float8(scaling="tensorwise", all_gather=True)

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "HSDP": dict(replicate=4),
    "TP": dict(tensor=8),
    "CP": dict(context=4),
    "PP": dict(pipeline=4),
    "TP x CP x PP x HSDP": dict(tensor=2, context=2, pipeline=2, replicate=2),
}


def job(num_gpus: int = 32, sequences: int = 1, microbatches: int = 4, seq_len: int = 8192, **sections: Any) -> Job:
    layout = Parallelism(**sections.pop("layout", {}))
    sizes = layout.resolve(num_gpus)
    batch = sequences * microbatches * sizes.replicate * sizes.shard
    training = Training(seq_len=seq_len, local_batch_size=sequences, global_batch_size=batch)
    values = dict(model=LLAMA_8B, training=replace(training, **sections.pop("training", {})), parallelism=layout)
    return Job(PretrainRecipe(**values | sections), num_gpus)


def predict(job: Job, hardware: Hardware = H100) -> StepTime:
    return step_time(job, hardware, [traffic(job, rank) for rank in range(job.layout.pipeline)])


def flops(*works: Workload) -> float:
    return sum(matmul.flops for work in works for matmul in work.matmuls)


def passes(counts: Counts) -> list[Passes]:
    """The work of all blocks and of both ends."""
    model = counts.job.recipe.model
    blocks = [
        counts.block(counts.float8_layers(index), model.is_local(index), index)
        for index in range(model.num_layers + model.num_mtp_layers)
    ]
    return [*blocks, counts.embedding(), counts.loss()]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LLAMA_8B, {}),
        (Gemma2Config(**{"size": "9B", **Gemma2Config.sizes["9B"], "sliding_window": 512}), dict(context=4)),
        (GPTConfig(**{"size": "1.3B", **GPTConfig.sizes["1.3B"], "vocab_size": 50304}), dict(tensor=2)),
    ],
)
def test_flops_are_those_of_the_model(model: Any, layout: dict[str, int]) -> None:
    plan = job(8, sequences=2, seq_len=2048, model=model, layout=layout)
    modules = passes(Counts(plan))
    found = sum(flops(each.forward, each.backward_input, each.backward_weight) for each in modules)
    tokens_of_ranks = plan.tokens / plan.layout.tensor
    assert found == pytest.approx(6 * model.num_matmul_parameters() * tokens_of_ranks)
    # Of the full matrix, which `flops_per_token` counts, a causal kernel computes half; it recomputes one matmul of five backward.
    width = model.num_heads * model.head_dim
    attention = [each.forward.attention_forward for each in modules]
    # Keys of each token, on average: all before it, or those of the window, which slides into the sequence first.
    window = sum(min(position + 0.5, 512) for position in range(2048)) / 2048
    num_local = 21 if isinstance(model, Gemma2Config) else 0
    keys = (model.num_layers - num_local) * 2048 / 2 + num_local * window
    assert sum(attention) == pytest.approx(4 * keys * width * tokens_of_ranks)
    backward = [each.backward_input.attention_backward for each in modules]
    assert sum(backward) == pytest.approx(2.5 * sum(attention))


QWEN3_MOE = Qwen3MoeConfig(**{"size": "30B-A3B", **Qwen3MoeConfig.sizes["30B-A3B"]})
DEEPSEEK = DeepseekV3Config(**{"size": "671B", **DeepseekV3Config.sizes["671B"]})
GPT_OSS = GptOssConfig(**{"size": "20B", **GptOssConfig.sizes["20B"]})
MULTI_TOKEN = replace(DEEPSEEK, num_mtp_layers=1)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (QWEN3_MOE, dict(context=4, expert=2)),
        (replace(QWEN3_MOE, num_shared_experts=1), dict(tensor=2, expert=4)),
        (DEEPSEEK, dict(tensor=2, expert=4)),
        (GPT_OSS, dict(expert=8)),
        (MULTI_TOKEN, {}),
    ],
)
def test_flops_of_a_mixture_of_experts(model: MoeConfig, layout: dict[str, int]) -> None:
    plan = replace(job(8, sequences=2, seq_len=2048, model=model, layout=layout), program=Program(load_variation=0.0))
    found = sum(flops(each.forward, each.backward_input, each.backward_weight) for each in passes(Counts(plan)))
    # Tensor-parallel ranks shard all but the router, and the matrices of latent vectors.
    num_blocks = model.num_layers + model.num_mtp_layers
    replicated = (num_blocks - model.num_dense_layers) * model.num_experts * model.dim
    if isinstance(model, DeepseekV3Config):
        replicated += num_blocks * model.dim * (1536 + 512 + 64) + model.num_mtp_layers * 2 * model.dim**2
    expected = (model.num_matmul_parameters() - replicated) / plan.layout.tensor + replicated
    assert found == pytest.approx(6 * expected * plan.tokens)
    recomputed = Counts(replace_mode(plan, "full")).block(frozenset())
    last = 0 if not model.num_shared_experts else 2 * plan.tokens * model.dim * model.ffn_dim / plan.layout.tensor
    assert flops(recomputed.recomputation) == pytest.approx(flops(recomputed.forward) - last)


def replace_mode(plan: Job, mode: Any) -> Job:
    return replace(plan, recipe=replace(plan.recipe, activation_checkpoint=ActivationCheckpoint(mode=mode)))


@pytest.mark.parametrize(
    ("mode", "rank", "layers"),
    [
        ("full", 0, ()),
        ("selective", 0, ()),
        ("full", 8, ("wq", "wv")),
        ("selective", 8, ()),
        ("selective", 8, ("wo", "w1", "w2")),
    ],
)
def test_products_of_a_block_are_those_that_torch_counts(
    tmp_path: Path, mode: Literal["full", "selective"], rank: int, layers: tuple[str, ...]
) -> None:
    """With LoRA on some layers, and without."""
    sections = dict(
        lora=dict(rank=rank, layers=layers), activation_checkpoint=dict(mode=mode), compile=dict(mode="none")
    )
    training = dict(compute_dtype="float32", seq_len=64, local_batch_size=2, global_batch_size=2)
    sizes = LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=256)
    recipe = tiny(tmp_path, "run", model=sizes, training=training, **sections)
    model = build_model(recipe.model)
    if rank:
        apply_lora(model, blocks(model), lora_of(recipe))
    block = blocks(model)["0"]
    x, angles = torch.randn(2, 64, 64, requires_grad=True), rotary_angles(sizes, torch.arange(64)[None])

    def counted(compute: Callable[[], Any]) -> tuple[Any, int]:
        with FlopCounterMode(display=False) as counter:
            result = compute()
        return result, sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))

    out, forward = counted(lambda: block(x, angles))
    _, backward = counted(lambda: out.sum().backward())
    apply_activation_checkpoint(blocks(model), mode=mode)
    out, _ = counted(lambda: block(x, angles))  # counting decomposes operators, in both passes
    _, with_recomputation = counted(lambda: out.sum().backward())
    planned = Counts(Job(recipe, 1)).block(frozenset())
    assert flops(planned.forward) == forward
    assert flops(planned.backward_input, planned.backward_weight) == backward
    assert flops(planned.recomputation) == with_recomputation - backward


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_add_up_and_no_time_is_negative(layout: str) -> None:
    found = predict(job(layout=LAYOUTS[layout]))
    assert sum(found.parts.values()) == found.seconds
    assert all(seconds > 0 and math.isfinite(seconds) for seconds in (*found.parts.values(), *found.hidden.values()))
    expected = {"FSDP": "shard", "HSDP": "replicate", "TP": "tensor", "CP": "context"}.get(layout)
    assert ("pipeline bubble" in found.parts) == ("PP" in layout)
    assert expected is None or f"exposed {expected}" in found.parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_better_hardware_never_makes_a_step_slower(layout: str) -> None:
    plan = job(layout=LAYOUTS[layout], float8=TENSORWISE)
    base = predict(plan).seconds
    for field in fields(Hardware):
        value = getattr(H100, field.name)
        if "tflops" in field.name or "gb_per_second" in field.name or "efficiency" in field.name:
            assert predict(plan, replace(H100, **{field.name: value * 1.5})).seconds <= base, field.name
        elif field.name.endswith(("_us", "half_size", "half_length")):
            assert predict(plan, replace(H100, **{field.name: value * 2})).seconds >= base, field.name
    assert predict(plan, replace(H100, efficiency=0.5, float8_efficiency=0.5)).seconds > 1.15 * base


def test_hidden_and_exposed_communication_is_all_communication() -> None:
    plan = job(layout=dict(replicate=4))
    for factor in (1.0, 0.5, 0.01):
        hardware = replace(H100, network_gb_per_second=50 * factor)
        found, links = predict(plan, hardware), Links(plan, hardware)
        for axis in ("shard", "replicate"):
            expected = sum(links.seconds(each) for each in traffic(plan) if each.axis == axis)
            assert found.parts[f"exposed {axis}"] + found.hidden.get(axis, 0.0) == pytest.approx(expected)
        assert found.parts["overlap slowdown"] == pytest.approx(OVERLAP_SLOWDOWN * sum(found.hidden.values()))
        computation = sum(
            found.parts[name] for name in ("matmul", "attention", "elementwise", "recomputation") if name in found.parts
        )
        assert found.hidden["replicate"] < computation / 4  # behind the last of four backward passes
        assert (found.parts["exposed replicate"] > 0.1 * found.seconds) == (factor == 0.01)


@pytest.mark.parametrize("replicate", [1, 4])
def test_gradients_that_the_last_micro_batch_reduces_hide_behind_its_backward_pass_only(replicate: int) -> None:
    layout = dict(gradient_sync="last_microbatch", reshard_after_forward="never", replicate=replicate)
    plan, slow = job(64, microbatches=16, seq_len=1024, layout=layout), replace(H100, network_gb_per_second=2.0)
    gradients = [each for each in traffic(plan, 0) if each.purpose == "gradients"]
    rank = Rank(plan, slow, gradients, 0)
    (backward,) = (seconds for (_, kind), seconds in rank.durations.items() if kind == "backward")
    assert sum(rank.overlap[1].values()) == pytest.approx(backward)


@pytest.mark.parametrize(
    ("layout", "crossing"),
    [
        (dict(pipeline=8), [True] * 7),
        (dict(tensor=4, pipeline=16), [False, True] * 7 + [False]),
        (dict(tensor=4, pipeline=2, replicate=8), [True]),
    ],
)
def test_a_transfer_between_nodes_takes_longer_than_one_within(layout: dict[str, int], crossing: list[bool]) -> None:
    plan = job(64, microbatches=16, layout=layout)
    links, size = Links(plan, H100), 537e6
    within, between = (20e-6 + size / (rate * 1e9) for rate in (450 * H100.node_fraction, 50 * H100.single_fraction))
    found = [links.transfer_seconds(size, rank, rank + 1) for rank in range(len(crossing))]
    assert found == pytest.approx([between if crosses else within for crosses in crossing])
    sends = [each for each in traffic(plan, 0) if each.kind == "send"]
    assert all(links.spans_nodes(each) for each in sends)
    slow = replace(H100, network_gb_per_second=1.0)
    assert predict(plan, slow).parts["pipeline bubble"] > 1.5 * predict(plan).parts["pipeline bubble"]


@pytest.mark.parametrize(
    "sections",
    [
        dict(compile=Compile(mode="none")),
        dict(training=dict(attention="flash")),
        dict(training=dict(compute_dtype="float32", matmul_precision="high")),
        dict(layout=dict(cpu_offload=True)),
        dict(activation_checkpoint=ActivationCheckpoint(mode="full")),
        dict(activation_checkpoint=ActivationCheckpoint(mode="memory_budget", memory_budget=0.25)),
    ],
    ids=str,
)
def test_a_setting_takes_time(sections: dict[str, Any]) -> None:
    base = dict(activation_checkpoint=ActivationCheckpoint(mode="none"))
    assert predict(job(8, **base | sections)).seconds > predict(job(8, **base)).seconds


def test_the_slowest_rank_computes_the_largest_load() -> None:
    variation, experts = 0.4, 128
    loads = variation * torch.randn(4000, 8, experts // 8, generator=torch.Generator().manual_seed(0))
    simulated = 1 + loads.mean(-1).amax(-1).mean().item()
    found = largest_load(job(64, model=QWEN3_MOE, layout=dict(expert=8)), variation, padded=False)
    assert found == pytest.approx(simulated, abs=0.01)
    padded = 1 + loads.flatten(1).amax(-1).mean().item()
    assert largest_load(job(64, model=QWEN3_MOE), variation, padded=True) == pytest.approx(padded, rel=0.01)
    assert largest_load(job(64, model=QWEN3_MOE), variation, padded=False) == 1.0


def test_predictions_of_published_measurements_are_recorded() -> None:
    """The results in the repository are those of the current planner, and what it ships is what was fitted."""
    recorded = json.loads(RESULTS.read_text())
    by_name = {row["name"]: row for row in recorded["rows"]}
    assert len(by_name) == len(planner_validation.ROWS)
    for row in planner_validation.ROWS:
        if row.layout.get("pipeline_schedule") is None and row.gpus <= 128:
            predicted = planner_validation.tokens_per_second(row)
            assert by_name[row.name]["fitted"] == pytest.approx(predicted, rel=2e-3), row.name
        assert row.listed or row.note, "a row that is not fitted has a reason"
    for name in hardware_names():
        hardware = load_hardware(name)
        for key, value in (("bfloat16", hardware.efficiency), ("float8", hardware.float8_efficiency)):
            fitted = recorded["efficiencies"].get(f"{name} {key}")
            assert fitted is None or value == pytest.approx(fitted, abs=0.006), (name, key)
        assert {key: getattr(hardware, key) for key in recorded["constants"]} == recorded["constants"], name
    found = {name: Range(each["low"], each["high"], each["runs"]) for name, each in recorded["ranges"].items()}
    assert found == RANGES
    assert Range(**recorded["ratio_range"]) == ANCHORED
    for models, errors in (("dense", DENSE_ERRORS), ("mixtures", MIXTURE_ERRORS)):
        held_out, first = (
            recorded["errors"][f"{models}, {kind}"] for kind in ("source not fitted", "when first compared")
        )
        assert errors == Errors(held_out["median"], held_out["number"], first["median"], first["number"])
