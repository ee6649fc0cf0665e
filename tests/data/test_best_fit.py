"""Best-fit packing of documents: what is cut, labels, document ids, resuming, splits; the packing against a plain loop."""

import bisect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.preparing import BYTES
from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.data.batches.best_fit import BestFitDataset, pack
from titanlike.data.batches.sources import open_sources
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens import work_units
from titanlike.data.tokens.shards import Shards
from titanlike.data.tokens.tokenizer import Separator, build_tokenizer
from titanlike.tools.data.prepare import prepare

SEQ_LEN = 16
EOS = 256
LENGTHS = [3, 7, 15, 16, 17, 40, 1, 33, 5, 12, 9, 16, 2, 48]
TEXTS = [np.random.default_rng(length).integers(65, 91, length).astype(np.uint8).tobytes() for length in LENGTHS]


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        at = bisect.bisect_left(free, (lengths[item], 0))
        room, number = free.pop(at) if at < len(free) else (capacity, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(item)
        if room > lengths[item]:
            bisect.insort(free, (room - lengths[item], number))
    return bins


def test_packing_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(rng.integers(1, 60))
        lengths = rng.integers(1, capacity + 1, int(rng.integers(0, 150)))
        assert [group.tolist() for group in pack(lengths, capacity).split()] == best_fit(lengths.tolist(), capacity)


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(work_units, "MIN_SIZE", 150)  # several shards
    records = [{"text": text.decode(), "ask": "??"} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, fields in (("tokens", Fields()), ("prompts", Fields("text", "ask"))):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / name, BYTES, fields=fields, workers=0)
    return tmp_path / "tokens"


def dataset(path: Path, **options: Any) -> BestFitDataset:
    return BestFitDataset(Shards(str(path)), SEQ_LEN, Separator(EOS, True), **options)


def runs(row: np.ndarray) -> list[bytes]:
    """Returns the documents or pieces in a sequence of tokens, each with an EOS token as 0."""
    text = bytes(0 if token == EOS else token for token in row.tolist())
    return [part for part in text.replace(b"\0", b"\0|").split(b"|") if part.strip(b"\0")]


def test_documents_of_up_to_a_sequence_stay_whole(tokens: Path) -> None:
    assert len(Shards(str(tokens)).shards) > 2
    data = dataset(tokens)
    found = [each for row in data.read(np.arange(data.num_sequences)).tokens for each in runs(row)]
    expected = []
    for text in TEXTS:
        document = text + b"\0"
        while len(document) > SEQ_LEN + 1:
            expected.append(document[: SEQ_LEN + 1])
            document = document[SEQ_LEN:]
        expected.append(document)
    assert sorted(found) == sorted(part for part in expected if part.strip(b"\0"))
    assert data.num_cut == sum(len(text) > SEQ_LEN for text in TEXTS)
    filled = sum(map(len, expected))
    assert data.num_sequences == -(-filled // (SEQ_LEN + 1))  # as few as possible
    assert f"{100 * filled / (data.num_sequences * (SEQ_LEN + 1)):.1f}% full" in data.contents


@pytest.mark.parametrize("separate", [False, True])
def test_every_token_is_a_label_once(tokens: Path, separate: bool) -> None:
    data = dataset(tokens, separate=separate)
    every = data.read(np.arange(data.num_sequences))
    assert every.loss_mask is not None
    labels = every.tokens[:, 1:][every.loss_mask[:, 1:]]
    # All tokens but the first one of each sequence that begins with a document.
    total = sum(len(text) + 1 for text in TEXTS)
    begins = sum(bool(every.loss_mask[row, 0]) for row in range(data.num_sequences))
    assert len(labels) == total - begins
    assert (every.document_ids is not None) == separate
    if every.document_ids is not None:
        for row, ids in zip(every.tokens, every.document_ids, strict=True):
            parts = [row[ids == number] for number in range(ids.max() + 1)]
            assert [bytes(0 if t == EOS else t for t in part.tolist()) for part in parts][: len(runs(row))] == runs(row)
            assert (np.diff(ids) >= 0).all()


def test_prompts_are_no_labels(tokens: Path) -> None:
    data = dataset(tokens.with_name("prompts"))
    every = data.read(np.arange(data.num_sequences))
    assert every.loss_mask is not None
    assert not every.loss_mask[every.tokens == ord("?")].any()
    assert every.loss_mask[(every.tokens != ord("?")) & (every.tokens != EOS)].sum() >= sum(map(len, TEXTS)) - len(
        TEXTS
    )


def section(path: Path, **options: Any) -> Data:
    return Data(source="shards", path=str(path), packing="best_fit", holdout_every=3, **options)


def test_sources(tokens: Path) -> None:
    tokenizer = build_tokenizer(BYTES)
    concatenated = Data(source="shards", path=str(tokens), holdout_every=3)
    opened, other = (
        open_sources(each, tokenizer, seq_len=SEQ_LEN, global_batch_size=1, seed=3, validate=True)
        for each in (section(tokens), concatenated)
    )
    assert opened.training.fingerprint != other.training.fingerprint
    training, validation = opened.training.datasets[0], opened.validation.datasets[0]  # type: ignore[union-attr, attr-defined]
    rows = [
        {row.tobytes() for row in each.read(np.arange(each.num_sequences)).tokens} for each in (training, validation)
    ]
    assert not rows[0] & rows[1]
    assert training.num_sequences + validation.num_sequences == dataset(tokens).num_sequences


def test_too_few_sequences(tokens: Path) -> None:
    with pytest.raises(UserError, match="too few with one in 100 held out"):
        dataset(tokens, held_out=True, holdout_every=100)
