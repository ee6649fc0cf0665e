"""The recipe of `recipes/seq2seq.py`: that of pre-training with inputs and targets. Does not import torch."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from titanlike.config.base import FilePath, NonNegative, divisors, one_of, only_if, only_with, section
from titanlike.config.sections import PretrainRecipe
from titanlike.models.configs import ModelConfig
from titanlike.models.t5_config import T5Config

BYTES = 257  # tokens of the byte tokenizer, none of which is a sentinel
HAS_PAIRS = only_if(bool, "data.prompt_field", remedy="set {0} to the field of the input")
CORRUPTS_SPANS = only_with("data.prompt_field", "")
MAX_TEXT = 2**40  # tokens: with a noise density near 1, the input of a longer text could still be short
ALIGNMENT = 8  # targets are padded to a multiple: attention kernels on GPUs need it of the biases, and tensor parallelism divides


class Spans(NamedTuple):
    """The lengths of span corruption, which are the same for all sequences."""

    raw_len: int
    """Tokens of text."""
    num_noise: int
    """Tokens that are replaced."""
    num_spans: int
    """Spans of them, each replaced by a sentinel."""

    @property
    def input_len(self) -> int:
        """Tokens of the input: what is not replaced, the sentinels and EOS."""
        return self.raw_len - self.num_noise + self.num_spans + 1

    @property
    def target_len(self) -> int:
        """Tokens of the target: the sentinels, each followed by what it replaces, and EOS."""
        return self.num_noise + self.num_spans + 1


@section
class Seq2Seq:
    """Inputs and targets. They are spans of text or, with `data.prompt_field`, pairs of texts: the field `data.prompt_field` is the
    input, and `data.text_field` the target."""

    noise_density: Annotated[float, Field(gt=0.0, lt=1.0), CORRUPTS_SPANS] = 0.15
    """Fraction of the tokens of a text that span corruption replaces. Not used for pairs."""
    mean_noise_span_length: Annotated[float, Field(ge=1.0, le=1000.0), CORRUPTS_SPANS] = 3.0
    """Mean number of consecutive tokens that one sentinel replaces. Not used for pairs."""
    target_len: Annotated[NonNegative, HAS_PAIRS] = 0
    """Maximum number of tokens of the target of a pair, with EOS; that of the input is `training.seq_len`. Longer texts are
    truncated. Default: `training.seq_len`. Those of span corruption follow from `noise_density`."""
    source_prefix: Annotated[str, HAS_PAIRS] = ""
    """Text before the input of each pair, such as `summarize: `. Default: none."""

    def spans(self, seq_len: int) -> Spans:
        """Returns the lengths for inputs of `seq_len` tokens: those of the longest text that such an input holds."""
        lengths = range(2, MAX_TEXT)
        number = bisect_right(lengths, seq_len, key=lambda raw_len: self._spans_of(raw_len).input_len)
        return self._spans_of(lengths[max(number - 1, 0)])

    def _spans_of(self, raw_len: int) -> Spans:
        num_noise = max(1, min(round(raw_len * self.noise_density), raw_len - 1))
        num_spans = max(1, min(round(num_noise / self.mean_noise_span_length), num_noise, raw_len - num_noise))
        return Spans(raw_len, num_noise, num_spans)


@section
class Seq2SeqRecipe(PretrainRecipe):
    """The recipe of `recipes/seq2seq.py`."""

    recipe: FilePath = "seq2seq"
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
        """FLOPs of the forward and backward pass for each token of the input, with those of the targets."""
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
                f"tokenizer.encoding = 'bytes' does not have; set it to {-(-(BYTES + num_spans) // 64) * 64} or, if the rows are "
                "those of checkpoint.initial, reduce training.seq_len"
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
