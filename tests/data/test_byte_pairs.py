"""A tokenizer.json that tiktoken encodes: the same tokens and offsets as the library's, and what is left to the library."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.data.preparing import read_split
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.tokens.byte_pairs import byte_letters, read_byte_pairs
from titanlike.data.tokens.shards import TRAIN
from titanlike.data.tokens.tokenizer import NUM_COMPARED, Tokenizer, build_tokenizer
from titanlike.tools.data.prepare import prepare
from titanlike.tools.data.train_tokenizer import EOS, train

SPLIT = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}+|\s+|."}, "behavior": "Isolated", "invert": False}
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PARTS = [
    "def ", "self", "\n", "    ", " ", "é", "e\u0301", "\u0301", "字", "🙂", "\r\n", "0123456789", "it's", EOS, "\x00", "\x85",
    "ab" * 40, "<tool>", "<tool", "\u212b", "\u1100\u1161", "\ue000", "\u00a0", "\u2003", "\u017f", "\U0001fae9", "\u0338",
]  # fmt: skip


def file_of(merges: list[tuple[str, str]], ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the content of a tokenizer.json with the bytes and these merges, whose tokens have these ids."""
    tokens = [*byte_letters(), *("".join(pair) for pair in merges)]
    numbers = [*range(256), *(ids or range(256, len(tokens)))]
    added = {"id": 1000, "content": EOS, "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model: dict[str, Any] = {"type": "BPE", "ignore_merges": False, "merges": [list(pair) for pair in merges]}
    content = {
        "version": "1.0", "added_tokens": [added], "normalizer": None, "decoder": LETTERS, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, LETTERS]},
        "model": model | {"vocab": dict(zip(tokens, numbers, strict=True))},
    }  # fmt: skip
    content["model"] |= changes.pop("model", {})
    return content | changes


def build(folder: Path, content: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return build_tokenizer(Section(encoding=str(folder), eos=EOS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a tokenizer.json that normalizes, with an added token that is not special."""
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    train([json.__file__, random.__file__], path, 700)
    made = tokenizers.Tokenizer.from_file(str(path))
    made.normalizer = tokenizers.normalizers.NFC()  # type: ignore[assignment]
    made.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    made.save(str(path))
    return path


def test_tokens_and_offsets_are_those_of_the_library(trained: Path) -> None:
    tokenizer, library = build_tokenizer(Section(encoding=str(trained))), tokenizers.Tokenizer.from_file(str(trained))
    codec: Any = tokenizer.codec
    tokenizer.encode("def " * 100)
    assert "_tiktoken" not in vars(codec)  # few texts are not worth reading the merges
    codec.encode_batch(["x" * NUM_COMPARED])
    assert codec._fast is not None
    rng = random.Random(0)
    for text in ("".join(rng.choices(PARTS, k=rng.randint(0, 40))) for _ in range(1000)):
        library.encode_special_tokens = True
        expected = library.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text).tolist() == expected.ids, text
        library.encode_special_tokens = False
        expected = library.encode(text, add_special_tokens=False)
        tokens, ends = tokenizer.encode_with_special(text)
        assert tokens.tolist() == expected.ids, text
        assert ends.tolist() == [end for _, end in expected.offsets], text


def test_what_has_another_form_is_left_to_the_library(tmp_path: Path) -> None:
    chain = [("a", "b"), ("b", "c"), ("ab", "c")]

    def is_read(content: dict[str, Any]) -> bool:
        codec: Any = build(tmp_path, content).codec
        return read_byte_pairs(codec.tokenizer, json.loads(codec.identity)) is not None

    good = file_of(chain)
    [eos] = good["added_tokens"]
    assert is_read(good)
    assert is_read(good | {"normalizer": {"type": "NFC"}})
    for content in (
        file_of(chain, [256, 258, 257]),
        # "ab" is merged before "bc", so that the library never makes the last token, as tiktoken would.
        file_of([*chain[:2], ("a", "bc")]),
        file_of(chain, model={"merges": [["a", "b"], ["b", "c"]], "ignore_merges": True}),
        file_of(chain, model={"dropout": 0.1}),
        file_of(
            chain, model={"vocab": {token: rank for token, rank in good["model"]["vocab"].items() if token != "x"}}
        ),
        file_of(chain, normalizer={"type": "NFKC"}),
        file_of(chain, pre_tokenizer=None),
        file_of(chain, pre_tokenizer=LETTERS | {"use_regex": True}),
        file_of(chain, pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, SPLIT, LETTERS]}),
        file_of(
            chain, pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT | {"pattern": {"String": " "}}, LETTERS]}
        ),
        file_of(chain, added_tokens=[eos | {"lstrip": True}]),
        file_of(chain, added_tokens=[eos, eos | {"id": 1001, "content": f"{EOS}>"}]),
        file_of(chain, added_tokens=[eos, eos | {"id": 1001, "content": "|>x"}]),
    ):
        assert not is_read(content), content


def test_a_pattern_that_is_read_otherwise_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # To the library, the last "+" repeats the count; to tiktoken, it means that the count does not backtrack.
    pattern = {"pattern": {"Regex": r"\p{L}+|\p{N}{1,2}+|\s+|."}}
    steps = {"type": "Sequence", "pretokenizers": [SPLIT | pattern, LETTERS]}
    tokenizer = build(tmp_path, file_of([("7", "1"), ("71", "7")], pre_tokenizer=steps))
    tokenizer.encode("x" * NUM_COMPARED)
    assert tokenizer.encode("717").tolist() == [257]
    errors = capsys.readouterr().err
    assert errors.startswith(f"warning: {tmp_path}/tokenizer.json: tiktoken has other tokens for ")
    assert errors.endswith("; the tokenizers library encodes, more slowly\n") and errors.count("\n") == 1


def test_the_first_texts_of_each_work_unit_decide(
    tmp_path: Path, small_units: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where it takes pieces that are tokens as they are, the merges of the library may be fewer than those of tiktoken.
    content = file_of([("a", "b"), ("b", "c"), ("a", "bc")], model={"ignore_merges": True})
    section = build(tmp_path, content).section
    usual, odd = "abc x " * NUM_COMPARED, "yabc"
    for name, text in (("0", usual + odd), ("1", odd + usual + odd), ("2", usual + odd)):
        (tmp_path / f"{name}.txt").write_text(text)
    prepare([str(tmp_path / "*.txt")], tmp_path / "out", section, workers=0)
    by_tiktoken, by_library = [ord("y"), 258], [ord("y"), 256, ord("c")]
    ends = [document[-1 - len(by_library) : -1] for document in read_split(tmp_path / "out", TRAIN)]
    assert ends == [[ord(" "), *by_tiktoken], by_library, [ord(" "), *by_tiktoken]]
    assert capsys.readouterr().err.count("tiktoken has other tokens") == 1
