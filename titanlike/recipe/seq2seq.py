"""The recipe of `recipes/seq2seq.py`: pre-training with inputs and targets. Does not import torch."""

from collections.abc import Iterator
from typing import ClassVar

from titanlike.config.base import FilePath, divisors, one_of, section
from titanlike.config.seq2seq import Seq2Seq
from titanlike.models.families import ModelConfig
from titanlike.models.t5.config import T5Config
from titanlike.recipe.pretrain import PretrainRecipe

BYTES = 257  # tokens of the byte tokenizer, none of which is a sentinel
ALIGNMENT = 8  # targets are padded to a multiple: attention kernels on GPUs need it of the biases, and tensor parallelism divides


@section
class Seq2SeqRecipe(PretrainRecipe):
    """The recipe of `recipes/seq2seq.py`."""

    program: FilePath = "seq2seq"
    """Training program: the name of a file next to the recipe or in `recipes/`, or a path. It is relative to the recipe, and on the
    command line to the working directory."""
    model: ModelConfig = T5Config()
    seq2seq: Seq2Seq = Seq2Seq()
    elsewhere: ClassVar[dict[str, str]] = {
        name: program for name, program in PretrainRecipe.elsewhere.items() if program != "seq2seq"
    }
    is_encoder_decoder: ClassVar[bool] = True

    @property
    def has_pairs(self) -> bool:
        """Whether the data are pairs of texts."""
        return bool(self.data.prompt_field)

    @property
    def decoder_start_token(self) -> int:
        """The token that the decoder starts with."""
        return int(getattr(self.model, "decoder_start_token", 0))

    @property
    def target_len(self) -> int:
        """Tokens of a target, with padding."""
        length = self.seq2seq.target_len or self.training.seq_len
        if not self.has_pairs:
            length = self.seq2seq.spans(self.training.seq_len).target_len
        return -(-length // ALIGNMENT) * ALIGNMENT

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass for each token of the input, including the targets."""
        model = self.model
        if not isinstance(model, T5Config):
            return super().flops_per_token
        return model.flops_per_token(self.training.seq_len, target_len=self.target_len)

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between sections."""
        yield from super().problems()
        layout, training, target_len = self.parallelism, self.training, self.target_len
        if self.data.packing == "best_fit":
            yield (
                "data.packing = 'best_fit' pads sequences, but spans of all tokens are corrupted, and pairs of texts stay whole "
                "anyway; use data.packing = 'concatenate'"
            )
        if layout.pipeline > 1:
            yield (
                f"parallelism.pipeline = {layout.pipeline}: a pipeline stage passes on one tensor, but each block of the decoder "
                "reads the output of the encoder, too; use parallelism.shard or tensor instead"
            )
        if layout.context > 1:
            yield (
                f"parallelism.context = {layout.context}: context parallelism does not add the biases of relative positions; use "
                "parallelism.shard or tensor instead"
            )
        if target_len > self.model.max_seq_len:
            yield (
                f"the targets have {target_len} tokens, more than model.max_seq_len = {self.model.max_seq_len}; increase it, or "
                f"reduce seq2seq.{'target_len' if self.has_pairs else 'noise_density'}"
            )
        elif target_len % layout.tensor:
            near = [number for number in divisors(target_len) if number <= layout.tensor]
            yield (
                f"parallelism.tensor = {layout.tensor} does not divide the {target_len} tokens of a target; use "
                f"{one_of(near[-4:])}"
            )
        if training.attention not in ("auto", "efficient"):
            yield (
                f"training.attention = '{training.attention}' does not compute gradients of the biases of relative positions, or "
                "not fast; set it to 'auto'"
            )
        if self.data.document_masks:
            yield "data.document_masks = true: spans are of the full sequence, and pairs are separated in any case; set it to false"
        if self.has_pairs and self.data.source != "text":
            yield f"data.prompt_field is set: pairs of texts are read from data.source = 'text', not '{self.data.source}'"
        num_spans = self.seq2seq.spans(training.seq_len).num_spans
        if self.tokenizer.encoding == "bytes" and not self.has_pairs and self.model.vocab_size < BYTES + num_spans:
            yield (
                f"model.vocab_size = {self.model.vocab_size} has no row for each of the sentinels of {num_spans} spans, which "
                f"tokenizer.encoding = 'bytes' does not have; set it to {-(-(BYTES + num_spans) // 64) * 64} or, if the rows "
                "come from checkpoint.initial, reduce training.seq_len"
            )
        if self.sample.tokens:
            yield f"sample.tokens = {self.sample.tokens}: use `titanlike generate` to generate from the checkpoints; set it to 0"
        if self.evaluation.interval:
            yield (
                f"evaluation.interval = {self.evaluation.interval}: tasks are scored by decoders without an encoder; set it to 0, "
                "and validation.interval for the loss of held-out targets"
            )

    def summary_lines(self) -> list[str]:
        """Returns a line about the lengths of inputs and targets."""
        what = "pairs of texts" if self.has_pairs else "corrupted spans"
        return [f"targets {what}: inputs of {self.training.seq_len} tokens, targets of {self.target_len}"]
