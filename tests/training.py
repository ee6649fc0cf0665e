"""Trains a tiny model with the shipped programs under any layout, and reads the results."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes import distill, dpo, finetune, mlm, pretrain, seq2seq
from tests.launching import records
from tests.pool import Pool
from titanlike.checkpoint import CheckpointMetadata
from titanlike.config.dpo import PreferenceData
from titanlike.config.finetune import ChatData
from titanlike.models.bert.config import BertConfig
from titanlike.models.common.init import initialize
from titanlike.models.deepseek.config import DeepseekV2Config, DeepseekV3Config
from titanlike.models.gemma.config import Gemma2Config, Gemma3Config
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.mistral.config import MistralConfig
from titanlike.models.modernbert.config import ModernBertConfig
from titanlike.models.moe.config import MixtralConfig, Qwen3MoeConfig
from titanlike.models.olmo2.config import Olmo2Config
from titanlike.models.phi3.config import Phi3Config
from titanlike.models.qwen.config import Qwen2Config, Qwen3Config
from titanlike.models.registry import build_model
from titanlike.models.smollm3.config import SmolLM3Config
from titanlike.models.t5.config import T5Config
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.parallelize import parallelize
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.recipe.finetune import FinetuneRecipe, lora_of
from titanlike.recipe.mlm import MlmRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run.changes import check_resume
from titanlike.run.run import Run
from titanlike.run.run_dir import recipe_as_json
from titanlike.tools.verify.recipe import Result, differences
from titanlike.utils.modules import copies_of

mesh_of = functools.cache(build_mesh)

LLAMA = LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320)
GPT_ = GPTConfig(dim=64, num_layers=2, num_heads=4, vocab_size=320)
MISTRAL = MistralConfig(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=96, vocab_size=320, sliding_window=11
)
SMOLLM3 = SmolLM3Config(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320, no_rope_every=2)
OLMO2 = Olmo2Config(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320)
PHI3 = Phi3Config(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320, sliding_window=11)
QWEN2 = Qwen2Config(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320)
QWEN3 = Qwen3Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=96, vocab_size=320, tied_head=True
)
# The window is shorter than a sequence, and than what a context-parallel rank holds.
GEMMA2 = Gemma2Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, query_scalar=24.0, ffn_dim=96, vocab_size=320,
    sliding_window=11, attention_soft_cap=0.02, logit_soft_cap=0.2, max_seq_len=128,
)  # fmt: skip
GEMMA3 = Gemma3Config(
    dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, query_scalar=24.0, ffn_dim=96, vocab_size=320,
    sliding_window=11, sliding_window_pattern=3, max_seq_len=128,
)  # fmt: skip
BERT = BertConfig(dim=64, num_layers=2, num_heads=4, ffn_dim=96, vocab_size=320, num_token_types=3)
MODERNBERT = ModernBertConfig(dim=64, num_layers=2, num_heads=4, ffn_dim=96, vocab_size=320, sliding_window=10)
# Distances of tokens are in all buckets: the largest share one.
T5 = T5Config(
    dim=64, num_layers=4, num_encoder_layers=2, num_heads=4, head_dim=20, ffn_dim=96, vocab_size=320,
    relative_attention_num_buckets=16, relative_attention_max_distance=20,
)  # fmt: skip
# Sequences are unbalanced, so that both ways of balancing have an effect.
QWEN3_MOE = Qwen3MoeConfig(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=48, vocab_size=320, num_experts=8,
    experts_per_token=3, balance_loss=0.1,
)  # fmt: skip
MIXTRAL = MixtralConfig(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=320, num_experts=4, balance_loss=0.1
)
# With the options of DeepSeek-V3's layer.
SHARED_EXPERTS = dataclasses.replace(
    QWEN3_MOE, num_experts=4, experts_per_token=2, num_shared_experts=2, router_score="sigmoid", router_scale=2.5,
    balance_bias_rate=0.01,
)  # fmt: skip
# Under a pipeline with four stages, the first one has no experts.
DEEPSEEK: dict[str, Any] = dict(
    dim=64, num_layers=2, num_heads=4, dense_ffn_dim=96, ffn_dim=48, vocab_size=320, num_experts=8, experts_per_token=3,
    kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20, rope_scaling=4.0, rope_original_seq_len=16,
    balance_loss=0.1,
)  # fmt: skip
DEEPSEEK_V2 = DeepseekV2Config(**DEEPSEEK)
DEEPSEEK_V3 = DeepseekV3Config(**DEEPSEEK, q_lora_rank=24, balance_bias_rate=0.01)
# The window is shorter than what a context-parallel rank holds, and the limit of the gate is that of published models.
GPT_OSS = GptOssConfig(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=48, vocab_size=320, num_experts=8,
    experts_per_token=3, sliding_window=11, rope_scaling=4.0, rope_original_seq_len=16, balance_loss=0.1,
)  # fmt: skip
MULTI_TOKEN = dataclasses.replace(DEEPSEEK_V3, num_mtp_layers=2, mtp_loss_weight=3.0)  # a weight that shows
MODELS = {"llama": LLAMA, "gpt": GPT_}

TINY: dict[str, dict[str, Any]] = dict(
    data=dict(source="synthetic"),
    training=dict(steps=5, seq_len=32, global_batch_size=8, local_batch_size=1, compute_dtype="float32"),
    # Adam normalizes gradients. Where the exact gradient is 0 (the bias of wk cancels in softmax), it would turn rounding errors
    # into full steps; this eps keeps them small beside gradients of 1e-3 and more.
    optimizer=dict(lr=1e-2, eps=1e-4),
    schedule=dict(warmup_steps=2),
    compile=dict(mode="none"),
    validation=dict(interval=5, batches=1),
    metrics=dict(interval=1, trackers=()),
)


def changed(base: PretrainRecipe, **sections: Any) -> PretrainRecipe:
    """Returns a recipe with sections replaced, or with the given fields of sections replaced."""
    values = {k: dataclasses.replace(getattr(base, k), **v) if isinstance(v, dict) else v for k, v in sections.items()}
    return dataclasses.replace(base, **values)


def tiny(folder: Path, name: str, **sections: Any) -> PretrainRecipe:
    """Returns a small recipe. Sections are full sections, or dictionaries of changed fields."""
    merged: dict[str, Any] = {**TINY, "run": dict(dir=str(folder), name=name), "model": LLAMA}
    for section, value in sections.items():
        merged[section] = merged.get(section, {}) | value if isinstance(value, dict) else value
    base = PretrainRecipe()
    if isinstance(merged["data"], PreferenceData):
        base = DpoRecipe()
    elif merged["model"].is_encoder_decoder:
        base = Seq2SeqRecipe()
    elif not merged["model"].causal:
        base = MlmRecipe()
    elif "teacher" in merged:
        base = DistillRecipe()
    elif "lora" in merged or isinstance(merged["data"], ChatData):
        base = FinetuneRecipe()
    return changed(base, **merged)


def build(recipe: PretrainRecipe) -> tuple[nn.Module, Mesh]:
    """Builds this rank's part of the recipe's model, initialized, and the mesh, as the recipe does."""
    layout = recipe.parallelism.resolve(dist.get_world_size())
    mesh = mesh_of("cpu", **layout.dimensions(), expert=layout.expert)
    with torch.device("meta"):
        model: nn.Module = build_model(recipe.model)
    model = parallelize(
        model, mesh, split=layout.split(recipe.model), training=recipe.training, parallelism=layout, float8=recipe.float8,
        lora=lora_of(recipe), activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile,
        loss_reduction="none" if isinstance(recipe, DpoRecipe) else "sum",
    )  # fmt: skip
    initialize(model, torch.device("cpu"), recipe.run.seed)
    return model, mesh


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a copy of the full tensor, all-gathered from its shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def world_size(recipe: PretrainRecipe) -> int:
    """Returns the number of processes of a layout."""
    return math.prod(recipe.parallelism.dimensions().values())


def train_on_rank(recipe: PretrainRecipe) -> None:
    """Runs the recipe on this rank of a pool."""
    # A process runs many tests: process groups are reused for each layout, and the compiler is reset.
    programs = {
        PretrainRecipe: pretrain,
        FinetuneRecipe: finetune,
        DpoRecipe: dpo,
        DistillRecipe: distill,
        MlmRecipe: mlm,
        Seq2SeqRecipe: seq2seq,
    }
    program: Any = programs[type(recipe)]
    program.build_mesh = mesh_of
    torch._dynamo.reset()
    program.main(recipe)


def train(pool: Pool, recipe: PretrainRecipe) -> Result:
    """Runs the recipe on all ranks of the pool."""
    pool.run(train_on_rank, recipe)
    return result(recipe)


def weights_on_rank(recipe: PretrainRecipe) -> dict[str, Tensor]:
    """Runs the recipe on this rank of a pool. The first rank of each pipeline stage returns its weights, gathered from shards."""
    trained: list[nn.Module] = []
    restore = Run.restore

    def restored(run: Run, model: nn.Module, *arguments: Any, **others: Any) -> None:
        trained.append(model)
        restore(run, model, *arguments, **others)

    with mock.patch.object(Run, "restore", restored):
        train_on_rank(recipe)
    copies = copies_of(trained[0])
    weights = {copies.get(name, name): full_tensor(value) for name, value in trained[0].state_dict().items()}
    is_first = dist.get_rank() % (dist.get_world_size() // recipe.parallelism.pipeline) == 0
    return weights if is_first else {}


def train_unsaved(pool: Pool, recipe: PretrainRecipe) -> Result:
    """Runs the recipe without checkpoints. The state has the weights only."""
    recipe = changed(recipe, checkpoint=dict(enabled=False))
    weights = {name: value for of_rank in pool.run(weights_on_rank, recipe) for name, value in of_rank.items()}
    steps = records(Path(recipe.run.dir, recipe.run.name))
    return Result(
        losses=[record["loss"] for record in steps if "loss" in record],
        gradient_norms=[record["grad_norm"] for record in steps if "loss" in record],
        validation=[record["validation_loss"] for record in steps if "validation_loss" in record],
        state={"model": weights},
    )


def result(recipe: PretrainRecipe) -> Result:
    """Reads a run's metrics and last checkpoint."""
    return Result.of(Path(recipe.run.dir, recipe.run.name))


def assert_same(
    found: Result, expected: Result, *, loss: float = 1e-5, norm: float = 1e-4, weights: float = 1e-4
) -> None:
    """Asserts that losses, gradient norms, validation losses and weights match to these relative tolerances."""
    tolerances = {"loss": loss, "gradient norm": norm, "weights": weights}
    for metric, (worst, where) in differences(found, expected).items():
        limit = tolerances[metric]
        assert worst <= limit, f"{metric} differs by {worst:.1e} ({where}), more than {limit:.0e}"


def resume(
    saved: CheckpointMetadata, recipe: PretrainRecipe, data: str, layout: dict[str, int], machine: dict[str, str]
) -> list[str]:
    """Checks whether this recipe may resume from a checkpoint, with this data, layout and machine."""
    return check_resume(saved, CheckpointMetadata(0, recipe_as_json(recipe), data, layout, machine), recipe)


class Observer(TorchDispatchMode):
    """Calls a function with each operation, its arguments and its result."""

    def __init__(self, observe: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.observe(func, args, result)
        return result


class Operations(Observer):
    """Counts operations by name, and the bytes of collectives: the larger of input and output."""

    def __init__(self) -> None:
        super().__init__(self.count)
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, func: Any, args: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes[name] += max(x.nbytes for x in tree_leaves((args, result)) if isinstance(x, Tensor))


def largest_logits(recipe: PretrainRecipe) -> int:
    """Trains on this rank. Returns the elements of the largest result of an operation whose last dimension is the vocabulary."""
    sizes = [0]

    def observe(func: Any, args: Any, result: Any) -> None:
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.dim() > 1]
        sizes.extend(each.numel() for each in tensors if each.shape[-1] == recipe.model.vocab_size)

    with Observer(observe):
        train_on_rank(recipe)
    return max(sizes)


def deep(model: Any, **fields: Any) -> Any:
    """Returns a model of four blocks, so that two ranks have two pipeline stages each, with other fields replaced."""
    return dataclasses.replace(model, num_layers=4, **fields)
