"""Preflight checks: recipes that cannot work are refused, with the remedy, before anything starts."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import changed
from titanlike.config import UserError, section
from titanlike.config.finetune import ChatData
from titanlike.config.layout import DIMENSIONS, blocks_of, split_blocks, stages_of
from titanlike.config.sections import Data, Parallelism, Run
from titanlike.metrics.hardware import device_name
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LLAMA_SIZES, LlamaConfig
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.run.checks import check_machine, check_recipe
from titanlike.run.checks.recipe import BACKENDS
from titanlike.run.run_dir import summary
from titanlike.tools.programs import load_known

recipe = partial(changed, PretrainRecipe())


MUON = 'optimizer.groups=[{{pattern="{}",optimizer="muon"}}]'
QK_CLIP = MUON.format("attention") + " optimizer.muon_qk_clip=100.0"
LORA = "program=finetune data.source=synthetic_chat lora.rank=4"
FLOAT8 = (
    "float8.scaling=tensorwise float8.emulate=true model.dim=4096 model.num_heads=32 model.num_kv_heads=8 model.ffn_dim=14336 "
    "model.num_layers=2"
)
DISTILL = "program=distill distillation.teacher=random data.source=synthetic"
MPS = "run.device=mps compile.mode=none"
# Overrides, the number of processes, and a part of the message.
REFUSED = [
    ("training.global_batch_size=16", 3, "= 16 does not divide over 3 data-parallel ranks; use 15 or 18, or another"),
    ("training.global_batch_size=24 training.local_batch_size=8", 2,
     "8 does not divide the 12 sequences of a rank (global_batch_size 24 over 2 data-parallel ranks); use 4, 6 or 12"),
    ("data.source=synthetic data.packing=best_fit", 1, "needs to know all documents, which data.source = 'synthetic' does not"),
    ("parallelism.replicate=3", 4, "replicate = 3 does not divide the 4 processes; use 1, 2 or 4"),
    ("parallelism.replicate=2 parallelism.shard=2", 2, "2 x 2 = 4, but there are 2 processes; start 4, or set"),
    ("parallelism.shard=0", 1, "shard = 0 is not a number of ranks; use 1 or more, or -1"),
    ("training.seq_len=9000", 1, "seq_len = 9000 is longer than the model's max_seq_len = 8192; use 8192"),
    ("optimizer.state_dtype=bfloat16 optimizer.beta2=0.999", 1,
     "with beta2 = 0.999: the change of a step is below its precision; use beta2 = 0.98 or less"),
    ("optimizer.beta2=0.99 training.master_dtype=bfloat16", 1,
     "state_dtype = 'full' cannot represent a second moment, in bfloat16, with beta2 = 0.99"),
    ("optimizer.state_dtype=8bit model.num_kv_heads=4 parallelism.tensor=2", 2,
     "blocks of 64 elements, but parallelism.tensor = 2 splits the 192 columns of attention.wo within a block; use"),
    ("optimizer.state_dtype=8bit model.dim=32 model.num_kv_heads=4 model.ffn_dim=96", 1,
     "8bit' quantizes rows of a multiple of 64 elements, and no matrix of this model has one (model.dim = 32); use"),
    ("model.num_heads=5 model.num_kv_heads=1", 1, "num_heads = 5 does not divide model.dim = 192; use 3, 4, 6 or 8"),
    ("model.num_kv_heads=3", 1, "num_kv_heads = 3 does not divide model.num_heads = 4; use 1, 2 or 4"),
    ("model.name=qwen3 model.head_dim=33", 1, "model.head_dim = 33 is odd, but RoPE rotates pairs; use 32 or 34"),
    ("training.attention=flash model.name=gemma3", 1,
     "'flash' does not support the mask of model.sliding_window = 64; set training.attention = 'auto'"),
    ("training.attention=flash training.seq_len=40 program=mlm model.name=modernbert model.sliding_window=64", 1,
     "'flash' does not support the mask of model.sliding_window = 64; set training.attention = 'auto'"),
    ("training.attention=efficient model.name=gemma2 model.num_kv_heads=4", 1,
     "'efficient' does not bound scores as model.attention_soft_cap = 50.0 asks; set training.attention = 'auto'"),
    ("activation_checkpoint.mode=selective compile.mode=none model.name=gemma2", 1,
     "model.attention_soft_cap = 50.0 uses FlexAttention on a GPU, but activation_checkpoint.mode = 'selective' with"),
    ("model.dim=12", 1, "model.dim / model.num_heads = 3 is odd"),
    ("model.name=gpt model.vocab_size=256 training.seq_len=1024", 1, "256 is smaller than the tokenizer's 257 tokens; use 257"),
    ("training.steps=99", 1,
     "schedule.warmup_steps = 100 is more than training.steps = 99, so the learning rate would not reach its peak; use "
     "schedule.warmup_steps = 99 or less, or train longer"),
    ("schedule.decay_ratio=0.95", 1,
     "warmup_steps = 100 and schedule.decay_ratio = 0.95, which is 950 steps, are more than training.steps = 1000"),
    ("activation_checkpoint.mode=memory_budget compile.mode=none", 1,
     "implemented by the compiler, but compile.mode = 'none'; set compile.mode = 'block'"),
    ("data.holdout_every=0", 1, "holds out nothing; set validation.interval = 0, or"),
    ("data.holdout_every=1", 1, "holdout_every = 1 holds out every sequence; use 2 or more"),
    ("training.attention=flash model.name=deepseek_v3 model.num_layers=2", 1,
     "attention = 'flash' requires heads of one dimension; set training.attention = 'auto'"),
    ("training.attention=efficient model.name=gpt_oss model.num_kv_heads=4", 1,
     "attention = 'efficient' does not compute the attention sinks of model.name = 'gpt_oss'; set"),
    ("training.attention=flash run.device=cuda model.name=gpt_oss", 1,
     "attention = 'flash' does not support the mask of the attention sinks of model.name = 'gpt_oss'"),
    ("training.attention=efficient", 1,
     "attention = 'efficient' does not support num_kv_heads = 2 and num_heads = 4; set training.attention = 'auto'"),
    ("training.attention=cudnn run.deterministic=true", 1, "'cudnn' is not deterministic, but"),
    ("training.attention=flash3 training.compute_dtype=float32", 1,
     "'flash3' requires training.compute_dtype = 'bfloat16'; set training.attention = 'auto'"),
    ("training.attention=flash4 data.document_masks=true", 1,
     "'flash4' does not support the mask of data.document_masks = true; set training.attention = 'auto'"),
    ("data.document_masks=true model.dim=64 model.num_heads=8 model.num_kv_heads=8 run.device=cuda", 1,
     "requires a head dimension of 16 or more, but this model has 8; set training.attention = 'math'"),
    ("data.document_masks=true activation_checkpoint.mode=selective compile.mode=none", 1,
     "keeps it from being compiled; set compile.mode = 'block', or activation_checkpoint.mode = 'full'"),
    ("training.attention=cudnn parallelism.context=2", 2,
     "'cudnn' is not used with parallelism.context = 2; set training.attention = 'auto'"),
    ("parallelism.cpu_offload=true run.device=cpu", 1, "but run.device = 'cpu'; set it to false"),
    ("activation_checkpoint.offload=true run.device=cpu", 1,
     "offload = true moves activations from a GPU to the host, but run.device = 'cpu'; set it to false"),
    # Layouts.
    ("parallelism.tensor=4", 4, "tensor = 4 does not divide model.num_kv_heads = 2; use 1 or 2"),
    ("parallelism.tensor=2 model.name=gpt model.vocab_size=50257 training.seq_len=1024", 2,
     "does not divide model.vocab_size = 50257; use 1, or model.vocab_size = 50304"),
    ("parallelism.tensor=2 model.ffn_dim=513", 2, "does not divide model.ffn_dim = 513; use 1"),
    ("parallelism.tensor=2 model.name=gpt model.dim=195 model.num_heads=3 training.seq_len=64", 2, "model.num_heads = 3; use 1"),
    ("parallelism.tensor=2 training.seq_len=127", 2, "seq_len = 127 is not divisible into 2 chunks (tensor); use 126 or 128"),
    ("parallelism.context=3 training.seq_len=128", 3, "seq_len = 128 is not divisible into 6 chunks (2 x context); use 126 or 132"),
    ("parallelism.context=2 parallelism.tensor=2 training.seq_len=4", 4,
     "is not divisible into 8 chunks (tensor x 2 x context); use 8"),
    ("parallelism.tensor=2 training.global_batch_size=7", 7,
     "tensor = 2 does not divide the 7 processes; start 2 or a multiple, or make it smaller"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=interleaved_1f1b parallelism.pipeline_stages=8", 2,
     "pipeline_stages x pipeline = 8 x 2 = 16, but model.num_layers = 4; use pipeline_stages = 2 or less"),
    ("parallelism.pipeline=3 parallelism.pipeline_schedule=interleaved_1f1b model.num_layers=6 "
     "training.global_batch_size=14 training.local_batch_size=1", 3,
     "requires a multiple of 3 micro-batches, but a rank has 14 (14 sequences, training.local_batch_size = 1); raise "
     "training.global_batch_size, or"),
    ("parallelism.async_tensor_parallel=true", 1, "nothing to overlap while parallelism.tensor = 1; set it to false"),
    ("parallelism.async_tensor_parallel=true parallelism.tensor=2 compile.mode=none", 2,
     "the compiler does the overlapping, but compile.mode = 'none'; set it to false"),
    ("parallelism.async_tensor_parallel=true parallelism.tensor=2 run.device=cpu", 2,
     "requires GPUs with peer-to-peer access, but run.device = 'cpu'; set it to false"),
    ("parallelism.pipeline=8", 8, "makes 8 stages with the schedule '1f1b', but model.num_layers = 4; use 4"),
    ("parallelism.pipeline=4 parallelism.pipeline_schedule=zbv", 4,
     "makes 8 stages with the schedule 'zbv', but model.num_layers = 4; use 2 or less"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=zbv parallelism.reshard_after_forward=always", 2,
     "reshard_after_forward = 'always' loses gradients with pipeline_schedule = 'zbv'"),
    ("parallelism.pipeline=2 parallelism.pipeline_split=[1,2,1]", 2, "3 stages, which pipeline = 2 ranks cannot share equally"),
    ("parallelism.pipeline=2 parallelism.pipeline_split=[1,2]", 2,
     "pipeline_split = [1, 2] has 3 blocks, but model.num_layers = 4; make them equal"),
    ("parallelism.pipeline=2 parallelism.pipeline_split=[1,1,1,1]", 2,
     "'1f1b' has 1 stage(s) on each rank, not 2; use 1, or another schedule such as 'interleaved_1f1b'"),
    ("parallelism.pipeline=2 parallelism.pipeline_split=[2,2] parallelism.pipeline_stages=2", 2,
     "2 stages, but pipeline_stages x pipeline = 2 x 2; remove pipeline_stages"),
    ("parallelism.pipeline=4 training.global_batch_size=8 training.local_batch_size=4", 4,
     "over 4 ranks requires 4 or more micro-batches, but a rank has 2 (8 sequences, training.local_batch_size = 4); use "
     "training.local_batch_size = 1 or 2"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=zbv training.global_batch_size=4 training.local_batch_size=4", 2,
     "requires a multiple of 2 micro-batches, but a rank has 1 (4 sequences, training.local_batch_size = 4); use "
     "training.local_batch_size = 1 or 2"),
    ("parallelism.pipeline=4 training.global_batch_size=2 training.local_batch_size=1", 4,
     "a rank has 2 (2 sequences, training.local_batch_size = 1); raise training.global_batch_size"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=zbv activation_checkpoint.mode=selective compile.mode=none", 2,
     "supports one; use mode = 'full', compile.mode = 'block', or the schedule '1f1b'"),
    ("parallelism.tensor=2 parallelism.pipeline=2", 6, "pipeline x tensor = 2 x 2 = 4 does not divide the 6 processes"),
    ("parallelism.tensor=2 parallelism.shard=2", 8,
     "shard x tensor = 2 x 2 = 4, but there are 8 processes; start 4, or set parallelism.shard = -1"),
    ("parallelism.tensor=3 training.seq_len=99 model.num_heads=6 model.ffn_dim=96 model.vocab_size=384", 2,
     "parallelism.tensor = 3 does not divide model.num_kv_heads = 2; use 1 or 2"),
    # Optimizers.
    (MUON.format("layer"), 1, "no parameter is left for pattern = 'layer' with optimizer = 'muon'"),
    (MUON.format("output"), 1, "no parameter is left for pattern = 'output' with optimizer = 'muon'"),
    ('optimizer.groups=[{pattern="layers",optimizer="muon"},{pattern="wq"}]', 1, "no parameter is left for pattern = 'wq'"),
    (f"{LORA} {MUON.format('layers')}", 1, "optimizer = 'muon' does not support lora.rank = 4"),
    (f"{LORA} optimizer.groups=[{{pattern=\"tok_embeddings\"}}]", 1, "for pattern = 'tok_embeddings' with optimizer = 'adamw'"),
    (f"{LORA} lora.layers=[\"wk\"] optimizer.groups=[{{pattern=\"wq\"}}]", 1, "for pattern = 'wq' with optimizer = 'adamw'"),
    (f"model.name=mixtral {MUON.format('layers')}", 16, "optimizer = 'muon' needs whole matrices, but 8 experts are sharded over"),
    (f"model.name=mixtral parallelism.expert=8 {MUON.format('layers')}", 16, "but 1 experts are sharded over"),
    (f"model.name=qwen3 {QK_CLIP}", 1, "has QK-norm; set it to 0"),
    (f"model.name=gemma2 training.attention=math {QK_CLIP}", 1, "has attention_soft_cap; set it to 0"),
    (f"program=seq2seq training.seq_len=512 {QK_CLIP}", 1, "model.name = 't5' has an encoder; set it to 0"),
    (f"data.document_masks=true {QK_CLIP}", 1, "is a block mask on GPUs; set training.attention = 'math', or optimizer"),
    (f"data.document_masks=true model.num_kv_heads=4 {QK_CLIP}", 1, "set training.attention = 'efficient' or 'math'"),
    (f"model.name=gpt_oss model.sliding_window=0 {QK_CLIP}", 1,
     "the mask of the attention sinks of model.name = 'gpt_oss' is a block mask on GPUs; set training.attention = 'math'"),
    # Float8.
    (f"{FLOAT8} float8.layers=[\"wqq\"]", 1, "layers.0 to layers.1, and output); did you mean 'wq'?"),
    (f"{FLOAT8} float8.skip=[\"layers.7\"]", 1, "float8.skip: 'layers.7' matches no matrix of this model (attention.wq, a"),
    (f"{FLOAT8} float8.skip=[\"layers\"]", 1, "float8.layers and float8.skip exclude all matrices of the blocks; change them, or"),
    ("float8.scaling=tensorwise", 1, "has no matrix to convert: all are too small; set float8.layers = ['*'] to"),
    (f"{FLOAT8} float8.scaling=rowwise float8.all_gather=true", 1, "float8.scaling = 'rowwise' has many; set float8.sc"),
    (f"{FLOAT8} float8.all_gather=true parallelism.cpu_offload=true", 1, "cpu_offload = true: it computes scales on the"),
    (f"{FLOAT8} training.compute_dtype=float16", 1, "does not support training.compute_dtype = 'float16': torch's float8 m"),
    (f"{FLOAT8} float8.head=true model.tied_head=true", 1, "float8.head = true, but the head of this model is"),
    (f"{FLOAT8} model.ffn_dim=14344 float8.skip=[\"w2\",\"w3\"]", 1,
     "requires multiples of 16, but feed_forward.w1 is 14344 x 4096; change the model's sizes, or exclude it with "
     "float8.skip = ['w1']"),
    (f"{FLOAT8} float8.scaling=mxfp8 model.ffn_dim=14352 float8.skip=[\"w1\",\"w3\"]", 1,
     "requires multiples of 32, but feed_forward.w2 is 4096 x 14352; change"),
    (f"{FLOAT8} model.ffn_dim=14400 parallelism.tensor=8 float8.skip=[\"w1\",\"w3\"]", 8,
     "feed_forward.w2 is 4096 x 1800 on each of 8 ranks; change the model's sizes or parallelism.tensor, or exclude it"),
    (f"{FLOAT8} training.seq_len=1028 training.local_batch_size=1", 1,
     "but a rank's micro-batch has 1028 tokens (1 x 1028); use training.seq_len = 1024 or 1040"),
    (f"{FLOAT8} training.seq_len=1040 training.local_batch_size=1 parallelism.context=2", 2,
     "has 520 tokens (1 x 1040 / 2); use training.seq_len = 1024 or 1056"),
    # Distillation.
    ("program=distill distillation.teacher= data.source=synthetic", 1, "distillation.teacher is empty; give a run, a"),
    (f"{DISTILL} distillation.label_weight=1.0", 1, "distillation.label_weight = 1.0 leaves nothing"),
    (f"{DISTILL} distillation.top_k=321", 1, "distillation.top_k = 321 is more than teacher.vocab"),
    (f"{DISTILL} training.z_loss=0.1", 1, "training.z_loss = 0.1 is no part of the loss of distillation"),
    (f"{DISTILL} training.seq_len=512 teacher.name=bert", 1,
     "teacher.name = 'bert' is an encoder, which does not predict the next token; use a decoder"),
    (f"{DISTILL} training.seq_len=512 teacher.name=t5 teacher.vocab_size=320", 1,
     "teacher.name = 't5' has an encoder and a decoder, which read two texts; use a decoder"),
    (f"{DISTILL} teacher.vocab_size=384", 1, "teacher.vocab_size = 384 differs from model.vocab_size = 320; the KL divergence com"),
    (f"{DISTILL} teacher.max_seq_len=16", 1, "is longer than the teacher's max_seq_len = 16; use 16 or less"),
    (f"{DISTILL} teacher.num_kv_heads=1 parallelism.tensor=2", 2, "tensor = 2 does not divide teacher.num_kv_heads = 1; use"),
    (f"{DISTILL} teacher.name=qwen3_moe teacher.num_experts=3 model.name=mixtral parallelism.expert=2", 2,
     "parallelism.expert = 2 does not divide teacher.num_experts = 3"),
    (f"{DISTILL} parallelism.pipeline=2", 2, "parallelism.pipeline = 2: the teacher's logits of a micro-batch"),
    # Apple GPUs.
    (f"{MPS}", 2, "run.device = 'mps' trains one process, but there are 2; use one, or run.device = 'cpu'"),
    (f"{MPS} {FLOAT8}", 1, "has no float8; set float8.scaling = 'none' instead of 'tensorwise'"),
    (f"{MPS} compile.mode=block", 1, "is not supported by compile.mode = 'block'; set it to 'none'"),
    (f"{MPS} training.attention=flash model.num_kv_heads=4", 1, "has no kernel training.attention = 'flash'; set it to 'auto'"),
    (f"{MPS} parallelism.cpu_offload=true", 1, "but run.device = 'mps'; set it to false"),
    # Services and traces.
    ("metrics.trackers=[\"tensorboard\",\"tensorboard\"]", 1, "metrics.trackers names 'tensorboard' twice; name it once"),
    *((f"metrics.prometheus={wrong}", 1, f"metrics.prometheus = '{wrong}' is not an address and a port")
      for wrong in ("9400", ":9400", "localhost:", "localhost:0", "localhost:65536", "localhost:x")),
    ("profiling.steps=[10] profiling.ranks=[8,9]", 8, "profiling.ranks = [8, 9]: no such rank in a run of 8 processes; use ranks"),
    ("compile.backend=nope", 1, "compile.backend = 'nope' is not a backend of torch.compile; choose from inductor, "),
    ("compile.backend=inducter", 1, "did you mean 'inductor'?"),
    # Divisors of large numbers, which are found at once.
    ("model.dim=999999937 model.num_heads=999999936", 1, "does not divide model.dim = 999999937; use 1 or"),
    ("training.global_batch_size=735134400 training.local_batch_size=735134399", 1, "use 245044800, 367567200 or"),
    ("parallelism.replicate=999999937", 1000000, "the 1000000 processes; use 250000, 500000 or 1000000"),
]  # fmt: skip


ACCEPTED = [
    ("", 1), ("", 8),
    ("training.steps=100", 1),  # as long as the warm-up
    ("schedule.decay_ratio=0.9", 1),  # without a stable phase
    # The second group applies to the norms of the blocks.
    ('optimizer.groups=[{pattern="layers",optimizer="muon"},{pattern="layers",lr_scale=2.0}]', 1),
    (f"{LORA} optimizer.groups=[{{pattern=\"lora_B\",lr_scale=16.0}}]", 1),
    # FSDP divides no matrix of an expert.
    *((f"model.name=mixtral {layout} {MUON.format('layers')}", processes) for layout, processes in
      (("", 8), ("parallelism.expert=8", 8), ("parallelism.replicate=2", 16))),
    (QK_CLIP, 1),
    (f"{FLOAT8} model.ffn_dim=14344 float8.skip=[\"w1\",\"w2\",\"w3\"]", 1),  # sizes of skipped matrices
    (f"{FLOAT8} float8.scaling=rowwise_with_gw_hp training.seq_len=1028 training.local_batch_size=1", 1),
    (MPS, 1), (f"{MPS} data.document_masks=true training.attention=math", 1),  # not FlexAttention
    ("profiling.steps=[10] profiling.ranks=[8,9]", 16), ("profiling.steps=[10] profiling.ranks=[0,9]", 8),
]  # fmt: skip


def loaded(keys: str, folder: Path) -> PretrainRecipe:
    (folder / "recipe.toml").write_text("")
    return load_known(folder / "recipe.toml", dict(key.split("=", 1) for key in keys.split()))


@pytest.mark.parametrize(("keys", "processes"), ACCEPTED)
def test_a_valid_recipe_is_accepted(keys: str, processes: int, tmp_path: Path) -> None:
    check_recipe(loaded(keys, tmp_path), processes)


@pytest.mark.parametrize(("keys", "processes", "message"), REFUSED)
def test_an_invalid_recipe_is_refused_with_the_remedy(keys: str, processes: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_recipe(loaded(keys, tmp_path), processes)
    assert [message in line for line in str(caught.value).splitlines()] == [True]


def test_small_heads_are_refused_for_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    small = LlamaConfig(dim=64, num_heads=8, num_kv_heads=8)
    chats = FinetuneRecipe(data=ChatData(path="chats.jsonl"), model=small)
    monkeypatch.setattr("titanlike.run.checks.attention.num_gpus", lambda: 0)
    check_recipe(chats, 1)
    monkeypatch.setattr("titanlike.run.checks.attention.num_gpus", lambda: 1)
    with pytest.raises(UserError, match="requires a head dimension of 16 or more"):
        check_recipe(chats, 1)
    check_recipe(replace(chats, run=replace(chats.run, device="cpu")), 1)


def test_no_remedy_that_would_fail_is_suggested() -> None:
    with pytest.raises(UserError, match=r"there are 3 processes; start 4$"):
        check_recipe(recipe(parallelism=dict(tensor=2, shard=2), training=dict(global_batch_size=6)), 3)


def test_shard_minus_one_is_resolved_over_five_dimensions() -> None:
    assert Parallelism(replicate=2).resolve(8) == Parallelism(replicate=2, shard=4)
    assert Parallelism(replicate=2, shard=1).resolve(2) == Parallelism(replicate=2, shard=1)
    layout = Parallelism(pipeline=2, replicate=2, context=2, tensor=4).resolve(128)
    assert layout.dimensions() == {"pipeline": 2, "replicate": 2, "shard": 4, "context": 2, "tensor": 4}


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "head", "split"),
    [
        (8, 4, 0.1, [2, 2, 2, 2]),
        (9, 4, 0.1, [2, 2, 3, 2]),  # the extra block goes to a late middle stage: the first ranks keep more activations
        (32, 4, 2.4, [9, 9, 8, 6]),  # Llama 3 8B: the LM head costs as much as 2.4 blocks
        (16, 8, 4.3, [2, 2, 2, 2, 2, 2, 3, 1]),  # each stage has a block
        (4, 4, 9.0, [1, 1, 1, 1]),
        (3, 1, 0.5, [3]),
    ],
)
def test_the_split_minimizes_the_cost_of_the_slowest_stage(
    num_blocks: int, num_stages: int, head: float, split: list[int]
) -> None:
    found = split_blocks(num_blocks, num_stages, head)
    assert sum(found) == num_blocks and min(found) >= 1

    def slowest(blocks: list[int]) -> float:
        return max(count + (head if stage == num_stages - 1 else 0) for stage, count in enumerate(blocks))

    assert slowest(found) == slowest(split), found


def test_a_v_shaped_schedule_puts_the_first_and_last_stage_on_one_rank() -> None:
    assert [stages_of(rank, 2, 4, v_shaped=True) for rank in range(2)] == [[0, 3], [1, 2]]
    assert [stages_of(rank, 2, 4, v_shaped=False) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [list(blocks_of(stage, [1, 3, 2])) for stage in range(3)] == [[0], [1, 2, 3], [4, 5]]


def test_a_compile_backend_of_an_installed_package_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("nope", "package:backend", "torch_dynamo_backends")
    monkeypatch.setattr(
        "titanlike.run.checks.recipe.entry_points", lambda group: [entry] if group == entry.group else []
    )
    check_recipe(recipe(compile=dict(backend="nope")), 1)
    assert set(BACKENDS) <= set(torch._dynamo.list_backends(None))


def test_a_model_larger_than_the_memory_of_the_machine_is_refused(tmp_path: Path) -> None:
    sections: dict[str, Any] = dict(run=Run(dir=str(tmp_path), device="cpu"), data=Data(source="synthetic"))
    huge = recipe(model=LlamaConfig(vocab_size=10**9), **sections)  # 384 billion parameters
    with pytest.raises(
        UserError, match=r"^the model has 384,00\d,\d{3},\d{3} parameters, and their weights and gradients take 2,86"
    ):
        check_machine(huge)
    check_machine(huge, world_size=4096, local_world_size=1)  # 0.7 GiB for each process
    with pytest.raises(UserError, match="the model has"):
        check_machine(replace(huge, parallelism=Parallelism(replicate=4096, shard=1)), world_size=4096)
    check_recipe(huge, 1)  # other machines may have more


def test_the_summary_names_a_published_size_only_if_the_model_has_it() -> None:
    def label(**fields: Any) -> str:
        return LlamaConfig(**fields).label()

    assert label() == "llama debug"
    assert label(size="3-8B", **LLAMA_SIZES["3-8B"]) == "llama 3-8B"
    assert label(size="3-8B", **LLAMA_SIZES["3-8B"] | dict(vocab_size=320)) == "llama 3-8B"
    assert label(num_layers=6) == "llama of 6 layers, model.dim 192"
    assert GPTConfig(dim=64).label() == "gpt of 4 layers, model.dim 64"
    shown = summary(recipe(model=LlamaConfig(num_layers=6)), dict.fromkeys(DIMENSIONS, 1), torch.device("cpu"), "")
    assert shown.startswith("model   llama of 6 layers, model.dim 192: ")


def test_the_summary_shows_the_layout() -> None:
    chosen = recipe(
        model=LlamaConfig(num_layers=6),
        parallelism=dict(pipeline=2, pipeline_schedule="interleaved_1f1b", tensor=2),
        training=dict(global_batch_size=8, local_batch_size=2, seq_len=128),
    )
    shown = summary(chosen, chosen.parallelism.resolve(8).dimensions(), torch.device("cpu"), "").splitlines()
    assert shown[-6:] == [
        "batch   8 sequences x 128 tokens per step; per rank 2 x 2",
        f"ranks   8 on {device_name(torch.device('cpu'))}; compute bfloat16, compile block",
        "          pipeline     2  interleaved_1f1b, stages of 1 + 2 + 2 + 1 blocks",
        "          shard        2  shards of weights, gradients and optimizer state",
        "          tensor       2  shards of a matrix, 2 heads each",
        "start   compiling: the first step takes longer",
    ]


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        check_recipe(recipe(training=dict(seq_len=9000, global_batch_size=5), schedule=dict(decay_ratio=0.95)), 1)
    assert len(str(caught.value).splitlines()) == 3


def test_a_section_of_a_copied_program_checks_itself() -> None:
    @section
    class Ema:
        """An average of the weights."""

        decay: float = 0.0

        def problems(self) -> Iterator[str]:
            if not self.decay:
                yield "ema.decay = 0.0 keeps nothing; use 0.999"

    @section
    class OwnRecipe(PretrainRecipe):
        ema: Ema = Ema()

    with pytest.raises(UserError, match=r"ema\.decay = 0\.0 keeps nothing"):
        check_recipe(OwnRecipe(), 1)
    check_recipe(OwnRecipe(ema=Ema(decay=0.999)), 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("data.source=text data.path=none", "data.path = 'none' does not exist; "),
        ("tokenizer.encoding=./tokenizer.model", "tokenizer.encoding = './tokenizer.model': no such file"),
        ("tokenizer.encoding=gpt-2", "'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'?"),
        ("run.dir=taken/runs", "taken is a file, not a folder; choose another run.dir"),
    ],
)
def test_what_a_machine_lacks_is_refused_and_nothing_is_created(
    keys: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "d [v1]").mkdir()
    monkeypatch.chdir(tmp_path)
    check_machine(replace(loaded("run.dir=new data.source=text", tmp_path), data=Data(source="text", path="d [v1]")))
    with pytest.raises(UserError) as caught:
        check_machine(loaded(keys, tmp_path))
    assert message in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "d [v1]", "recipe.toml"}


def test_biases_of_positions_that_tensor_parallelism_divides_within_a_block(tmp_path: Path) -> None:
    keys = "program=seq2seq model.size=xxl training.seq_len=512 optimizer.state_dtype=8bit parallelism.tensor=2"
    with pytest.raises(UserError, match=r"tensor = 2 splits the 64 columns of encoder_bias\.weight within a block"):
        check_recipe(loaded(keys, tmp_path), 2)
