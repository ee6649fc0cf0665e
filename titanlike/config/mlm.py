"""The section `mlm`: which tokens are masked. Does not import torch."""

from typing import Annotated

from pydantic import Field

from titanlike.config.base import section


@section
class MaskedTokens:
    """Tokens that an encoder predicts. Which they are depends on the seed, the step and the token, not on the layout."""

    mask_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Probability that a token is predicted: 0.15 for BERT, 0.3 for ModernBERT. Of these tokens, 80% are replaced by the mask token
    and 10% by a random token; 10% are kept. BOS and EOS are not predicted."""
    mask_token: str = ""
    """Special token of the tokenizer that replaces tokens. Default: `[MASK]` or `<mask>` or, if the tokenizer has none
    of these, the first row of the embedding after its tokens, which `model.vocab_size` has to include."""
