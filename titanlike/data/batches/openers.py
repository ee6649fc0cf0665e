"""What opens the data of a recipe, for its program and for tools that show the same data. No torch."""

from collections.abc import Callable
from functools import partial

from titanlike.config import PretrainRecipe
from titanlike.config.dpo import DpoRecipe
from titanlike.config.finetune import FinetuneRecipe
from titanlike.config.mlm import MlmRecipe
from titanlike.config.seq2seq import Seq2SeqRecipe
from titanlike.data.batches import chats, masked_tokens, pairs, seq2seq, sources
from titanlike.data.batches.sources import Sources


def of(recipe: PretrainRecipe) -> Callable[..., Sources]:
    """Returns `open_sources` of `build_dataloaders` for a recipe of any shipped program."""
    if isinstance(recipe, Seq2SeqRecipe):
        return partial(
            seq2seq.open_sources, seq2seq=recipe.seq2seq, vocab_size=recipe.model.vocab_size,
            start=recipe.decoder_start_token, target_len=recipe.target_len,
        )  # fmt: skip
    if isinstance(recipe, MlmRecipe):
        return partial(masked_tokens.open_sources, masking=recipe.mlm, model_vocab_size=recipe.model.vocab_size)
    if isinstance(recipe, DpoRecipe):
        return pairs.open_sources
    return chats.open_sources if isinstance(recipe, FinetuneRecipe) else sources.open_sources
