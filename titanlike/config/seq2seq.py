"""The section `seq2seq`: spans of text that are replaced by sentinels. Does not import torch."""

from bisect import bisect_right
from typing import Annotated, NamedTuple

from pydantic import Field

from titanlike.config.base import NonNegative, only_if, only_with, section

HAS_PAIRS = only_if(bool, "data.prompt_field", remedy="set {0} to the field of the input")
CORRUPTS_SPANS = only_with("data.prompt_field", "")
MAX_TEXT = 2**40  # tokens: with a noise density near 1, the input of a longer text could still be short


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
    """Maximum number of tokens of the target of a pair, with EOS; of the input, it is `training.seq_len`. Longer texts are
    truncated. Default: `training.seq_len`. Targets of span corruption follow from `noise_density`."""
    source_prefix: Annotated[str, HAS_PAIRS] = ""
    """Text before the input of each pair, such as `summarize: `. Default: none."""

    def spans(self, seq_len: int) -> Spans:
        """Returns the lengths of the longest text whose input has at most `seq_len` tokens."""
        lengths = range(2, MAX_TEXT)
        number = bisect_right(lengths, seq_len, key=lambda raw_len: self._spans_of(raw_len).input_len)
        return self._spans_of(lengths[max(number - 1, 0)])

    def _spans_of(self, raw_len: int) -> Spans:
        num_noise = max(1, min(round(raw_len * self.noise_density), raw_len - 1))
        num_spans = max(1, min(round(num_noise / self.mean_noise_span_length), num_noise, raw_len - num_noise))
        return Spans(raw_len, num_noise, num_spans)
