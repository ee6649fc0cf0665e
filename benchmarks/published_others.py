"""Published measurements of programs that differ more from this toolkit than torchtitan does, and of mixtures of experts.

These rows were compared with plans before any figure was fitted to them: `first_error` is the error that the plan then had.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.published import MEGATRON, TORCHTITAN, Row
from titanlike.tools.planning.program import Program

# Weights and moments in bfloat16. Each tensor-parallel rank computes all logits, and their loss in eager code.
KEMPNER = Program(attention="fused", eager_loss=True, whole_logits=True)
KEMPNER_PIPELINE = replace(KEMPNER, rope_bytes=24, norm_bytes=(36, 60), sequence_parallel=False)
NODES_OF_4 = dict(gpus_per_node=4)
# A model of transformers with an eager loss of all logits in float32. The source says compiled; the differences between its GPUs
# are those of eager elementwise kernels.
PRIME_RL = Program(attention="flash", norm_bytes=(36, 60), eager_loss=True)
# DeepEP with nothing beside it. The gate that balances by force sends a token to experts that follow each other, all on one rank.
AUTOMODEL = Program(attention="fused", cast_share=0.5)
AUTOMODEL_MIXTURE = replace(AUTOMODEL, load_variation=0.0, ranks_per_token=1.0, fused_experts=True)
# Experts are padded to the largest load of a router with random weights.
KEMPNER_MIXTURE = replace(KEMPNER, load_variation=1.0, padded_experts=True)
# Random scores balance by force: the 8 experts of a token are on 8 * (1 - (7 / 8)**8) of 8 ranks. With DeepEP, the exchanges of a
# micro-batch run beside the computation of another, which hid a third of them in a profile of a later version.
MEGATRON_MIXTURE = replace(MEGATRON, load_variation=0.0)
MEGATRON_DEEPEP = replace(MEGATRON_MIXTURE, ranks_per_token=5.25, hidden_exchange=0.35)
# C++ and CUDA of its own; attention of cuDNN.
LLMQ = Program(attention="fused", cast_share=0.5)
# Megatron with all overlap switched off.
SIMUMAX = replace(MEGATRON, async_tensor_share=0.0, overlaps=False)


def _kempner() -> Iterator[Row]:
    """KempnerForge: benchmarks/mfu_scaling, weak_scaling_160gpu, config_validation and moe_packed."""
    common: dict[str, Any] = dict(
        hardware="h200", model="Llama 3 8B", seq_len=4096, checkpoint="full", program=KEMPNER, master_dtype="bfloat16",
        reduce_dtype="bfloat16", hardware_changes=NODES_OF_4,
    )  # fmt: skip
    sync = dict(gradient_sync="last_microbatch")
    scaling = (
        (1, 1, 2, 4, 10471, -0.12), (2, 1, 2, 4, 9364, -0.02), (2, 2, 4, 2, 6581.5, 0.32), (4, 1, 4, 2, 9745.75, -0.04),
        (4, 4, 4, 2, 6283.75, 0.17), (4, 2, 4, 2, 6495, 0.31), (8, 4, 4, 2, 5537.4, 0.30), (16, 4, 4, 2, 5186.75, 0.33),
        (32, 4, 4, 2, 4872.4, 0.39),
    )  # fmt: skip
    for gpus, tensor, batch, microbatches, speed, error in scaling:
        yield Row(
            "KempnerForge 7B", gpus=gpus, batch=batch, microbatches=microbatches, tokens_per_second=speed,
            layout=dict(tensor=tensor, **sync), first_error=error, **common,
        )  # fmt: skip
    weak = (
        (8, 452.9, 1.03),
        (32, 584, 0.42),
        (64, 559.75, 0.47),
        (96, 543.6, 0.5),
        (128, 546.8, 0.49),
        (160, 534.8, 0.51),
    )
    for gpus, speed, error in weak:
        yield Row(
            "KempnerForge 70B", gpus=gpus, batch=2, microbatches=4, tokens_per_second=speed,
            layout=dict(tensor=4, **sync), first_error=error, note=FULL if gpus == 8 else "",
            listed=gpus > 8,
            **common | dict(model="Llama 3 70B"),
        )  # fmt: skip
    table = dict(table="KempnerForge configurations")
    yield Row(
        gpus=4, batch=8, microbatches=4, tokens_per_second=9714.5, layout=sync, first_error=-0.01, **common, **table
    )
    yield Row(
        gpus=12, batch=4, microbatches=8, tokens_per_second=5587, layout=dict(tensor=4, **sync), first_error=0.26,
        **common, **table,
    )  # fmt: skip
    yield Row(
        gpus=32, batch=4, microbatches=4, tokens_per_second=9293, layout=sync, first_error=0.01, **common, **table
    )
    pipeline = dict(tensor=4, pipeline=2, reshard_after_forward="always", **sync)
    yield Row(
        gpus=32, batch=4, microbatches=4, tokens_per_second=1642.3, layout=pipeline, compiled=False, first_error=0.84,
        **common | dict(model="Llama 3 13B", program=KEMPNER_PIPELINE), **table,
    )  # fmt: skip
    yield Row(
        "KempnerForge mixture", gpus=8, batch=4, tokens_per_second=6371.5, layout=sync, compiled=False, first_error=1.9,
        **common | dict(model="Mixtral 2048 x 24", program=KEMPNER_MIXTURE), note=PADDED,
    )  # fmt: skip


FULL = "128.5 of 139.7 GiB allocated: the allocator frees and allocates again"
PADDED = "experts padded to the largest load of a random router, Python loops over experts"


def _prime_rl() -> Iterator[Row]:
    """prime-rl: benchmarks/baselines and results/BENCHMARKS.md, supervised fine-tuning."""
    common: dict[str, Any] = dict(
        table="prime-rl",
        model="Qwen3 4B",
        gpus=8,
        batch=1,
        microbatches=2,
        checkpoint="full",
        program=PRIME_RL,
        compiled=False,
    )
    for hardware, length, speed, gib, error in (
        ("h100", 16384, 6214.6, 54.63, 0.24), ("h200", 16384, 6642.75, 54.63, 0.19), ("b200", 16384, 8255, 52.5, 0.33),
        ("b200", 65536, 3299.4, 171.5, 0.08),
    ):  # fmt: skip
        yield Row(
            **common, hardware=hardware, seq_len=length, tokens_per_second=speed, memory_gib=gib, first_error=error
        )


def _torchtitan_qwen3() -> Iterator[Row]:
    """torchtitan, pull request 1690."""
    common: dict[str, Any] = dict(
        table="torchtitan Qwen3",
        hardware="h100_96gb",
        model="Qwen3 32B",
        seq_len=4096,
        checkpoint="full",
        program=TORCHTITAN,
    )
    yield Row(**common, gpus=8, batch=2, tokens_per_second=1874, memory_gib=81.85, first_error=-0.18)
    eager = common | dict(layout=dict(tensor=8), compiled=False)
    for gpus, batch, speed, gib, error in (
        (32, 16, 876, 43.45, 0.30), (32, 32, 883, 70.79, 0.31), (64, 32, 873, 63.27, 0.32)
    ):  # fmt: skip
        yield Row(**eager, gpus=gpus, batch=batch, tokens_per_second=speed, memory_gib=gib, first_error=error)


def _automodel() -> Iterator[Row]:
    """NeMo AutoModel, docs/performance-summary.mdx."""
    common: dict[str, Any] = dict(hardware="h100", seq_len=4096, master_dtype="bfloat16", program=AUTOMODEL)
    yield Row(
        "AutoModel", model="Qwen3 30B-A3B", gpus=8, batch=4, microbatches=16, checkpoint="full",
        layout=dict(expert=8, reshard_after_forward="never", gradient_sync="last_microbatch"), tokens_per_second=12040,
        first_error=-0.27, note="DeepEP; one rank for each token", **common | dict(program=AUTOMODEL_MIXTURE),
    )  # fmt: skip
    lora = common | dict(table="AutoModel LoRA", batch=2, lora_rank=16)
    yield Row(
        **lora,
        model="Llama 3 8B",
        gpus=1,
        microbatches=16,
        checkpoint="none",
        tokens_per_second=12473,
        first_error=-0.06,
    )
    for gpus, microbatches, speed, error in ((8, 4, 1091.9, 0.38), (16, 2, 984.9, 0.45)):
        yield Row(
            **lora, model="Llama 3 70B", gpus=gpus, microbatches=microbatches, checkpoint="full", layout=dict(tensor=2),
            tokens_per_second=speed, first_error=error,
        )  # fmt: skip


def _simumax() -> Iterator[Row]:
    """SimuMax, docs/b200/b200_release_v1.2_summary.md: Megatron on 8 B200."""
    kept = dict(reshard_after_forward="never", gradient_sync="last_microbatch")
    common: dict[str, Any] = dict(
        hardware="b200", model="Llama 3 70B, 12 blocks", gpus=8, batch=1, checkpoint="none", program=SIMUMAX
    )
    for layout, speed, error in (
        (dict(pipeline=2), 9717.7, 0.4), (dict(tensor=2), 11291.5, 0.35), (dict(tensor=4), 9995.1, 0.37),
        (dict(tensor=8), 7290.9, 0.62),
    ):  # fmt: skip
        yield Row(
            "SimuMax, 4,096 tokens", seq_len=4096, microbatches=4, layout=layout | kept, tokens_per_second=speed,
            first_error=error, **common,
        )  # fmt: skip
    for layout, speed, error in ((dict(context=8), 9266.4, -0.16), (dict(tensor=2, context=4), 9319.7, -0.15)):
        yield Row(
            "SimuMax, 32,768 tokens", seq_len=32768, microbatches=4, layout=layout | kept, tokens_per_second=speed,
            first_error=error, note="context parallelism by all-to-all of heads", **common,
        )  # fmt: skip


def _bridge() -> Iterator[Row]:
    """Megatron-Bridge, docs/performance-summary, 25.11 and 26.02, and NeMo 24.07, docs/source/performance."""
    kept = dict(reshard_after_forward="never", gradient_sync="last_microbatch")
    common: dict[str, Any] = dict(
        seq_len=4096, checkpoint="none", program=MEGATRON, float8="tensorwise", skip_small=False
    )
    mixture = common | dict(table="Megatron-Bridge mixture", model="Qwen3 30B-A3B", program=MEGATRON_MIXTURE)
    layout = dict(expert=8, pipeline=2, pipeline_schedule="interleaved_1f1b", **kept)
    yield Row(
        **mixture | dict(program=MEGATRON_DEEPEP), hardware="h100", gpus=16, batch=1, microbatches=128, tokens_per_second=5113,
        layout=layout | dict(pipeline_stages=12), first_error=1.27, note=HOPPER_FLOAT8,
    )  # fmt: skip
    yield Row(
        **mixture, hardware="h100", gpus=16, batch=2, microbatches=32, tokens_per_second=5275,
        layout=layout | dict(pipeline_stages=24), first_error=1.14, note=HOPPER_FLOAT8,
    )  # fmt: skip
    yield Row(
        **mixture | dict(float8="mxfp8"), hardware="b200", gpus=8, batch=1, microbatches=64, tokens_per_second=9691,
        layout=dict(expert=8, **kept), first_error=1.49, note="waits for the host, which launches kernels for each expert",
    )  # fmt: skip
    old = common | dict(table="NeMo 24.07", hardware="h100", batch=1)
    yield Row(
        **old, model="Llama 2 7B", gpus=8, microbatches=16, layout=kept, tokens_per_second=16847, first_error=-0.07
    )
    layout = dict(tensor=4, pipeline=4, pipeline_stages=20, pipeline_schedule="interleaved_1f1b", **kept)
    yield Row(
        **old, model="Llama 2 70B", gpus=64, microbatches=32, layout=layout | dict(async_tensor_parallel=True),
        tokens_per_second=1707, first_error=-0.11,
    )  # fmt: skip


HOPPER_FLOAT8 = "takes 1.6 times as long as its kernels, exchanges and launches; the cause is not known"


def _gb200() -> Iterator[Row]:
    """torchtitan, components/quantization/nvfp4.md, on GB200."""
    yield Row(
        "torchtitan GB200",
        "gb200",
        "Llama 3 8B",
        gpus=4,
        batch=32,
        seq_len=2048,
        tokens_per_second=21919,
        first_error=0.09,
    )


def _llmq() -> Iterator[Row]:
    """LLMQ, README.md: weights, moments and residuals in bfloat16."""
    common: dict[str, Any] = dict(
        table="LLMQ", hardware="h100", gpus=1, seq_len=1024, checkpoint="none", master_dtype="bfloat16", program=LLMQ,
        skip_small=False, all_gather=False, listed=False, note=OWN_KERNELS,
    )  # fmt: skip
    for model, batch, microbatches, speed, float8_speed, error, float8_error in (
        ("Qwen2.5 1.5B", 16, 32, 58875, 73051, -0.14, -0.14), ("Qwen2.5 7B", 4, 64, 13863, 19194, -0.15, -0.20),
    ):  # fmt: skip
        common |= dict(model=model, batch=batch, microbatches=microbatches)
        yield Row(**common, tokens_per_second=speed, first_error=error)
        yield Row(**common, tokens_per_second=float8_speed, float8="tensorwise", first_error=float8_error)


OWN_KERNELS = "C++ and CUDA, no kernel of torch; the 7B in float8 recomputes norms and SwiGLU"


ROWS = [
    *_kempner(), *_prime_rl(), *_torchtitan_qwen3(), *_automodel(), *_simumax(), *_bridge(), *_gb200(), *_llmq(),
]  # fmt: skip
