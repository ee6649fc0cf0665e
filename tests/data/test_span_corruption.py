"""Corrupted spans and pairs of texts: what inputs and targets contain, their lengths, and what is refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training import T5, changed
from titanlike.config import UserError
from titanlike.config.sections import Data, Tokenizer
from titanlike.config.seq2seq import Seq2Seq
from titanlike.data.batches import seq2seq, sources
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.batches.seq2seq import PackedTextPairs, pack_two
from titanlike.data.batches.span_corruption import random_segments, sentinels
from titanlike.data.tokens.chats import TokenizedChats, concatenate
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run.checks import check_recipe

BYTES = build_tokenizer(Tokenizer())
EOS, VOCAB, START = 256, 384, 0


def opened(source: str = "synthetic", seq_len: int = 64, seed: int = 0, **section: Any) -> Any:
    found = Seq2Seq(**section)
    target_len = found.spans(seq_len).target_len + 3
    return seq2seq.open_sources(
        Data(source=source), BYTES, seq2seq=found, vocab_size=VOCAB, start=START, target_len=target_len, seq_len=seq_len,
        global_batch_size=8, seed=seed, validate=False,
    ).training  # fmt: skip


@pytest.mark.parametrize(
    ("seq_len", "density", "mean", "raw_len", "target_len"),
    # The first row is that of T5's published pre-training.
    [(512, 0.15, 3.0, 568, 114), (128, 0.15, 3.0, 141, 29), (64, 0.3, 1.0, 63, 39)],
)
def test_lengths_fill_the_input(seq_len: int, density: float, mean: float, raw_len: int, target_len: int) -> None:
    section = Seq2Seq(noise_density=density, mean_noise_span_length=mean)
    spans = section.spans(seq_len)
    assert (spans.raw_len, spans.input_len, spans.target_len) == (raw_len, seq_len, target_len)
    assert section._spans_of(raw_len + 1).input_len > seq_len


@pytest.mark.parametrize("density", [0.999, 1 - 2**-53])
def test_lengths_of_a_density_near_one_are_found_at_once(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = iter(range(100)), Seq2Seq._spans_of
    monkeypatch.setattr(Seq2Seq, "_spans_of", lambda *arguments: (next(calls), original(*arguments))[1])
    spans = Seq2Seq(noise_density=density).spans(64)
    assert spans.input_len <= 64
    assert spans.raw_len == 2**40 - 1 or original(Seq2Seq(noise_density=density), spans.raw_len + 1).input_len > 64


def restored(tokens: list[int], labels: list[int], num_spans: int) -> list[int]:
    """Returns the text of an input and its target, by reading the sentinels in their order."""
    assert tokens[-1] == EOS and labels[-1] == EOS
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token >= VOCAB - num_spans:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    assert list(spans) == [VOCAB - 1 - number for number in range(num_spans)]
    assert [token for token in tokens if token >= VOCAB - num_spans] == list(spans) and all(spans.values())
    return [each for token in tokens[:-1] for each in spans.get(token, [token])]


def test_inputs_and_targets_restore_the_text() -> None:
    source = opened()
    spans = Seq2Seq().spans(64)
    text = sources.open_sources(
        Data(source="synthetic"), BYTES, seq_len=spans.raw_len - 1, global_batch_size=8, seed=0, validate=False
    ).training
    seen = set()
    for step in (1, 2):
        batch, plain = source.read(step, range(8)), text.read(step, range(8))
        assert batch.tokens.shape == (8, 65) and batch.labels.shape == (8, spans.target_len + 3)
        for row in range(8):
            labels = [token for token in batch.labels[row].tolist() if token != IGNORE]
            assert len(labels) == spans.target_len
            assert restored(batch.tokens[row, :-1].tolist(), labels, spans.num_spans) == plain.tokens[row].tolist()
            seen.add(tuple(np.flatnonzero(batch.tokens[row] >= VOCAB - spans.num_spans).tolist()))
        decoder = batch.others["decoder_tokens"]
        assert (decoder[:, 0] == START).all()
        assert (decoder[:, 1:] == np.where(batch.labels == IGNORE, START, batch.labels)[:, :-1]).all()
    assert len(seen) > 12  # other spans in each sequence


def test_spans_depend_on_the_seed_and_the_step_and_not_on_the_ranks() -> None:
    source = opened()
    whole = source.read(3, range(8))
    for rank in range(4):
        part = opened().read(3, range(2 * rank, 2 * rank + 2))
        assert (part.tokens == whole.tokens[2 * rank : 2 * rank + 2]).all()
        assert (part.labels == whole.labels[2 * rank : 2 * rank + 2]).all()
    ids = whole.sequence_ids
    assert (source.noise(ids) == source.noise(ids)).all() and (source.noise(ids) != source.noise(ids + 8)).any()
    assert (source.noise(ids) != opened(seed=1).noise(ids)).any()
    # The same text has other spans when it is read again.
    assert source.noise(ids).sum(1).tolist() == [source.spans.num_noise] * 8


def test_segments_are_uniform() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (30_000, 4))
    lengths = random_segments(bits, 3)
    assert (lengths.sum(1) == 5).all() and (lengths > 0).all()
    kinds, counts = np.unique(lengths, axis=0, return_counts=True)
    assert len(kinds) == 6 and counts.min() > 0.95 * counts.max()


def test_sentinels_are_those_of_the_tokenizer_or_the_last_rows(tmp_path: Path) -> None:
    assert sentinels(BYTES, 3, VOCAB).tolist() == [383, 382, 381]
    with pytest.raises(UserError, match=r"model.vocab_size = 258 has no row for each of 2; set model.vocab_size = 320"):
        sentinels(BYTES, 2, 258)
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Trained

    trained = Trained(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    trained.add_special_tokens([AddedToken("</s>"), *(AddedToken(f"<extra_id_{number}>") for number in (1, 0))])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(Tokenizer(encoding=str(tmp_path / "tokenizer.json")))
    assert sentinels(tokenizer, 2, 64).tolist() == [5, 4]
    with pytest.raises(UserError, match="has no <extra_id_2>, but sequences have 3 spans"):
        sentinels(tokenizer, 3, 64)


def test_text_with_prompts_is_refused() -> None:
    source = opened()
    batch = source.source.read(1, range(2))
    source.source.read = lambda *_: SequenceBatch(batch.sequence_ids, batch.tokens, batch.tokens > 0)
    with pytest.raises(UserError, match="the data has prompts, which are excluded from the loss, but span corruption"):
        source.read(1, range(2))


def pairs_of(*lengths: tuple[int, int]) -> TokenizedChats:
    """Returns pairs of these lengths, whose tokens count from 1 and end with EOS."""
    encoded = []
    for source, target in lengths:
        tokens = np.array([*range(1, source), EOS, *range(101, 100 + target), EOS], np.uint32)
        encoded.append([(tokens, np.arange(source + target) >= source)])
    return concatenate(encoded)


def test_pairs_share_sequences() -> None:
    pairs = PackedTextPairs(pairs_of((5, 3), (4, 5), (9, 2), (20, 9)), seq_len=12, target_len=8, eos=EOS, start=START)
    assert [group.tolist() for group in pairs.bins] == [[3], [2], [0, 1]] and pairs.num_truncated == 1
    found = pairs.read(np.array([2, 0]))
    others = found.others
    assert found.tokens[0].tolist() == [1, 2, 3, 4, EOS, 1, 2, 3, EOS, 0, 0, 0, 0]
    assert others["document_ids"][0].tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert others["labels"][0].tolist() == [101, 102, EOS, 101, 102, 103, 104, EOS]
    # Each target starts with the start token.
    assert others["decoder_tokens"][0].tolist() == [0, 101, 102, 0, 101, 102, 103, 104]
    assert others["decoder_document_ids"][0].tolist() == [0] * 3 + [1] * 5
    assert found.tokens[1].tolist() == [*range(1, 12), EOS, 0]
    assert others["labels"][1].tolist() == [*range(101, 108), EOS]
    short = pairs.read(np.array([1]))
    assert short.others["labels"][0].tolist() == [101, EOS] + [IGNORE] * 6
    assert short.others["decoder_document_ids"][0].tolist() == [0] * 8
    assert "4 pairs of 30 and 18 tokens in 3 sequences, inputs 83% and targets 75% full, 1 truncated," in pairs.contents


def test_every_pair_is_in_one_sequence_and_none_in_both_splits() -> None:
    lengths = np.random.default_rng(0).integers(2, 30, (500, 2))
    pairs = pairs_of(*map(tuple, lengths.tolist()))
    build = {"seq_len": 40, "target_len": 40, "eos": EOS, "start": START, "holdout_every": 10}
    splits = [PackedTextPairs(pairs, held_out=held_out, **build) for held_out in (False, True)]  # type: ignore[arg-type]
    numbers = [sorted(int(number) for group in split.bins for number in group) for split in splits]
    assert sorted(numbers[0] + numbers[1]) == list(range(500)) and numbers[1] == list(range(9, 500, 10))
    for split in splits:
        assert all((split.lengths[group].sum(0) <= 40).all() for group in split.bins)
    assert splits[0].num_tokens.max() / (40 * splits[0].num_sequences) > 0.8
    with pytest.raises(UserError, match="has no pair for validation: 5 in all, one in 10 held out"):
        PackedTextPairs(pairs_of(*[(3, 3)] * 5), held_out=True, **build)  # type: ignore[arg-type]


def test_items_join_the_first_bin_that_has_room_for_both() -> None:
    assert pack_two(np.array([[5, 1], [5, 1], [1, 9], [1, 1]]), (10, 10)) == [[0, 2], [1, 3]]


def test_pairs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"en": f"text {n}", "de": f"Text {n}"}) + "\n" for n in range(20)))
    section = Data(
        source="text", path=str(file), prompt_field="en", text_field="de", holdout_every=5, cache=str(tmp_path)
    )
    shape: dict[str, Any] = dict(vocab_size=VOCAB, start=START, target_len=16)
    opening = partial(seq2seq.open_sources, seq2seq=Seq2Seq(source_prefix="translate: "), **shape)
    options: dict[str, Any] = dict(seq_len=40, global_batch_size=2, seed=0, validate=True)
    found = opening(section, BYTES, **options)
    held_out = found.validation.read(1, range(2))
    texts = {
        bytes(row[row < 256].tolist()).decode().rstrip("\0")
        for tokens, documents in zip(held_out.tokens[:, :-1], held_out.others["document_ids"], strict=True)
        for row in (tokens[documents == number] for number in range(2))
    }
    assert texts == {f"translate: text {n}" for n in (4, 9, 14, 19)}
    # A changed prefix is other data.
    other = seq2seq.open_sources(section, BYTES, seq2seq=Seq2Seq(), **shape, **options)
    assert other.training.fingerprint != found.training.fingerprint
    file.write_text(json.dumps({"en": "text", "de": ""}) + "\n")
    with pytest.raises(UserError, match="no text in the field 'de'; its fields are en, de"):
        opening(section, BYTES, **options)


def recipe(**sections: Any) -> Any:
    return changed(Seq2SeqRecipe(), **{"model": replace(T5, max_seq_len=2048)} | sections)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (changed(PretrainRecipe(), model=T5), "'t5' has an encoder and a decoder; set program = 'seq2seq'"),
        (recipe(parallelism=dict(pipeline=2)), "parallelism.pipeline = 2: a pipeline stage passes on one tensor, but each"),
        (recipe(parallelism=dict(context=2)), "parallelism.context = 2: context parallelism does not add the biases"),
        (recipe(parallelism=dict(tensor=16)), "parallelism.tensor = 16 does not divide the 456 tokens of a target; use 4, 6"),
        (recipe(data=dict(prompt_field="en")), "pairs of texts are read from data.source = 'text', not 'python_stdlib'"),
        (recipe(), "model.vocab_size = 320 has no row for each of the sentinels of 114 spans, .* set it to 384"),
        (recipe(model=replace(T5, decoder_start_token=320)), "model.decoder_start_token = 320 is not in the vocabulary"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(wrong: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        layout = wrong.parallelism
        check_recipe(wrong, layout.pipeline * layout.tensor * layout.context)


def test_the_length_of_targets_is_a_multiple_of_eight() -> None:
    small = dict(seq_len=512)
    assert recipe(training=small).target_len == 120
    assert recipe(training=small, data=dict(prompt_field="en"), seq2seq=dict(target_len=30)).target_len == 32
    assert recipe(training=small, data=dict(prompt_field="en")).target_len == 512
