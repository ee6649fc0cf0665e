"""torchtitan 0.3.0: its Trainer and its Llama 3, on the task's batches.

    row "shipped"   its defaults: CUDA graphs, FlexAttention with masks of documents, the loss in 8 chunks, not compiled, selective
                    activation checkpointing
    row "best"      torch.compile for each block and the loss, causal scaled dot product attention, no activation checkpointing

One process has FSDP2, as always. Differences from its defaults: norms have no weight decay, so that losses match, and "best"
replaces FlexAttention, which its registry requires, in the config. float8 is rowwise, and compiled in both rows, as its
documentation recommends. On a CPU there are no CUDA graphs, and "shipped" has the attention of "best".
`options` are its own keys: `training.disable_cuda_graphs=true`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Task
from benchmarks.torchtitan_task import TASK, Timed, interleave, plain_name, prepare, set_keys  # before torchtitan

# isort: split
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, Configurable, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer


class Model(llama3.Llama3Model):
    """torchtitan's Llama 3, initialized with the task's weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(llama3.Llama3Model.Config):
        pass

    @torch.no_grad()
    def init_weights(self, **options: Any) -> None:
        super().init_weights(**options)
        for name, parameter in self.named_parameters():
            parameter.to_local().copy_(weight_of(plain_name(name)))  # one process has all of it


def weight_of(name: str) -> Tensor:
    """Returns the task's weight for a parameter of torchtitan: query, key and value are one, by key's heads."""
    if "wqkv" in name:
        query, key, value = (TASK.weights[name.replace("qkv_linear.wqkv", part)] for part in ("wq", "wk", "wv"))
        heads = (TASK.model["num_kv_heads"], -1)
        parts = (interleave(query), interleave(key), value)
        return torch.cat([each.unflatten(0, heads) for each in parts], dim=1).flatten(0, 1)
    return TASK.weights[name.replace("lm_head.", "output.")]


class NoTokenizer(Configurable):
    """The task has token ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass


class Batches(Configurable):
    """The task's micro-batches on the host. Each sequence is one document."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        with_positions: bool  # FlexAttention makes its masks of them

    def __init__(self, config: Config, **_: Any) -> None:
        self.with_positions = config.with_positions

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        task = replace(TASK, device="cpu")
        positions = torch.arange(task.seq_len).expand(task.micro_batch_size, -1)
        for step in count(1):
            for tokens, labels in task.batch(step):
                yield {"input": tokens} | ({"positions": positions} if self.with_positions else {}), labels


def has_masks(task: Task) -> bool:
    """Returns whether attention is FlexAttention, as its registry requires."""
    return task.row == "shipped" and task.device == "cuda"


def model_config(task: Task) -> llama3.Llama3Model.Config:
    """Returns the task's model, built as `torchtitan.models.llama3` builds its own."""
    model = task.model
    dim, heads = model["dim"], model["num_heads"]
    rope = ComplexRoPE.Config(
        dim=dim // heads, max_seq_len=model["max_seq_len"], theta=model["rope_theta"], scaling="llama",
        scaling_factor=model["rope_scaling"], original_max_position_embeddings=model["rope_original_seq_len"],
    )  # fmt: skip
    layers = llama3._build_llama3_layers(
        n_layers=model["num_layers"], dim=dim, n_heads=heads, n_kv_heads=model["num_kv_heads"], hidden_dim=model["ffn_dim"],
        rope=rope, attn_backend="flex",
    )  # fmt: skip
    embedding = llama3._EMBEDDING_SKIP_INIT if model["tied_head"] else llama3._EMBEDDING_INIT
    config = Model.Config(
        dim=dim, vocab_size=model["vocab_size"], enable_weight_tying=model["tied_head"], layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=model["vocab_size"], embedding_dim=dim, param_init=embedding),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=model["vocab_size"], param_init=llama3._output_linear_init(dim)
        ),
    )  # fmt: skip
    for _, norm, _, _ in config.traverse(RMSNorm.Config):
        norm.eps = model["norm_eps"]
    if not has_masks(task):
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if task.precision == "float8":
        # With torchao 0.18, "auto_filter_small_kn" converts no layer.
        converter = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)
        config = converter.build().convert(config)
    return config


def config_of(task: Task) -> Trainer.Config:
    """Returns the task as torchtitan's config."""
    best, float8 = task.row == "best", task.precision == "float8"
    adamw = {"lr": task.lr, "betas": (task.beta1, task.beta2), "eps": task.eps}
    groups = [(r"norm", 0.0), (r".*", task.weight_decay)]
    spec = ModelSpec(
        name="task", flavor="task", model=model_config(task), parallelize_fn=llama3.parallelize_llama, pipelining_fn=None,
        post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=str(Path(task.result_file).parent),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=task.model["vocab_size"])),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": decay})
                for pattern, decay in groups
            ]
        ),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(with_positions=has_masks(task)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            steps=task.warmup + task.steps + 1, seq_len=task.seq_len, max_norm=task.max_norm,
            local_batch_size=task.micro_batch_size, global_batch_size=task.batch_size,
            mixed_precision_param="float32" if task.precision == "float32" else "bfloat16",
            disable_cuda_graphs=task.device == "cpu",
        ),
        compile=CompileConfig(enable=best or float8),
    )  # fmt: skip
    if best:
        config.activation_checkpoint = None
    set_keys(config, task.options)
    return config


class TimedTrainer(Timed, Trainer):
    """torchtitan's Trainer, on a clock."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


def main() -> None:
    """Trains until the clock ends the process."""
    TimedTrainer.clock = prepare()
    TimedTrainer(config_of(TASK)).train()


if __name__ == "__main__":
    main()
