"""Masked tokens: a function of the seed, the sequence and the position, under every layout and after a resume; their loss and
accuracy; and recipes that cannot work."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

from tests.data.sequences import BYTES, batches, open_stream, write
from tests.training import BERT, MODERNBERT, changed
from titanlike.config import UserError
from titanlike.config.mlm import MaskedTokens
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.masked_tokens import MaskedSource, mask_token
from titanlike.data.batches.packed_dataset import PackedDataset, ShuffledMixture
from titanlike.data.tokens.arrays import InMemoryTokens
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE
from titanlike.losses.accuracy import LossAndAccuracy
from titanlike.models.common.layers import TiedLMHead
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.mlm import MlmRecipe
from titanlike.run.checks import check_recipe
from titanlike.run.masked_tokens import loss_and_accuracy

MASK = 257  # of the byte tokenizer: the first token that it does not have
SEPARATOR = BYTES.separator.token


def text(length: int = 40_000) -> InMemoryTokens:
    """Returns bytes with a separator after every 50 tokens on average, and without the loss of some."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, length).astype(np.uint32)
    tokens[draw.random(length) < 0.02] = SEPARATOR
    return InMemoryTokens(tokens)


def masked(seed: int = 0, probability: float = 0.15, *, separate: bool = False, seq_len: int = 64) -> MaskedSource:
    source = ShuffledMixture([PackedDataset(text(), seq_len)], seed=1, global_batch_size=8)
    return MaskedSource(source, BYTES, MASK, probability, seed=seed, separate=separate)


def test_of_the_predicted_tokens_80_percent_are_masked_and_10_percent_random() -> None:
    source = masked(probability=0.3)
    read = [source.read(step, range(8)) for step in range(1, 60)]
    original = np.concatenate([source.source.read(step, range(8)).tokens[:, :-1] for step in range(1, 60)])
    tokens = np.concatenate([batch.tokens[:, :-1] for batch in read])
    labels = np.concatenate([batch.labels for batch in read if batch.labels is not None])
    is_label = labels != IGNORE
    assert (labels[is_label] == original[is_label]).all() and (tokens[~is_label] == original[~is_label]).all()
    assert not is_label[original == SEPARATOR].any()
    share = is_label[original != SEPARATOR].mean()
    is_mask, is_kept = tokens[is_label] == MASK, tokens[is_label] == labels[is_label]
    assert share == pytest.approx(0.3, abs=0.01)
    assert is_mask.mean() == pytest.approx(0.8, abs=0.02) and is_kept.mean() == pytest.approx(0.1, abs=0.02)
    random = tokens[is_label & (tokens != MASK) & (tokens != labels)]
    assert np.unique(random).size > 200 and random.max() <= SEPARATOR and abs(random.mean() - 128) < 8
    # Neither neighbours nor sequences nor positions are correlated.
    for other in (np.roll(is_label, 1, 0), np.roll(is_label, 1, 1)):
        assert (is_label & other).mean() == pytest.approx(is_label.mean() ** 2, abs=0.01)
    assert is_label.mean(0).std() < 0.05 and is_label.mean(1).std() < 0.09


def test_masks_depend_on_the_seed_and_the_step_and_not_on_the_layout() -> None:
    whole = masked().read(3, range(8))
    assert whole.labels is not None
    for rows in (range(0, 2), range(5, 8)):
        part = masked().read(3, rows)
        assert (part.tokens == whole.tokens[rows]).all() and (part.labels == whole.labels[rows]).all()
    other = masked(seed=1).read(3, range(8))
    assert (other.labels != whole.labels).any() and (masked().read(4, range(8)).labels != whole.labels).any()
    # In another epoch, other tokens of the same sequence are predicted.
    source = masked(seq_len=10_000)
    several = source.read(1, range(8))
    assert several.labels is not None
    counts = {tuple(row) for row in (several.labels != IGNORE).tolist()}
    assert len(counts) == 8 and len({tuple(row) for row in source.source.read(1, range(8)).tokens.tolist()}) == 3


def test_batches_of_context_parallel_ranks_are_parts_of_the_same_masked_sequences() -> None:
    loader = partial(BatchLoader, global_batch_size=8, local_batch_size=8, seed=0, device=torch.device("cpu"))
    [whole] = loader(masked(), data_rank=0, num_data_ranks=1).microbatches(2)
    positions = torch.tensor([0, 1, 30, 31])
    [part] = loader(masked(), data_rank=0, num_data_ranks=1, position_ids=positions).microbatches(2)
    assert torch.equal(part.inputs["tokens"], whole.inputs["tokens"][:, positions])
    assert torch.equal(part.labels, whole.labels[:, positions])
    assert torch.equal(part.inputs["position_ids"][0], positions)


def test_documents_are_found_before_tokens_are_replaced_and_their_first_tokens_are_predicted_too() -> None:
    source = masked(separate=True, probability=0.5)
    [batch] = batches(source, local=8).microbatches(1)
    original = source.source.read(1, range(8)).tokens
    ends = (original[:, :-1] == SEPARATOR).cumsum(1)
    documents = batch.inputs["document_ids"].numpy()
    assert (documents[:, 1:] == ends[:, :-1]).all() and documents.max() > 0
    starts = batch.inputs["position_ids"].numpy()[:, 1:] == 0
    assert starts.any() and (batch.labels.numpy()[:, 1:][starts] != IGNORE).any()


def test_prompts_are_not_predicted() -> None:
    class WithPrompts(InMemoryTokens):
        def loss_mask(self, starts: Any, length: int) -> Any:
            return np.broadcast_to(np.arange(length) >= 20, (len(starts), length))

    source = ShuffledMixture([PackedDataset(WithPrompts(text().read(np.array([0]), 30_000)[0].astype(np.uint32)), 64)],
                             seed=1, global_batch_size=8)  # fmt: skip
    [batch] = batches(MaskedSource(source, BYTES, MASK, 0.9, seed=0, separate=False), local=8).microbatches(1)
    assert (batch.labels[:, :20] == IGNORE).all() and (batch.labels[:, 20:] != IGNORE).any()


def test_a_stream_is_masked_after_a_resume_as_before(tmp_path: Path) -> None:
    files = write(tmp_path / "data", [40, 30])

    def source() -> MaskedSource:
        return MaskedSource(open_stream([files]), BYTES, MASK, 0.3, seed=0, separate=False)

    whole = source()
    expected = [whole.read(step, range(8)) for step in (1, 2, 3)][-1]
    first = source()
    for step in (1, 2):
        first.read(step, range(8))
    again = source()
    again.load_position(first.position())
    found = again.read(3, range(8))
    assert (found.tokens == expected.tokens).all() and (found.labels == expected.labels).all()
    assert not hasattr(again, "num_distinct") and masked().num_distinct > 1
    assert "30% of the tokens masked" in again.describe(10)


def tokenizer(folder: Path, *special: str) -> Any:
    """Returns a tokenizer.json with words and special tokens."""
    model = tokenizers.models.WordLevel({"word": 0, "[UNK]": 1}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens([*special])
    made.save(str(folder / "tokenizer.json"))
    return build_tokenizer(Section(encoding=str(folder / "tokenizer.json")))


def test_the_mask_token_is_that_of_the_tokenizer_or_the_first_that_it_does_not_have(tmp_path: Path) -> None:
    bert = tokenizer(tmp_path, "[PAD]", "[CLS]", "[SEP]", "[MASK]", "<other>")
    assert bert.eos == bert.codec.special["[SEP]"]
    assert mask_token(bert, MaskedTokens(), 64) == bert.codec.special["[MASK]"]
    assert mask_token(bert, MaskedTokens(mask_token="<other>"), 64) == bert.codec.special["<other>"]
    assert mask_token(BYTES, MaskedTokens(), 320) == MASK
    with pytest.raises(UserError, match=r"'bytes' has no mask token, and model.vocab_size = 257"):
        mask_token(BYTES, MaskedTokens(), 257)
    with pytest.raises(UserError, match=r"mlm.mask_token = '<m>' is not a special token of .*; it has \[PAD\], "):
        mask_token(bert, MaskedTokens(mask_token="<m>"), 64)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("num_labels", [7, 0])
def test_loss_and_accuracy_of_the_tokens_with_a_label(chunk: int, num_labels: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    embedding = torch.nn.Embedding(11, 8)
    model.output = TiedLMHead(embedding, bias=True)
    torch.nn.init.normal_(model.output.bias)
    model.output.loss = LossAndAccuracy(chunk=chunk)
    x, labels = torch.randn(2, 10, 8), torch.full((2, 10), IGNORE)
    logits = x @ embedding.weight.t() + model.output.bias
    labels.view(-1)[:num_labels] = logits.argmax(-1).view(-1)[:num_labels]
    labels.view(-1)[: num_labels // 2] = 3
    with torch.no_grad(), loss_and_accuracy(model):
        loss, correct = model.output(x, labels).tolist()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    assert loss == pytest.approx(expected.item() if num_labels else 0.0, rel=1e-5)
    assert correct == int((logits.argmax(-1) == labels).sum())
    assert correct >= num_labels - num_labels // 2


recipe: Callable[..., Any] = partial(changed, MlmRecipe())


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (changed(PretrainRecipe(), model=BERT), "'bert' is an encoder, which predicts masked tokens; set program = 'mlm'"),
        (recipe(model=PretrainRecipe().model), "'llama' predicts the next token; use 'bert' or 'modernbert', or program = "),
        (recipe(sample=dict(tokens=9)), "sample.tokens = 9: an encoder does not generate text; set it to 0"),
        (recipe(model=dict(vocab_size=257)), "model.vocab_size = 257 leaves no row for a mask token, which tokenizer.encoding ="),
        (recipe(model=replace(MODERNBERT, sliding_window=7)), "model.sliding_window = 7 is odd"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_remedy(refused: PretrainRecipe, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_recipe(changed(refused, training=dict(seq_len=384, local_batch_size=1)), 1)
    assert message in str(error.value)
