"""Tokenizers: bytes, rank files, tokenizer.json, special tokens, fingerprints; and their training, whose formats encode alike."""

import base64
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.launching import Cli
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.tokenizer import Separator, Tokenizer, build_tokenizer
from titanlike.interop.tokenizer_files import tokenizer_files
from titanlike.tools.data.train_tokenizer import BOS, EOS, _TextSampler, train

BYTES = build_tokenizer(Section(), 320)


def build(encoding: str, vocab_size: int | None = None, **keys: str) -> Tokenizer:
    return build_tokenizer(Section(encoding=encoding, **keys), vocab_size)  # type: ignore[arg-type]


def test_bytes_round_trip() -> None:
    text = "def é(x):\n    return '🙂' * x\r\n\x00<|endoftext|>" * 50
    tokens = BYTES.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert BYTES.decode(tokens.tolist()) == text
    assert (BYTES.vocab_size, BYTES.separator) == (257, Separator(256, closes=True))


def test_rank_file(tmp_path: Path) -> None:
    tokens = [bytes([value]) for value in range(256)] + [b"ab", b"abc"]
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    tokenizer = build(str(path), 320)
    assert tokenizer.encode("abc ab").tolist() == [257, ord(" "), 256]
    assert tokenizer.decode([257, 256]) == "abcab"
    assert (tokenizer.vocab_size, tokenizer.eos) == (260, 259)
    for text, message in (
        ("YQ== 0\n", ": not a complete rank file: byte 0 has no rank"),
        (
            path.read_text().replace(" 257\n", " 300\n"),
            ": not a complete rank file: its ranks are not consecutive from 0",
        ),
        ("YQ== 0\nwrong\n", ", line 2: not a rank file"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"tokenizer.model{message}"):
            build(str(path), 320)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Trains a small byte-pair tokenizer.json."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|open|>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["the cat and the dog and the end of the day"] * 20, trainer)
    made.enable_truncation(4)  # as in many published files
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_json(trained: Path) -> None:
    tokenizer = build(str(trained), 320)
    text = "the dog </s> and é 🙂\n"
    tokens = tokenizer.encode(text)
    assert 4 < len(tokens) < len(text.encode())
    assert tokenizer.eos not in tokens  # the name of a special token is encoded as plain text
    assert tokenizer.decode(tokens.tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.eos) == (276, 1)
    assert build(str(trained / "tokenizer.json"), 320).fingerprint == tokenizer.fingerprint


def test_special_tokens_of_documents(trained: Path) -> None:
    with pytest.raises(UserError, match=r"does not name its BOS token; set tokenizer\.bos .*: <\|open\|>, </s>"):
        build(str(trained), special="both")
    with pytest.raises(UserError, match=r"tokenizer\.bos = '<\|opem\|>' is not a special token .*; did you mean"):
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


def test_fingerprints_differ_between_tokenizers(trained: Path) -> None:
    fingerprints = {
        BYTES.fingerprint,
        build(str(trained)).fingerprint,
        build(str(trained), special="both", bos="<|open|>").fingerprint,
        build(str(trained), eos="<|open|>").fingerprint,
    }
    file = trained / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["merges"] = values["model"]["merges"][:-1]
    file.write_text(json.dumps(values))
    assert len({*fingerprints, build(str(trained)).fingerprint}) == 5


def test_a_difference_between_tokenizers_is_found(trained: Path) -> None:
    """Also one that no common text shows."""
    original, content = build(str(trained)), json.loads((trained / "tokenizer.json").read_text())
    other = trained / "other.json"

    def difference(**changes: Any) -> str:
        other.write_text(json.dumps(content | changes))
        return original.difference(build(str(other)))

    model, added = content["model"], content["added_tokens"]
    assert difference() == ""
    swapped = model["vocab"] | {"Ã": model["vocab"]["Å"], "Å": model["vocab"]["Ã"]}
    assert difference(model=model | {"vocab": swapped}) == f"'Ã' has the id {swapped['Å']}, and {swapped['Ã']} there"
    reordered = [*model["merges"][1::-1], *model["merges"][2:]]
    assert difference(model=model | {"merges": reordered}) == "the merges differ"
    assert difference(pre_tokenizer=content["pre_tokenizer"] | {"add_prefix_space": True}) == "text is split otherwise"
    renamed = [added[0] | {"content": "<|other|>"}, *added[1:]]
    vocab = {{"<|open|>": "<|other|>"}.get(token, token): number for token, number in model["vocab"].items()}
    assert difference(added_tokens=renamed, model=model | {"vocab": vocab}) == "'<|open|>' has the id 0, and none there"
    # A teacher may have further tokens.
    further = added[0] | {"content": "<|further|>", "id": original.vocab_size}
    assert difference(added_tokens=[*added, further]) == ""
    assert build(str(other)).difference(original).startswith("'<|further|>' has the id")


def test_an_exported_byte_pair_encoding_has_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_files(BYTES, 64)["tokenizer.json"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert BYTES.difference(build(str(tmp_path))) == build(str(tmp_path)).difference(BYTES) == ""


def test_invalid_file_and_missing_library_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json that the tokenizers library can read"):
        build(str(file))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"requires the package tokenizers; run: pip install \"titanlike\[data\]\""):
        build(str(file))


def test_same_token_for_bos_and_eos_is_refused() -> None:
    with pytest.raises(UserError, match=r"tokenizer\.special = 'both' requires two tokens, .* 'bytes' has the same"):
        build("bytes", special="both", bos="<|endoftext|>")


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token": 3}', "\xff"])
def test_a_broken_tokenizer_config_is_refused(trained: Path, text: str) -> None:
    (trained / "tokenizer_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"tokenizer_config.json: not a tokenizer_config.json \(.*\); repair or delete"):
        build(str(trained))


def test_a_pattern_that_backtracks_without_an_end_is_refused(trained: Path) -> None:
    values = json.loads((trained / "tokenizer.json").read_text())
    values["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (trained / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = build(str(trained / "tokenizer.json"))
    assert len(tokenizer.encode("aa!"))
    for encode in (tokenizer.encode, tokenizer.encode_with_special):
        with pytest.raises(UserError, match=r"the tokenizers library fails on a text: .*retry-limit.*; repair"):
            encode("a" * 100 + "!")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for module in (json, re, random):
        path = Path(module.__file__)
        (folder / f"{module.__name__}.txt").write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def both(corpus: Path) -> list[Tokenizer]:
    """Trains a tokenizer.json and a rank file."""
    found = []
    for name in ("tokenizer.json", "tokenizer.model"):
        trained = train([str(corpus / "*.txt")], corpus / "made" / name, 700)
        assert trained.vocab_size == 700
        found.append(build_tokenizer(Section(encoding=str(corpus / "made" / name), special="both")))
    return found


def test_both_formats_encode_alike(both: list[Tokenizer]) -> None:
    rng, (one, other) = random.Random(0), both
    parts = [
        "def ", "self", "\n", "    ", " ", "é", "字", "🙂", "\r\n", "0123456789", "it's", "...", "<|end_of_text|>", "\x00",
        "ab" * 40,
    ]  # fmt: skip
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 60))) for _ in range(500)] + [
        Path(random.__file__).read_text()
    ]
    for text in texts:
        tokens = one.encode(text).tolist()
        assert tokens == other.encode(text).tolist()
        assert one.decode(tokens) == other.decode(tokens) == text
        assert max(tokens, default=0) < 698  # names of special tokens are encoded as plain text
    assert (one.bos, one.eos) == (other.bos, other.eos) == (698, 699)
    assert one.vocab_size == other.vocab_size == 700


def test_file_contents(corpus: Path, both: list[Tokenizer]) -> None:
    about = json.loads((corpus / "made/tokenizer_config.json").read_text())
    assert (about["bos_token"], about["eos_token"]) == (BOS, EOS)
    lines = [line.split() for line in (corpus / "made/tokenizer.model").read_text().splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(698))
    assert {base64.b64decode(token) for token, _ in lines[:256]} == {bytes([value]) for value in range(256)}


def test_training_is_deterministic(corpus: Path, both: list[Tokenizer], tmp_path: Path) -> None:
    train([str(corpus / "*.txt")], tmp_path / "again.model", 700)
    assert (tmp_path / "again.model").read_bytes() == (corpus / "made/tokenizer.model").read_bytes()


def test_limit_counts_the_text_of_compressed_files(tmp_path: Path) -> None:
    for name in "abc":
        lines = (json.dumps({"text": f"{name * 4} {number}"}) + "\n" for number in range(2000))
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    for limit in (900, 9000):
        sampler = _TextSampler(list_files(str(tmp_path)), Fields(), limit, skip=False)
        text = "".join(sampler)
        assert sampler.size == len(text) == limit
        counts = [text.count(name) for name in "abc"]
        assert min(counts) > 0.9 * max(counts)


def test_training_errors(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("mine")
    with pytest.raises(UserError, match=r"t\.json exists; remove it, or give another --out"):
        train([str(corpus)], tmp_path / "t.json", 300)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"hf/tokenizer_config\.json exists, with the settings of another tokenizer"):
        train([str(corpus)], tmp_path / "hf/mine.json", 300)
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n{\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: not JSON"):
        train([str(tmp_path / "bad.jsonl")], tmp_path / "u.json", 300)
    assert not (tmp_path / "u.json").exists()
    assert train([str(tmp_path / "bad.jsonl")], tmp_path / "u.json", 300, skip=True).skipped == 1


def test_command_prints_the_next_command(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "short.txt").write_text((corpus / "json.txt").read_text()[:2000])
    monkeypatch.chdir(tmp_path)
    fields = "--text-field content --bad-records skip"
    printed = cli("data", "train-tokenizer", *f"short.txt --out my.model --vocab-size 5000 {fields}".split()).out
    assert re.match(
        r"my\.model: \d{3} tokens, trained on \d\.\d KB of text in \d+\.\d s; \d\.\d\d bytes of text per token\n"
        r"  fewer than 5,000: no other pair occurs twice; more text yields more tokens\n",
        printed,
    )
    assert f"titanlike data prepare short.txt --out tokens --tokenizer my.model {fields}\n" in printed
