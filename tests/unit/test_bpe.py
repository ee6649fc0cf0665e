"""Training tokenizers: both file formats encode alike, and decode to the original text."""

import base64
import gzip
import json
import random
import re
from pathlib import Path

import pytest

from tests.launching import python
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.files import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.tools.data.train_tokenizer import BOS, EOS, _TextSampler, train


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


def test_trained_tokenizer_compresses(both: list[Tokenizer]) -> None:
    text = Path(random.__file__).read_text()
    assert len(text.encode()) / len(both[1].encode(text)) > 2.2


def test_file_contents(corpus: Path, both: list[Tokenizer]) -> None:
    about = json.loads((corpus / "made/tokenizer_config.json").read_text())
    assert (about["bos_token"], about["eos_token"]) == (BOS, EOS)
    lines = [line.split() for line in (corpus / "made/tokenizer.model").read_text().splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(698))
    assert {base64.b64decode(token) for token, _ in lines[:256]} == {bytes([value]) for value in range(256)}


def test_training_is_deterministic(corpus: Path, both: list[Tokenizer], tmp_path: Path) -> None:
    train([str(corpus / "*.txt")], tmp_path / "again.model", 700)
    assert (tmp_path / "again.model").read_bytes() == (corpus / "made/tokenizer.model").read_bytes()


def test_small_text_yields_fewer_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab abab")
    assert train([str(tmp_path / "a.txt")], tmp_path / "t.json", 1000).vocab_size == 258 + 2  # ab, abab
    assert train([str(tmp_path / "a.txt")], tmp_path / "u.json", 258).vocab_size == 258


def test_limit_reads_a_fraction_of_each_file(tmp_path: Path) -> None:
    for name in "ab":
        lines = (json.dumps({"t": f"{name * 4} {number}"}) + "\n" for number in range(2000))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    trained = train([str(tmp_path)], tmp_path / "t.model", 300, fields=Fields("t"), limit_bytes=8000)
    assert 3000 < trained.text_bytes <= 8100
    tokens = {base64.b64decode(line.split()[0]) for line in (tmp_path / "t.model").read_text().splitlines()}
    assert {b"aaaa", b"bbbb"} <= tokens


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
    with pytest.raises(UserError, match="--vocab-size = 257: give at least 258, for 256 bytes and 2 special tokens"):
        train([str(corpus)], tmp_path / "t.json", 257)
    (tmp_path / "t.json").write_text("mine")
    with pytest.raises(UserError, match=r"t\.json exists; remove it, or give another --out"):
        train([str(corpus)], tmp_path / "t.json", 300)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"hf/tokenizer_config\.json exists, with the settings of another tokenizer; give"
    ):
        train([str(corpus)], tmp_path / "hf/mine.json", 300)
    (tmp_path / "e.txt").write_text("")
    with pytest.raises(UserError, match=r"e\.txt: no text to train on"):
        train([str(tmp_path / "e.txt")], tmp_path / "u.json", 300)
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n{\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: not JSON"):
        train([str(tmp_path / "bad.jsonl")], tmp_path / "u.json", 300)
    assert not (tmp_path / "u.json").exists()
    assert train([str(tmp_path / "bad.jsonl")], tmp_path / "u.json", 300, skip=True).skipped == 1


def test_command_prints_the_next_command(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text((corpus / "json.txt").read_text()[:2000])
    arguments = [
        "short.txt",
        "--out",
        "my.model",
        "--vocab-size",
        "5000",
        "--text-field",
        "content",
        "--bad-records",
        "skip",
    ]
    done = python(tmp_path, "-m", "titanlike.tools.cli.main", "data", "train-tokenizer", *arguments)
    assert re.match(
        r"my\.model: \d{3} tokens, trained on \d\.\d KB of text in \d+\.\d s; \d\.\d\d bytes of text per token\n"
        r"  fewer than 5,000: no other pair occurs twice; more text yields more tokens\n",
        done.stdout,
    )
    following = f"titanlike data prepare {arguments[0]} --out tokens --tokenizer my.model"
    assert f"{following} --text-field content --bad-records skip\n" in done.stdout
