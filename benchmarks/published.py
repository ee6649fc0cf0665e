"""Published measurements of training, and how the measured programs differ from this toolkit.

Throughput is tokens per second and GPU, at the sequence length that is given. Each row is a claim of its source.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from titanlike.config.finetune import ChatData, Lora
from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.moe.config import MixtralConfig, Qwen3MoeConfig
from titanlike.models.qwen.config import Qwen2Config, Qwen3Config
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.tools.planning.program import Program, load_program

LLAMA2 = dict(vocab_size=32000, rope_theta=10000.0, max_seq_len=4096)
LLAMA3 = dict(vocab_size=128256, num_kv_heads=8)
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": dict(size="3.1-8B"),
    "Llama 3 70B": dict(size="3.1-70B"),
    "Llama 3 405B": dict(size="3.1-405B"),
    "Llama 3 13B": dict(dim=5120, num_layers=40, num_heads=40, ffn_dim=17920, **LLAMA3),
    "Llama 3 70B, 12 blocks": dict(dim=8192, num_layers=12, num_heads=64, ffn_dim=28672, **LLAMA3),
    "Qwen2.5 1.5B": dict(config=Qwen2Config, size="2.5-1.5B"),
    "Qwen2.5 7B": dict(config=Qwen2Config, size="2.5-7B"),
    "Qwen3 4B": dict(config=Qwen3Config, size="4B"),
    "Qwen3 32B": dict(config=Qwen3Config, size="32B"),
    "Qwen3 30B-A3B": dict(config=Qwen3MoeConfig, size="30B-A3B"),
    "Mixtral 2048 x 24": dict(
        config=MixtralConfig, dim=2048, num_layers=24, num_heads=16, num_kv_heads=4, ffn_dim=7168, vocab_size=128256
    ),
    "Llama 2 7B": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11008, **LLAMA2),
    "Llama 2 13B": dict(dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, ffn_dim=13824, **LLAMA2),
    "Llama 2 70B": dict(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, **LLAMA2),
}

TORCHTITAN = load_program("torchtitan_2024")
# With tensor parallelism, the loss of sharded logits runs as DTensor's operators, with one more buffer in float32 in the backward
# pass: the log-softmax, the gradient of the loss, their sum and its product with the scale.
TORCHTITAN_TENSOR = replace(TORCHTITAN, logit_bytes=16)
# All logits in bfloat16 and their log-softmax in float32; two more buffers for an eighth of the logits.
TORCHTITAN_CHUNKS = replace(TORCHTITAN, logit_bytes=5)
# Since 2025, the loss is compiled; a gradient of the logits remains.
TORCHTITAN_2025 = replace(TORCHTITAN, eager_loss=False, logit_bytes=2)
# Early versions have a fused Triton kernel for RMSNorm.
TORCHTITAN_0_1 = replace(TORCHTITAN, norm_bytes=(4, 10))
FMS_FSDP = Program(attention="flash", eager_loss=True, logit_bytes=12)
MEGATRON = load_program("megatron")

RING = "torch's ring attention of 2024: a kernel and a float32 merge for the keys of each other rank; here one kernel"
FSDP1 = "FSDP1; the source itself reports 38% MFU, against 55% on A100"
SMALL = "small matmuls: 4,096 tokens over 8 ranks, whose launches and transfers take longer than here"
MEGATRON_MEMORY = (
    "allocates {:.1f} GiB: weights and gradients in bfloat16, only the optimizer sharded; no recipe expresses that"
)
ROCM = "kernels of ROCm; one row is left to judge"
ADDED = "added on 2026-11-29, after the fit; the memory is that of two sequences, while the sample's config has one"


UNNAMED = ("gradient_sync", "reshard_after_forward")  # keys of a layout that are the same in a source


@dataclass(frozen=True)
class Row:
    """A measurement."""

    table: str  # rows of one table are from the same source, hardware and time, so that their ratios are meaningful
    hardware: str
    model: str
    gpus: int
    batch: int  # sequences in a micro-batch of a rank
    tokens_per_second: float
    microbatches: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = "selective"
    float8: str = "none"
    all_gather: bool = True  # in float8
    compiled: bool = True
    seq_len: int = 8192
    memory_gib: float | None = None  # reserved
    program: Program = TORCHTITAN
    reduce_dtype: str = "float32"
    skip_small: bool = True  # float8 leaves out small matrices
    master_dtype: str = "float32"
    lora_rank: int = 0
    hardware_changes: dict[str, Any] = field(default_factory=dict)  # of the file: nodes of another size
    listed: bool = True  # among the rows that efficiencies are fitted to; otherwise only judged
    first_error: float | None = None  # of the plan when the row was first compared, before anything was fitted to it
    note: str = ""

    @property
    def name(self) -> str:
        """A unique description."""
        layout = " ".join(f"{key}={value}" for key, value in self.layout.items() if key not in UNNAMED)
        parts = [self.table, self.model, f"{self.gpus} x {self.hardware}", layout or "FSDP", f"{self.seq_len} tokens"]
        parts += [f"batch {self.microbatches} x {self.batch}", self.checkpoint, self.precision]
        parts += [f"LoRA of rank {self.lora_rank}"] * (self.lora_rank > 0)
        parts += ["eager"] * (not self.compiled) + ["loss in chunks"] * (self.program == TORCHTITAN_CHUNKS)
        return ", ".join(parts)

    @property
    def source(self) -> str:
        """Who published it: rows of a source are fitted together, or not at all."""
        first = self.table.partition(",")[0].split()[0]
        if self.table == "torchtitan H200":
            return "Trainy"
        return {"torchao": "torchtitan", "Megatron-Bridge": "NeMo"}.get(first, first)

    @property
    def precision(self) -> str:
        """bfloat16, or float8 with its scaling."""
        gathers = self.float8 != "none" and self.all_gather and self.float8 == "tensorwise"
        return "bfloat16" if self.float8 == "none" else f"float8 {self.float8}" + (" all-gather" if gathers else "")

    @property
    def group(self) -> tuple[str, str]:
        """The hardware and the precision, which share one fitted efficiency."""
        return self.hardware, "bfloat16" if self.float8 == "none" else "float8"

    def recipe(self) -> PretrainRecipe:
        """Returns the recipe of this toolkit that computes the same."""
        parallelism = Parallelism(**self.layout)
        sizes = parallelism.resolve(self.gpus)
        replicas = sizes.replicate * sizes.shard
        fields = dict(MODELS[self.model])
        config = fields.pop("config", LlamaConfig)
        if "size" in fields:
            fields |= config.sizes[fields["size"]]
        tensorwise = self.float8 == "tensorwise"
        layers = () if self.skip_small or self.float8 == "none" else ("*",)
        sections: dict[str, Any] = dict(
            model=config(**{"max_seq_len": max(8192, self.seq_len)} | fields),
            training=Training(
                seq_len=self.seq_len,
                local_batch_size=self.batch,
                global_batch_size=self.batch * self.microbatches * replicas,
                loss_chunk=0,
                reduce_dtype=self.reduce_dtype,
                master_dtype=self.master_dtype,
            ),
            parallelism=parallelism,
            float8=Float8(scaling=self.float8, all_gather=tensorwise and self.all_gather, layers=layers),
            compile=Compile(mode="block" if self.compiled else "none"),
            activation_checkpoint=ActivationCheckpoint(mode=self.checkpoint),
        )
        if self.lora_rank:
            # Of text without masks, as in these benchmarks.
            return FinetuneRecipe(**sections, data=ChatData(source="synthetic"), lora=Lora(rank=self.lora_rank))
        return PretrainRecipe(**sections)


def _torchtitan_2024() -> Iterator[Row]:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md."""
    common: dict[str, Any] = dict(hardware="h100_96gb", model="Llama 3 8B", batch=2)
    measured = {8: ((5762, 82.4), (6667, 77.0), (8532, 76.8)), 128: ((5605, 67.0), (6514, 62.0), (8380, 61.8))}
    for gpus, ((eager, m1), (compiled, m2), (float8, m3)) in measured.items():
        common |= dict(table="torchtitan 2024-12, 8B", gpus=gpus)
        yield Row(**common, compiled=False, tokens_per_second=eager, memory_gib=m1)
        yield Row(**common, tokens_per_second=compiled, memory_gib=m2)
        yield Row(**common, float8="tensorwise", tokens_per_second=float8, memory_gib=m3)
    common |= dict(float8="tensorwise", checkpoint="full", batch=1)
    long = ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5))
    for context, speed, memory in long:
        yield Row(
            **common | dict(table="torchtitan 2024-12, 8B CP", gpus=8),
            layout=dict(context=context), seq_len=32768 * context, tokens_per_second=speed, memory_gib=memory,
            listed=context <= 2, note=RING if context > 2 else "",
        )  # fmt: skip
    common |= dict(model="Llama 3 70B", gpus=256, batch=16, table="torchtitan 2024-12, 70B", program=TORCHTITAN_TENSOR)
    yield Row(**common, layout=dict(tensor=8), tokens_per_second=829, memory_gib=71.9)
    asynchronous = dict(tensor=8, async_tensor_parallel=True)
    yield Row(**common, layout=asynchronous, tokens_per_second=876, memory_gib=67.6)
    # The number of micro-batches is by default that of pipeline ranks.
    pipeline = asynchronous | dict(pipeline=8)
    common |= dict(model="Llama 3 405B", gpus=512, batch=4, microbatches=8, table="torchtitan 2024-12, 405B")
    yield Row(**common, layout=pipeline, tokens_per_second=100, memory_gib=82.5)
    interleaved = pipeline | dict(pipeline_schedule="interleaved_1f1b")
    yield Row(**common, layout=interleaved, tokens_per_second=128, memory_gib=72.7)
    common |= dict(batch=1, table="torchtitan 2024-12, 405B CP")
    for context, speed, memory in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        yield Row(
            **common, layout=pipeline | dict(context=context), seq_len=32768 * context, tokens_per_second=speed,
            memory_gib=memory, listed=context == 1, note=RING if context > 1 else "",
        )  # fmt: skip


def _torchtitan_2025() -> Iterator[Row]:
    """torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, pull requests 808 and 996."""
    common: dict[str, Any] = dict(hardware="h100_96gb", model="Llama 3 70B", gpus=256, batch=16, checkpoint="full")
    common |= dict(table="torchtitan 2025-06, 70B TP", program=TORCHTITAN_2025)
    asynchronous = dict(tensor=8, async_tensor_parallel=True)
    yield Row(**common, layout=dict(tensor=8), tokens_per_second=597.3)
    yield Row(**common, layout=asynchronous, tokens_per_second=652.4)
    common |= dict(model="Llama 3 8B", gpus=64, batch=12, checkpoint="selective", table="torchtitan 2025-06, 8B TP")
    yield Row(**common, layout=dict(tensor=8), tokens_per_second=4378)
    yield Row(**common, layout=asynchronous, tokens_per_second=4809)
    yield Row(**common, layout=dict(tensor=8), float8="tensorwise", all_gather=False, tokens_per_second=5078)
    common = dict(hardware="h100_96gb", model="Llama 3 8B", gpus=8, batch=1)
    yield Row(**common, table="torchtitan PR 808", tokens_per_second=5760, memory_gib=47.65)
    common |= dict(table="torchtitan PR 996")
    yield Row(**common, tokens_per_second=5959, memory_gib=49.58)
    yield Row(**common, tokens_per_second=5959, memory_gib=42.26, program=TORCHTITAN_CHUNKS)


def _torchao() -> Iterator[Row]:
    """torchao, docs/source/workflows/training.md. Its H100 are taken to be the torchtitan team's: the same team and memory."""
    common: dict[str, Any] = dict(model="Llama 3 8B", gpus=8, batch=1)
    h100 = common | dict(hardware="h100_96gb", table="torchao H100")
    yield Row(**h100, tokens_per_second=6150, memory_gib=47.65)
    yield Row(**h100, float8="tensorwise", tokens_per_second=7689.5, memory_gib=47.77)
    yield Row(**h100, float8="rowwise", tokens_per_second=6768, memory_gib=47.79)
    mi300x = common | dict(hardware="mi300x", program=TORCHTITAN_2025, table="torchao MI300X")
    yield Row(**mi300x, tokens_per_second=5376.5, memory_gib=39.09)
    yield Row(**mi300x, float8="tensorwise", tokens_per_second=6166, memory_gib=39.07)
    yield Row(**mi300x, float8="rowwise", tokens_per_second=5891, memory_gib=39.32, listed=False, note=ROCM)
    b200 = common | dict(
        program=TORCHTITAN_2025,
        hardware="b200",
        table="torchao B200",
        listed=False,
        note="power limited, without saying how much",
    )
    yield Row(**b200, tokens_per_second=8307.5, memory_gib=33.71)
    yield Row(**b200, float8="tensorwise", tokens_per_second=10417, memory_gib=33.38)
    yield Row(**b200, float8="mxfp8", tokens_per_second=9969, memory_gib=33.88)
    yield Row(**b200, float8="rowwise", tokens_per_second=8640.5, memory_gib=33.72)


def _others() -> Iterator[Row]:
    """SageMaker's study with torchtitan, AWS's sample, H200 of Trainy, A100 in torchtitan's old docs, fms-fsdp's README."""
    common: dict[str, Any] = dict(model="Llama 3 8B", table="SageMaker study", hardware="h100", gpus=32, batch=1)
    yield Row(**common, compiled=False, tokens_per_second=6475)
    yield Row(**common, tokens_per_second=7166)
    yield Row(**common, float8="tensorwise", all_gather=False, tokens_per_second=8624)
    yield Row(**common, float8="tensorwise", tokens_per_second=8950)
    # awslabs/awsome-distributed-ai, 3.test_cases/pytorch/torchtitan: of March 2025; the sample has installed version 0.2.2 since.
    sample = common | dict(table="AWS sample", batch=2, listed=False, note=ADDED)
    yield Row(**sample, compiled=False, tokens_per_second=6785, memory_gib=68.57, first_error=0.06)
    yield Row(**sample, float8="tensorwise", tokens_per_second=7865, memory_gib=63.48, first_error=0.30)
    h200 = common | dict(
        table="torchtitan H200", program=TORCHTITAN_2025, hardware="h200", float8="tensorwise", batch=2
    )
    yield Row(**h200, tokens_per_second=10938, memory_gib=47.96)
    yield Row(**h200 | dict(gpus=64), tokens_per_second=10753, memory_gib=46.97)
    a100: dict[str, Any] = dict(hardware="a100", gpus=64, program=TORCHTITAN_0_1, compiled=False, batch=1)
    yield Row("torchtitan A100, Llama 3", model="Llama 3 8B", tokens_per_second=2973, **a100)
    yield Row("torchtitan A100, Llama 3", model="Llama 3 70B", checkpoint="full", tokens_per_second=331, **a100)
    llama2 = a100 | dict(seq_len=4096, table="torchtitan A100, Llama 2")
    yield Row(**llama2 | dict(batch=2), model="Llama 2 13B", checkpoint="none", tokens_per_second=2162)
    yield Row(**llama2 | dict(batch=2), model="Llama 2 13B", tokens_per_second=1904)
    yield Row(**llama2, model="Llama 2 70B", tokens_per_second=355)
    yield Row(**llama2 | dict(batch=2), model="Llama 2 70B", checkpoint="full", tokens_per_second=353)
    yield Row(
        "torchtitan 405B", "h100_96gb", "Llama 3 405B", 128, 2, 109, layout=dict(tensor=8), checkpoint="full",
        compiled=False,
    )  # fmt: skip
    fms: dict[str, Any] = dict(batch=2, seq_len=4096, program=FMS_FSDP, reduce_dtype="bfloat16")
    for hardware, gpus, small, large in (("a100", 128, 4550, 410), ("h100", 96, 9600, 890)):
        fms |= dict(hardware=hardware, gpus=gpus, table=f"fms-fsdp {hardware}")
        hsdp = dict(replicate=gpus // 8)
        yield Row(**fms, model="Llama 2 7B", layout=hsdp, checkpoint="none", tokens_per_second=small)
        yield Row(**fms, model="Llama 2 70B", tokens_per_second=large, note=FSDP1 if hardware == "h100" else "")


def _megatron() -> Iterator[Row]:
    """NVIDIA NeMo and Megatron-Bridge performance summaries (2025-05 to 2026-02) and its guide to tuning memory."""
    common: dict[str, Any] = dict(program=MEGATRON, skip_small=False, batch=1, checkpoint="none")
    small = common | dict(hardware="h100", model="Llama 3 8B", gpus=8, table="NeMo 8B", microbatches=16)
    yield Row(**small, tokens_per_second=10682)
    yield Row(**small, float8="tensorwise", tokens_per_second=14451)
    virtual = dict(pipeline_schedule="interleaved_1f1b")
    seventy = common | dict(hardware="h100", model="Llama 3 70B", gpus=64, table="NeMo 70B")
    layout = dict(tensor=4, pipeline=4, context=2, pipeline_stages=5, **virtual)
    yield Row(**seventy, layout=layout, microbatches=64, tokens_per_second=1118)
    yield Row(**seventy | dict(gpus=2048), layout=layout, microbatches=64, tokens_per_second=1118)
    layout = dict(tensor=4, pipeline=8, pipeline_stages=5, **virtual)
    yield Row(**seventy, layout=layout, float8="tensorwise", microbatches=64, tokens_per_second=1602)
    largest = common | dict(hardware="h100", model="Llama 3 405B", gpus=512, table="NeMo 405B")
    layout = dict(tensor=8, pipeline=8, context=2, pipeline_stages=8, **virtual)
    yield Row(**largest, layout=layout, microbatches=64, tokens_per_second=207)
    yield Row(**largest | dict(gpus=2048), layout=layout, microbatches=64, tokens_per_second=206)
    layout = layout | dict(replicate=1)
    large = largest | dict(gpus=1024)
    yield Row(**large, layout=layout, float8="tensorwise", microbatches=64, tokens_per_second=292)
    blackwell = common | dict(hardware="b200", table="NeMo B200", float8="tensorwise")
    yield Row(**blackwell | dict(batch=2), model="Llama 3 8B", gpus=8, microbatches=8, tokens_per_second=30624)
    layout = dict(tensor=4, pipeline=8, context=2, pipeline_stages=8, **virtual)
    yield Row(**blackwell, model="Llama 3 405B", gpus=128, layout=layout, microbatches=32, tokens_per_second=661)
    tuning = seventy | dict(gpus=32, seq_len=4096, float8="tensorwise", table="Megatron-Bridge tuning")
    # 6 FLOPs for each parameter but the embedding's, and half of the attention matrix.
    flops_per_token = 6 * 69.5e9 + 6 * 80 * 8192 * 4096
    for tensor, pipeline, tflops, gb in ((4, 4, 704, 58.8), (4, 8, 668, 53.2), (8, 4, 509, 50.2)):
        microbatches = tensor * pipeline
        layout = dict(tensor=tensor, pipeline=pipeline, pipeline_stages=5, **virtual)
        yield Row(
            **tuning, layout=layout, microbatches=microbatches,
            tokens_per_second=tflops * 1e12 / flops_per_token,
            note="; ".join([SMALL] * (tensor == 8) + [MEGATRON_MEMORY.format(gb * 1e9 / 2**30)]),
        )  # fmt: skip


ROWS = [*_torchtitan_2024(), *_torchtitan_2025(), *_torchao(), *_others(), *_megatron()]
