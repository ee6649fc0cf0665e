"""The recipe of `recipes/pretrain.py`. Does not import torch."""

from collections.abc import Iterator
from typing import ClassVar

from titanlike.config.base import (
    FilePath,
    section,
)
from titanlike.config.optimizer import Optimizer, Schedule
from titanlike.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Data,
    Evaluation,
    Float8,
    Metrics,
    Parallelism,
    Profiling,
    Run,
    Sample,
    Tokenizer,
    Training,
    Validation,
)
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import ModelConfig
from titanlike.models.llama.config import LlamaConfig


@section
class PretrainRecipe:
    """The recipe of `recipes/pretrain.py`."""

    program: FilePath = "pretrain"
    """Training program: the name of a file next to the recipe or in `recipes/`, or a path. It is relative to the recipe, and on the
    command line to the working directory."""
    run: Run = Run()
    model: ModelConfig = LlamaConfig()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallelism: Parallelism = Parallelism()
    float8: Float8 = Float8()
    compile: Compile = Compile()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    evaluation: Evaluation = Evaluation()
    sample: Sample = Sample()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    # What another shipped program has, and its name, for errors.
    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("lora", "data.chat_template", "data.long_chats", "data.source=chat", "data.source=synthetic_chat"),
            "finetune",
        ),
        **dict.fromkeys(("preference", "data.source=preference", "data.source=synthetic_preference"), "dpo"),
        "mlm": "mlm",
        "seq2seq": "seq2seq",
        **dict.fromkeys(("distillation", "teacher"), "distill"),
    }
    causal: ClassVar[bool] = True  # trains models that predict the next token
    is_encoder_decoder: ClassVar[bool] = False  # trains models with an encoder and a decoder

    @property
    def trains_all_weights(self) -> bool:
        """Whether no weight is frozen."""
        return True

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass of a token."""
        return self.model.flops_per_token(self.training.seq_len, frozen=not self.trains_all_weights)

    @property
    def initial_weights(self) -> dict[str, tuple[str, TransformerConfig]]:
        """The models whose weights are read, by the key that names the files. A program's own recipe type adds its own."""
        return {"checkpoint.initial": (self.checkpoint.initial, self.model)} if self.checkpoint.initial else {}

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """The keys of `initial_weights` whose files a resumed run needs again, of a model that is not trained."""
        return ()

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between sections that only this program has. A program's own recipe type adds
        its own."""
        yield from ()

    def summary_lines(self) -> list[str]:
        """Returns lines for the summary of a run, about sections that only this program has."""
        return []
