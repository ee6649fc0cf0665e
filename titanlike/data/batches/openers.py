"""What opens the data of a recipe, for its program and for tools that show the same data. No torch."""

from collections.abc import Callable
from functools import partial

from titanlike.data.batches import chats, masked_tokens, preference_sequences, seq2seq, sources
from titanlike.data.batches.sources import Sources
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.mlm import MlmRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe


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
        return preference_sequences.open_sources
    return chats.open_sources if isinstance(recipe, FinetuneRecipe) else sources.open_sources
