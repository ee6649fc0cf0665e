"""Tokens, sources and batches: each token once an epoch, the same order on every layout."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.data.loader import Batches, Windows, shuffled
from titanlike.data.sources import fingerprint, load_tokens
from titanlike.data.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes", 320)


def batches(windows: Windows, *, ranks: int = 1, rank: int = 0, local: int = 2, seed: int = 0) -> Batches:
    return Batches(
        windows, global_batch_size=8, local_batch_size=local, data_rank=rank, data_ranks=ranks, seed=seed,
        device=torch.device("cpu"),
    )  # fmt: skip


def counting(count: int, *, held_out: bool = False, every: int = 0, seq_len: int = 4) -> Windows:
    """Windows of 0 1 2 3 | 4 5 6 7 | ...: a window is known by its first token."""
    return Windows(np.arange(count * seq_len + 1, dtype=np.uint32), seq_len, held_out=held_out, validation_every=every)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_a_shuffle_is_a_permutation(size: int) -> None:
    order = [shuffled(index, size, seed=3) for index in range(size)]
    assert sorted(order) == list(range(size))
    if size == 1000:
        assert order != [shuffled(index, size, seed=4) for index in range(size)]
        # no trace of the old order: neighbours end far apart, about a third of the size as chance has it
        apart = np.abs(np.diff(order)).mean()
        assert 280 < apart < 390


def test_labels_are_the_next_tokens() -> None:
    batch = batches(counting(8)).microbatches(1)[0]
    assert torch.equal(batch.labels, batch.inputs["tokens"] + 1)
    assert batch.inputs["tokens"].shape == (2, 4)


@pytest.mark.parametrize("every", [0, 2, 3, 10, 50])
def test_training_and_validation_share_no_window_and_miss_none(every: int) -> None:
    train = counting(101, every=every)
    found = set(train.read(np.arange(train.count))[:, 0] // 4)
    assert len(found) == train.count
    if every:
        assert train.count == 101 - 101 // every
        held_out = counting(101, every=every, held_out=True)
        apart = set(held_out.read(np.arange(held_out.count))[:, 0] // 4)
        assert not found & apart
        found |= apart
    assert found == set(range(101))


def test_an_epoch_has_every_window_once_and_the_next_has_another_order() -> None:
    source = batches(counting(24))
    firsts = [
        int(row[0]) // 4
        for step in range(1, 7)
        for batch in source.microbatches(step)
        for row in batch.inputs["tokens"]
    ]
    assert sorted(firsts[:24]) == sorted(firsts[24:]) == list(range(24))
    assert firsts[:24] != firsts[24:]


def test_an_epoch_may_end_within_a_batch() -> None:
    source = batches(counting(5))
    firsts = [
        int(row[0]) // 4
        for step in (1, 2, 3, 4, 5)
        for part in source.microbatches(step)
        for row in part.inputs["tokens"]
    ]
    for epoch in range(8):
        assert sorted(firsts[5 * epoch : 5 * epoch + 5]) == list(range(5))


@pytest.mark.parametrize(("ranks", "local"), [(1, 8), (1, 1), (2, 2), (4, 8), (8, 1)])
def test_the_global_order_does_not_depend_on_the_layout(ranks: int, local: int) -> None:
    windows = counting(50)
    for step in (1, 7):
        whole = torch.cat([part.inputs["tokens"] for part in batches(windows).microbatches(step)])
        parts = [batches(windows, ranks=ranks, rank=rank, local=local).microbatches(step) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.inputs["tokens"] for rank in parts for part in rank]), whole)


def test_validation_reads_no_window_twice() -> None:
    assert batches(counting(33)).num_distinct(10) == 4  # batches of 8
    assert batches(counting(33)).num_distinct(2) == 2
    assert batches(counting(5)).num_distinct(2) == 1


def test_another_seed_is_another_order() -> None:
    one, other = (batches(counting(50), seed=seed).microbatches(1)[0].inputs["tokens"] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_too_little_data_is_told() -> None:
    with pytest.raises(UserError, match=r"the data has 9 tokens, too few for training sequences .* = 16"):
        Windows(np.arange(9, dtype=np.uint16), 16, held_out=False, validation_every=0)
    with pytest.raises(UserError, match=r"too few for validation sequences .* one in 50 held out"):
        counting(10, held_out=True, every=50)


def test_bytes_come_back_as_they_went_in() -> None:
    text = "def é(x):\n    return '🙂' * x\r\n\x00<|endoftext|>" * 50
    tokens = BYTES.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert BYTES.decode(tokens.tolist()) == text
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)


def test_a_rank_file_is_read(tmp_path: Path) -> None:
    words = [bytes([value]) for value in range(256)] + [b"ab", b"abc"]
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)))
    tokenizer = build_tokenizer(str(path), 320)
    assert tokenizer.encode("abc ab").tolist() == [257, ord(" "), 256]
    assert tokenizer.decode([257, 256]) == "abcab"
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (260, 259)
    for text, message in (
        ("", "the byte 0 has no rank"),
        ("YQ== 0\n", "the byte 0 has no rank"),
        (path.read_text().replace(" 257\n", " 300\n"), "its ranks do not count from 0 without a gap"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"tokenizer.model: not a whole rank file: {message}"):
            build_tokenizer(str(path), 320)
    path.write_text("YQ== 0\nwrong\n")
    with pytest.raises(UserError, match=r"tokenizer\.model, line 2: not a rank file"):
        build_tokenizer(str(path), 320)


def test_a_tokenizer_that_does_not_fit_is_told() -> None:
    with pytest.raises(
        UserError, match=r"vocab_size = 200 is smaller than the 257 tokens .* set model.vocab_size = 320"
    ):
        build_tokenizer("bytes", 200)
    with pytest.raises(UserError, match=r"'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'\?"):
        build_tokenizer("gpt-2", 320)


def test_an_encoding_that_must_be_downloaded_and_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(UserError, match="tiktoken has to download it once and could not"):
        build_tokenizer("gpt2", 50304)


def test_text_files_are_documents_each_closed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "sub" / "a.txt").write_text("aa")
    (tmp_path / "empty.txt").write_text("")
    tokens = load_tokens(Data(source="text", path=str(tmp_path)), BYTES)
    assert tokens.tolist() == [ord("B"), 256, ord("a"), ord("a"), 256]
    assert tokens.dtype == np.uint16
    assert load_tokens(Data(source="text", path=str(tmp_path / "*.txt")), BYTES).tolist() == [ord("B"), 256]


def test_bad_text_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"bad\.txt: byte 3 is not UTF-8"):
        load_tokens(Data(source="text", path=str(tmp_path)), BYTES)
    (tmp_path / "bad.txt").write_bytes(b"")
    with pytest.raises(UserError, match="every file that it names is empty"):
        load_tokens(Data(source="text", path=str(tmp_path)), BYTES)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "d [v1]").mkdir()
    (tmp_path / "d [v1]" / "a.txt").write_text("a")
    assert load_tokens(Data(source="text", path=str(tmp_path / "d [v1]")), BYTES).tolist() == [ord("a"), 256]
    (tmp_path / "d [v1]" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file"):
        load_tokens(Data(source="text", path=str(tmp_path / "d [v1]")), BYTES)


def test_the_standard_library_is_there_and_synthetic_tokens_repeat() -> None:
    tokens = load_tokens(Data(), BYTES)
    assert len(tokens) > 3_000_000
    assert b"class JSONEncoder" in bytes(tokens[tokens < 256].astype(np.uint8))
    one, other = (load_tokens(Data(source="synthetic"), BYTES) for _ in range(2))
    assert fingerprint(one) == fingerprint(other) != fingerprint(tokens)
    assert one.max() == 256
