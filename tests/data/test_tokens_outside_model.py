"""Added tokens of a tokenizer that its model has no row for, as Gemma 3 of 1B has none for `<image_soft_token>`: only data with one
is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlike.config import UserError
from titanlike.config.finetune import ChatData
from titanlike.config.mlm import MaskedTokens
from titanlike.config.sections import Data, Tokenizer
from titanlike.data.batches import chats, sources
from titanlike.data.batches.masked_tokens import MaskedSource, mask_token
from titanlike.data.batches.span_corruption import sentinels
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens import datasets
from titanlike.data.tokens.datasets import open_training
from titanlike.data.tokens.shards import Shards
from titanlike.data.tokens.tokenization import FileSpan, Options, WorkUnit, finish, tokenize
from titanlike.data.tokens.tokenizer import build_tokenizer

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["a", "b", "c", "[UNK]", "</s>", "<mask>"]
SIZE = len(WORDS)  # of the model's vocabulary
IMAGE = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": ["image"]}
TEMPLATE = """\
{%- for message in messages -%}{%- if tools %}<image>{% endif -%}
{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] }}</s>{% endgeneration %}
{%- else -%}{{ message['content'] }}</s>{%- endif -%}{%- endfor -%}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with two added tokens after the words: `<image>`, which is special, and `<tag>`, which is not."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>", "<mask>", "<image>"])
    made.add_tokens(["<tag>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def build(folder: Path, vocab_size: int | None = SIZE, weights: str = "", **keys: Any) -> Any:
    return build_tokenizer(Tokenizer(encoding=str(folder), **keys), vocab_size, weights)


def test_only_a_text_with_one_is_refused(folder: Path) -> None:
    tokenizer = build(folder)
    assert (tokenizer.vocab_size, tokenizer.codec.vocab_size) == (SIZE, SIZE + 2)
    assert tokenizer.encode("a <image> b").tolist() == build(folder, None).encode("a <image> b").tolist()
    assert tokenizer.encode_with_special("a </s> b")[0].tolist() == [0, 4, 1]
    assert tokenizer.fingerprint == build(folder, None).fingerprint
    message = f"the text has <image>, token 6 of tokenizer.encoding = {str(folder)!r}, but model.vocab_size = 6; remove it from "
    with pytest.raises(UserError, match=re.escape(message + "the data, or set model.vocab_size = 64")):
        tokenizer.encode_with_special("a <image> b")
    with pytest.raises(UserError, match=r"the text has <tag>, token 7 "):  # not special: also in plain text
        tokenizer.encode("a <tag> b")
    with pytest.raises(UserError, match=r"<image>, .* or use the tokenizer of model/, whose weights have no row"):
        build(folder, weights="model/").encode_with_special("<image>")
    assert build(folder, SIZE + 1).encode_with_special("a <image>")[0].tolist() == [0, 6]


def test_ordinary_tokens_and_the_separators_are_needed(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^model.vocab_size = 3 is smaller than the 5 tokens .*; set model.vocab_size"):
        build(folder, 3)
    with pytest.raises(UserError, match=r"^model.vocab_size = 3 is smaller .*; use the tokenizer of model/"):
        build(folder, 3, weights="model/")
    for keys in (dict(eos="<image>"), dict(special="bos", bos="<image>"), dict(special="both", bos="<image>")):
        with pytest.raises(UserError, match=r"^model.vocab_size = 6 is smaller than the 7 tokens"):
            build(folder, **keys)
        build(folder, 7, **keys)


def test_shards_with_one_are_not_damaged(folder: Path) -> None:
    (folder / "text.txt").write_text("a b <tag> c")
    wide = build(folder, None)
    [file] = list_files(str(folder / "text.txt"))
    partial_folder = folder / "partial"
    partial_folder.mkdir()
    options = Options(partial_folder, wide.section, Fields(), 0.0, False)
    found = tokenize(WorkUnit(0, (FileSpan(file, file.size),)), options, wide, lambda *_: None)
    manifest = finish(partial_folder, folder / "shards", [found], wide, options, [file])
    assert manifest.tokenizer["vocab_size"] == SIZE + 2
    section = Data(source="shards", path=str(folder / "shards"), holdout_every=0)
    whole = open_training(section, section.path, build(folder, SIZE + 2))
    assert whole.read(np.array([0]), 5).tolist() == [[0, 1, 7, 2, 4]]
    narrow = open_training(section, section.path, build(folder))
    assert narrow.read(np.array([3]), 2).tolist() == [[2, 4]]
    with pytest.raises(UserError, match=r"00000.tokens has at 2 <tag>, token 7 of .*model.vocab_size = 6; remove it"):
        narrow.read(np.array([0]), 5)
    with pytest.raises(UserError, match=r"has at 2 <tag>, token 7 .* use the tokenizer of model/"):
        datasets.check_shards(section.path, wide.section, SIZE, "model/")
    # Tokens that are in the cache are those of the tokenizer, too.
    text = Data(source="text", path=str(folder / "text.txt"), cache=str(folder / "cache"), holdout_every=0)
    assert isinstance(open_training(text, text.path, build(folder, SIZE + 2)), Shards)
    with pytest.raises(UserError, match=r"has at 2 <tag>"):
        _ = open_training(text, text.path, build(folder)).fingerprint
    with pytest.raises(UserError, match=r"the text has <tag>"):
        open_training(
            Data(source="text", path=text.path, cache=str(folder / "new"), holdout_every=0), text.path, build(folder)
        )
    (folder / "plain.txt").write_text("a b c")
    plain: Any = open_training(text, str(folder / "plain.txt"), build(folder))
    assert plain.manifest.tokenizer["vocab_size"] == SIZE + 2


def test_a_conversation_with_one_is_a_bad_record(folder: Path) -> None:
    plain = {key: IMAGE[key] for key in ("messages",)}
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (plain, IMAGE)))

    def open_chats(tokenizer: Any, **keys: Any) -> Any:
        section = ChatData(
            source="chat", path=str(folder / "chats.jsonl"), holdout_every=0, cache=str(folder / "cache"), **keys
        )
        return chats.open_sources(section, tokenizer, seq_len=16, global_batch_size=1, seed=0, validate=False).training

    # The cache of a model with these tokens is not that of one without.
    assert "2 conversations" in open_chats(build(folder, SIZE + 1), bad_records="skip").describe(1)
    with pytest.raises(UserError, match=r"chats.jsonl, line 2: the text has <image>, token 6 of "):
        open_chats(build(folder))
    described = open_chats(build(folder), bad_records="skip").describe(1)
    assert "1 conversation," in described and "1 skipped as bad" in described


def test_no_source_draws_one(folder: Path) -> None:
    tokenizer = build(folder)
    drawn = open_training(Data(source="synthetic"), "", tokenizer)
    tokens = drawn.read(np.array([0]), 5000)
    assert set(tokens.ravel().tolist()) == set(range(SIZE))
    mask = mask_token(tokenizer, MaskedTokens(), SIZE)
    assert mask == 5
    opened = sources.open_sources(
        Data(source="synthetic", holdout_every=0), tokenizer, seq_len=64, global_batch_size=8, seed=0, validate=False
    )
    masked = MaskedSource(opened.training, tokenizer, mask, 0.5, seed=0, separate=False)
    found = np.concatenate([masked.read(step, range(8)).tokens for step in range(1, 20)])
    assert found.max() < SIZE
    with pytest.raises(UserError, match=r"no mask token, .* set model.vocab_size = 64"):
        mask_token(build(folder, 5), MaskedTokens(), 5)
    with pytest.raises(UserError, match=r"no sentinels .* use the tokenizer of model/"):
        sentinels(build(folder, weights="model/"), 3, SIZE)
