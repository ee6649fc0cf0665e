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
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Data, Parallelism, Run, Tokenizer, Training
from titanlike.metrics.hardware import device_name
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LLAMA_SIZES, LlamaConfig
from titanlike.models.t5.config import T5_SIZES, T5Config
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run.checks import check_machine, check_recipe
from titanlike.run.checks.layout import divisibility_problems
from titanlike.run.checks.recipe import BACKENDS
from titanlike.run.run_dir import summary

recipe = partial(changed, PretrainRecipe())


def test_the_defaults_are_valid() -> None:
    check_recipe(PretrainRecipe(), 1)
    check_recipe(PretrainRecipe(), 8)
    check_recipe(recipe(training=dict(steps=100)), 1)  # as long as the warm-up
    check_recipe(recipe(schedule=dict(decay_ratio=0.9)), 1)  # without a stable phase


# Overrides, the number of processes, and a part of the message.
REFUSED = [
    ("training.global_batch_size=16", 3, "= 16 does not divide over 3 data-parallel ranks; use 15 or 18, or another"),
    ("training.global_batch_size=2", 3, "= 2 does not divide over 3 data-parallel ranks; use 3, or another"),
    ("training.global_batch_size=24 training.local_batch_size=8", 2,
     "8 does not divide the 12 sequences of a rank (global_batch_size 24 over 2 data-parallel ranks); use 4, 6 or 12"),
    ("data.source=synthetic data.packing=best_fit", 1, "needs to know all documents, which data.source = 'synthetic' does not"),
    ("parallelism.replicate=3", 4, "replicate = 3 does not divide the 4 processes; use 1, 2 or 4"),
    ("parallelism.replicate=2 parallelism.shard=2", 2, "2 x 2 = 4, but there are 2 processes; start 4, or set"),
    ("parallelism.shard=0", 1, "shard = 0 is not a number of ranks; use 1 or more, or -1"),
    ("parallelism.shard=-2", 1, "shard = -2 is not a number of ranks"),
    ("training.seq_len=9000", 1, "seq_len = 9000 is longer than the model's max_seq_len = 8192; use 8192"),
    ("optimizer.state_dtype=bfloat16 optimizer.beta2=0.999", 1,
     "with beta2 = 0.999: the change of a step is below its precision; use beta2 = 0.98 or less"),
    ("optimizer.beta2=0.99 training.master_dtype=bfloat16", 1,
     "state_dtype = 'full' cannot represent a second moment, in bfloat16, with beta2 = 0.99"),
    ("optimizer.state_dtype=8bit model.num_kv_heads=4 parallelism.tensor=2", 2,
     "blocks of 64 elements, but parallelism.tensor = 2 splits the 192 columns of attention.wo within a block; use"),
    ("optimizer.state_dtype=8bit model.dim=32 model.num_kv_heads=4 model.ffn_dim=96", 1,
     "8bit' quantizes rows of a multiple of 64 elements, and no matrix of this model has one (model.dim = 32); use"),
    ("model.num_heads=5", 1, "num_heads = 5 does not divide model.dim = 192; use 3, 4, 6 or 8"),
    ("model.num_kv_heads=3", 1, "num_kv_heads = 3 does not divide model.num_heads = 4; use 1, 2 or 4"),
    ("model.name=qwen3 model.head_dim=33", 1, "model.head_dim = 33 is odd, but RoPE rotates pairs; use 32 or 34"),
    ("model.name=gemma3 model.head_dim=33", 1, "model.head_dim = 33 is odd, but RoPE rotates pairs; use 32 or 34"),
    ("training.attention=flash model.name=gemma3", 1,
     "'flash' does not support the mask of model.sliding_window = 64; set training.attention = 'auto'"),
    ("training.attention=flash training.seq_len=40 model.name=modernbert model.sliding_window=64", 1,
     "'flash' does not support the mask of model.sliding_window = 64; set training.attention = 'auto'"),
    ("training.attention=efficient model.name=gemma2 model.num_kv_heads=4", 1,
     "'efficient' does not bound scores as model.attention_soft_cap = 50.0 asks; set training.attention = 'auto'"),
    ("activation_checkpoint.mode=selective compile.mode=none model.name=gemma2", 1,
     "model.attention_soft_cap = 50.0 uses FlexAttention on a GPU, but activation_checkpoint.mode = 'selective' with"),
    ("model.dim=12", 1, "model.dim / model.num_heads = 3 is odd"),
    ("model.name=gpt model.vocab_size=256", 1, "vocab_size = 256 is smaller than the tokenizer's 257 tokens; use 257"),
    ("training.steps=99", 1,
     "schedule.warmup_steps = 100 is more than training.steps = 99, so the learning rate would not reach its peak; use "
     "schedule.warmup_steps = 99 or less, or train longer"),
    ("schedule.decay_ratio=0.95", 1,
     "warmup_steps = 100 and schedule.decay_ratio = 0.95, which is 950 steps, are more than training.steps = 1000"),
    ("schedule.warmup_steps=600 schedule.decay_ratio=0.401", 1,
     "warmup_steps = 600 and schedule.decay_ratio = 0.401, which is 401 steps, are more than training.steps = 1000"),
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
    ("training.attention=flash data.document_masks=true", 1,
     "'flash' does not support the mask of data.document_masks = true; set training.attention = 'auto'"),
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
    ("parallelism.pipeline=2 parallelism.pipeline_stages=2", 2, "'1f1b' has 1 stage(s) on each rank, not 2"),
    ("parallelism.pipeline=4 training.global_batch_size=8 training.local_batch_size=4", 4,
     "over 4 ranks requires 4 or more micro-batches, but a rank has 2 (8 sequences, training.local_batch_size = 4); use "
     "training.local_batch_size = 1 or 2"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=interleaved_1f1b training.global_batch_size=10 "
     "training.local_batch_size=2", 2,
     "requires a multiple of 2 micro-batches, but a rank has 5"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=zbv training.global_batch_size=4 training.local_batch_size=4", 2,
     "requires a multiple of 2 micro-batches, but a rank has 1 (4 sequences, training.local_batch_size = 4); use "
     "training.local_batch_size = 1 or 2"),
    ("parallelism.pipeline=4 training.global_batch_size=2 training.local_batch_size=1", 4,
     "a rank has 2 (2 sequences, training.local_batch_size = 1); raise training.global_batch_size"),
    ("parallelism.pipeline=2 parallelism.pipeline_schedule=zbv activation_checkpoint.mode=selective compile.mode=none", 2,
     "supports one; use mode = 'full', compile.mode = 'block', or the schedule '1f1b'"),
    ("training.global_batch_size=8 training.local_batch_size=3", 1,
     "does not divide the 8 sequences of a rank (global_batch_size 8 over 1 data-parallel ranks); use 1, 2 or 4"),
    ("parallelism.tensor=2 parallelism.pipeline=2", 6, "pipeline x tensor = 2 x 2 = 4 does not divide the 6 processes"),
    ("parallelism.tensor=2 parallelism.shard=2", 8,
     "shard x tensor = 2 x 2 = 4, but there are 8 processes; start 4, or set parallelism.shard = -1"),
    # Divisors of large numbers, which are found at once.
    ("model.num_heads=999999937", 1, "num_heads = 999999937; use 1 or 999999937"),
    ("model.dim=999999937 model.num_heads=999999936", 1, "does not divide model.dim = 999999937; use 1 or"),
    ("training.global_batch_size=735134400 training.local_batch_size=735134399", 1, "use 245044800, 367567200 or"),
    ("parallelism.tensor=999999937", 1, "parallelism.tensor = 999999937 does not divide model.num_heads = 4; use 1"),
    ("parallelism.replicate=999999937", 1000000, "the 1000000 processes; use 250000, 500000 or 1000000"),
    ("parallelism.pipeline=4 training.global_batch_size=735134400 training.local_batch_size=735134400", 4,
     "use training.local_batch_size = 122522400, 147026880 or 183783600"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "processes", "message"), REFUSED)
def test_an_invalid_recipe_is_refused_with_the_remedy(keys: str, processes: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    invalid = load(PretrainRecipe, tmp_path / "recipe.toml", dict(key.split("=", 1) for key in keys.split()))
    with pytest.raises(UserError) as caught:
        check_recipe(invalid, processes)
    assert [message in line for line in str(caught.value).splitlines()].count(True) == 1


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


def test_an_unknown_compile_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nope = recipe(compile=dict(backend="nope"))
    with pytest.raises(
        UserError, match=r"compile\.backend = 'nope' is not a backend of torch\.compile; choose from inductor, "
    ):
        check_recipe(nope, 1)
    with pytest.raises(UserError, match=r"did you mean 'inductor'\?"):
        check_recipe(recipe(compile=dict(backend="inducter")), 1)
    entry = EntryPoint("nope", "package:backend", "torch_dynamo_backends")
    monkeypatch.setattr(
        "titanlike.run.checks.recipe.entry_points", lambda group: [entry] if group == entry.group else []
    )
    check_recipe(nope, 1)
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


def test_a_layout_that_does_not_fit_the_model_is_not_to_be_started() -> None:
    with pytest.raises(UserError, match=r"^parallelism.tensor = 3 does not divide model.num_kv_heads = 2; use 1 or 2$"):
        model = LlamaConfig(num_kv_heads=2, num_heads=6, dim=192, ffn_dim=96, vocab_size=384)
        check_recipe(recipe(parallelism=dict(tensor=3), model=model, training=dict(seq_len=99)), 2)


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


@pytest.mark.parametrize(("processes", "passes"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_gradient_accumulation_covers_the_global_batch(processes: int, passes: int) -> None:
    assert Training(global_batch_size=32, local_batch_size=8).num_microbatches(processes) == passes


def test_a_missing_data_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path = '.*/none' does not exist; .*data\.source = 'synthetic'"):
        check_machine(recipe(data=Data(source="text", path=str(tmp_path / "none")), run=Run(dir=str(tmp_path))))


def test_a_missing_tokenizer_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.encoding = '.*tokenizer\.model': no such file"):
        check_machine(
            recipe(tokenizer=Tokenizer(encoding=str(tmp_path / "tokenizer.model")), run=Run(dir=str(tmp_path)))
        )


def test_an_unknown_encoding_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'\?"):
        check_machine(recipe(tokenizer=Tokenizer(encoding="gpt-2"), run=Run(dir=str(tmp_path))))


def test_a_data_path_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "d [v1]").mkdir()
    check_machine(recipe(data=Data(source="text", path=str(tmp_path / "d [v1]")), run=Run(dir=str(tmp_path))))


def test_a_run_directory_below_a_file_is_refused_and_nothing_is_created(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"taken is a file, not a folder; choose another run\.dir"):
        check_machine(recipe(run=Run(dir=str(tmp_path / "taken" / "runs"), name="x")))
    check_machine(recipe(run=Run(dir=str(tmp_path / "new"), name="x")))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_biases_of_positions_that_tensor_parallelism_divides_within_a_block() -> None:
    recipe = Seq2SeqRecipe(model=T5Config(**{**T5_SIZES["xxl"], "size": "xxl"}), parallelism=Parallelism(tensor=2))
    problems = list(divisibility_problems(replace(recipe, optimizer=Optimizer(state_dtype="8bit"))))
    assert any(
        "tensor = 2 splits the 64 columns of encoder_bias.weight within a block" in problem for problem in problems
    )
