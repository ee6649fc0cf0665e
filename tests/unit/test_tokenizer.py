"""Tokenizers: bytes, tiktoken's files, Hugging Face's; what opens and closes a document; what tells one from another."""

import base64
import json
from pathlib import Path

import pytest
import tokenizers

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.text.tokenizer import Separator, Tokenizer, build_tokenizer

BYTES = build_tokenizer(Section(), 320)


def build(encoding: str, vocab_size: int | None = None, **keys: str) -> Tokenizer:
    return build_tokenizer(Section(encoding=encoding, **keys), vocab_size)  # type: ignore[arg-type]


def test_bytes_come_back_as_they_went_in() -> None:
    text = "def é(x):\n    return '🙂' * x\r\n\x00<|endoftext|>" * 50
    tokens = BYTES.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert BYTES.decode(tokens.tolist()) == text
    assert (BYTES.vocab_size, BYTES.separator) == (257, Separator(256, closes=True))


def test_a_rank_file_is_read(tmp_path: Path) -> None:
    words = [bytes([value]) for value in range(256)] + [b"ab", b"abc"]
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)))
    tokenizer = build(str(path), 320)
    assert tokenizer.encode("abc ab").tolist() == [257, ord(" "), 256]
    assert tokenizer.decode([257, 256]) == "abcab"
    assert (tokenizer.vocab_size, tokenizer.eos) == (260, 259)
    for text, message in (
        ("", "the byte 0 has no rank"),
        ("YQ== 0\n", "the byte 0 has no rank"),
        (path.read_text().replace(" 257\n", " 300\n"), "its ranks do not count from 0 without a gap"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"tokenizer.model: not a whole rank file: {message}"):
            build(str(path), 320)
    path.write_text("YQ== 0\nwrong\n")
    with pytest.raises(UserError, match=r"tokenizer\.model, line 2: not a rank file"):
        build(str(path), 320)


def test_a_tokenizer_that_does_not_fit_is_told() -> None:
    with pytest.raises(
        UserError, match=r"vocab_size = 200 is smaller than the 257 tokens .* set model.vocab_size = 320"
    ):
        build("bytes", 200)
    with pytest.raises(UserError, match=r"'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'\?"):
        build("gpt-2", 320)


def test_an_encoding_that_must_be_downloaded_and_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(
        UserError,
        match=r"could not .*fetch https://\S+/vocab.bpe elsewhere, put it into a folder as [0-9a-f]{40}, and set",
    ):
        build("gpt2", 50304)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A small byte-pair tokenizer.json of Hugging Face's."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|open|>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["the cat and the dog and the end of the day"] * 20, trainer)
    made.enable_truncation(4)  # as many published files have it
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_hugging_faces_file_is_read(trained: Path) -> None:
    tokenizer = build(str(trained), 320)
    text = "the dog </s> and é 🙂\n"
    tokens = tokenizer.encode(text)
    assert 4 < len(tokens) < len(text.encode())
    assert tokenizer.eos not in tokens  # spelt out, a special token is only text
    assert tokenizer.decode(tokens.tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.eos) == (276, 1)
    assert build(str(trained / "tokenizer.json"), 320).fingerprint == tokenizer.fingerprint


def test_the_ends_of_a_document_are_those_that_are_named(trained: Path) -> None:
    with pytest.raises(
        UserError, match=r"does not say which token opens a document; set tokenizer\.bos .*: <\|open\|>, </s>"
    ):
        build(str(trained), special="both")
    with pytest.raises(
        UserError, match=r"tokenizer\.bos = '<\|opem\|>' is no special token .*; did you mean '<\|open\|>'\?"
    ):
        build(str(trained), special="both", bos="<|opem|>")
    named = build(str(trained), special="both", bos="<|open|>")
    assert named.document("cat")[0].tolist() == [0, *named.encode("cat"), 1]
    assert named.document("cat", prompt="the ")[0].tolist() == [0, *named.encode("the "), *named.encode("cat"), 1]
    assert named.document("cat", prompt="the ")[1] == 1 + len(named.encode("the "))
    assert named.opening("cat") == [0, *named.encode("cat")]
    assert named.separator == Separator(1, closes=True)
    (trained / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|open|>"}, "eos_token": "</s>"})
    )
    assert build(str(trained), special="both").fingerprint == named.fingerprint
    opened = build(str(trained), special="bos")
    assert opened.document("cat")[0].tolist() == [0, *named.encode("cat")]
    assert opened.separator == Separator(0, closes=False)
    assert opened.opening("") == [0]


def test_tokenizers_that_differ_in_anything_have_other_fingerprints(trained: Path) -> None:
    prints = {
        BYTES.fingerprint,
        build(str(trained)).fingerprint,
        build(str(trained), special="both", bos="<|open|>").fingerprint,
        build(str(trained), eos="<|open|>").fingerprint,
    }
    file = trained / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["merges"] = values["model"]["merges"][:-1]
    file.write_text(json.dumps(values))
    assert len({*prints, build(str(trained)).fingerprint}) == 5


def test_a_file_that_is_no_tokenizer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json that the tokenizers library can read"):
        build(str(file))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"wants Hugging Face's tokenizers: pip install 'titanlike\[data\]'"):
        build(str(file))


def test_one_token_cannot_open_and_close() -> None:
    with pytest.raises(
        UserError, match=r"tokenizer\.special = 'both' wants two tokens, .* 'bytes' has one for both; use 'eos'"
    ):
        build("bytes", special="both", bos="<|endoftext|>")
