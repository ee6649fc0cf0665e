"""Chat data: packing, labels, epochs, validation, what is left out, and bad records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.sequences import batches
from titanlike.config import UserError, effect
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Tokenizer
from titanlike.data.batches.chats import open_sources
from titanlike.data.batches.sources import Sources
from titanlike.data.tokens.chats import TokenizedChats
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE
from titanlike.recipe.finetune import FinetuneRecipe

EOS = 256


def write(file: Path, *records: Any) -> Path:
    file.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return file


def sum_of(first: int, second: int) -> dict[str, str]:
    return {"prompt": f"{first}+{second}", "completion": str(first + second)}


def open_chats(path: Path, *, seq_len: int = 64, validate: bool = False, **keys: Any) -> Sources:
    section = ChatData(source="chat", path=str(path), **({"holdout_every": 0} | keys))
    return open_sources(
        section, build_tokenizer(Tokenizer()), seq_len=seq_len, global_batch_size=8, seed=0, validate=validate
    )


def conversations_of(source: Any, steps: int) -> list[str]:
    """Returns the conversations of some global batches, without padding."""
    found = []
    for step in range(1, steps + 1):
        batch = source.read(step, range(8))
        for row, documents in zip(batch.tokens, batch.document_ids, strict=True):
            found += ["".join(map(chr, row[documents == document])) for document in range(documents[-1] + 1)]
    return [text for text in found if text.strip(chr(EOS))]


def test_each_epoch_has_every_conversation_once(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", *(sum_of(a, b) for a in range(10) for b in range(10)))
    source: Any = open_chats(path, seq_len=79).training
    [dataset] = source.datasets
    assert dataset.num_sequences < 40  # of three conversations each
    found = conversations_of(source, steps=dataset.num_sequences)  # 8 epochs
    assert len(set(found)) == 100
    assert all(found.count(text) == 8 for text in set(found))


def test_labels_are_the_assistants_tokens_within_each_conversation(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}, {"role": "user", "content": "d"}]
    chats = [{"messages": [*turns, {"role": "assistant", "content": "e"}]}, {"prompt": "f", "output": "gh"}]
    loader = batches(open_chats(write(tmp_path / "chats.jsonl", *chats), seq_len=90).training)
    batch = loader.microbatches(1)[0]
    first, second = "user\na#assistant\nbc#user\nd#assistant\ne#", "user\nf#assistant\ngh#"
    tokens, labels = batch.inputs["tokens"][0].tolist(), batch.labels[0].tolist()
    text = "".join("#" if token == EOS else chr(token) for token in tokens)
    assert text == (first + second).ljust(90, "#")
    expected = ["_"] * 91
    for start in (text.index("bc#"), text.index("e#"), text.index("gh#")):
        for index in range(start, text.index("#", start) + 1):
            expected[index] = text[index]
    shown = ["_" if label == IGNORE else "#" if label == EOS else chr(label) for label in labels]
    assert shown == expected[1:]
    lengths = [len(first), len(second), 90 - len(first + second)]
    assert batch.inputs["document_ids"][0].tolist() == [0] * lengths[0] + [1] * lengths[1] + [2] * lengths[2]
    assert batch.inputs["position_ids"][0].tolist() == [index for length in lengths for index in range(length)]


def test_any_step_is_read_without_those_before_it(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", *(sum_of(a, b) for a in range(10) for b in range(10)))
    first: Any
    again: Any
    first, again = open_chats(path).training, open_chats(path).training
    for step in range(1, 20):
        expected = first.read(step, range(8))
    found = again.read(19, range(4, 8))
    np.testing.assert_array_equal(found.tokens, expected.tokens[4:])
    np.testing.assert_array_equal(found.loss_mask, expected.loss_mask[4:])
    assert first.position() is None and first.fingerprint == again.fingerprint


def test_validation_has_conversations_that_training_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", *(sum_of(a, b) for a in range(10) for b in range(10)))
    sources: Any = open_chats(path, validate=True, holdout_every=5)
    trained, held_out = (set(conversations_of(source, 20)) for source in (sources.training, sources.validation))
    assert (len(trained), len(held_out)) == (80, 20)
    assert trained.isdisjoint(held_out)
    other = write(tmp_path / "other.jsonl", sum_of(77, 77))
    sources = open_chats(path, validate=True, validation_path=str(other))
    assert set(conversations_of(sources.validation, 1)) == {f"user\n77+77{chr(EOS)}assistant\n154{chr(EOS)}"}
    with pytest.raises(UserError, match=r"no conversation for validation: 1 in all, one in 50 held out; reduce"):
        open_chats(other, validate=True, holdout_every=50)


# As templates of reasoning models do, it writes what was thought only in the last message.
THINKING = (
    "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else m.content[-1] }};{% endfor %}"
    "{{ '>' if add_generation_prompt }}"
)


def test_documents_of_one_conversation_are_on_one_side(tmp_path: Path) -> None:
    def turns(number: int, count: int) -> dict[str, Any]:
        texts = [(f"q{number}", f">{number}") for _ in range(count)]
        roles = ("user", "assistant")
        return {
            "messages": [
                dict(role=role, content=text) for turn in texts for role, text in zip(roles, turn, strict=True)
            ]
        }

    template = tmp_path / "template.jinja"
    template.write_text(THINKING)
    path = write(tmp_path / "chats.jsonl", *(turns(number, 1 + number % 3) for number in range(10, 40)))
    options: Any = dict(chat_template=str(template), validate=True, holdout_every=5, seq_len=40)
    sources: Any = open_chats(path, **options)
    found = [set(conversations_of(source, 8)) for source in (sources.training, sources.validation)]
    numbers = [{text[1:3] for text in side} for side in found]
    assert numbers[1] == {"14", "19", "24", "29", "34", "39"} and len(numbers[0]) == 24 and not numbers[0] & numbers[1]
    expected = {
        f"q{number};{f'{number % 10};q{number};' * turn}>{number};"
        for number in range(10, 40) for turn in range(1 + number % 3)
    }  # fmt: skip
    assert found[0] | found[1] == expected
    assert sources.training.describe(1).startswith("24 conversations as 48 documents, ")
    assert sources.validation.describe(1).startswith("6 conversations as 12 documents, ")
    # What follows a turn that does not fit is left out, and not the conversation.
    short: Any = open_chats(path, **options | {"seq_len": 9}).training
    assert "24 conversations, " in short.describe(1) and "24 skipped as too long" in short.describe(1)


def test_a_line_has_the_fields_that_are_read_and_those_that_are_not(tmp_path: Path, capsys: Any) -> None:
    chat = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "time": 3, "name": "x"}
    records = [
        {"id": 1, "conversations": chat, "source": None},
        {"prompt": "a", "completion": "b", "tools": [], "date": "x"},
    ]
    path, cache = write(tmp_path / "chats.jsonl", *records), str(tmp_path / "cache")
    line = "fields  conversations, prompt, completion read; id, tools, date, conversations.time, conversations.name not read\n"
    for _ in range(2):  # tokenized, and from the cache
        open_chats(path, cache=cache)
        assert capsys.readouterr().out == line
    # What is dropped is not read: an input of messages, and a system message besides that of the messages.
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    dropped = {"prompt": prompt, "completion": "b", "input": "c", "system": "t"}
    open_chats(write(tmp_path / "dropped.jsonl", dropped))
    assert capsys.readouterr().out == "fields  prompt, completion read; input, system not read\n"


def test_other_names_of_fields_are_those_of_the_recipe(tmp_path: Path) -> None:
    dialog = [{"speaker": "client", "says": "a"}, {"speaker": "agent", "says": "b"}]
    path = write(tmp_path / "chats.jsonl", {"messages": "no. 3", "dialog": dialog})
    names = ("messages=dialog", "role=speaker", "content=says", "user=client", "assistant=agent")
    cache = str(tmp_path / "cache")
    source: Any = open_chats(path, fields=names, cache=cache).training
    assert set(conversations_of(source, 1)) == {f"user\na{chr(EOS)}assistant\nb{chr(EOS)}"}
    with pytest.raises(UserError, match=r"line 1: messages is not a list"):  # and not from the cache
        open_chats(path, cache=cache)
    wrong = ChatData(fields=("mesages=dialog", "role", "content=", "role=speaker"), path="x")
    assert [problem[:46] for problem in wrong.problems()] == [
        "data.fields: 'mesages=dialog' is not NAME=FIEL", "data.fields: 'role' is not NAME=FIELD with one",
        "data.fields: 'content=' is not NAME=FIELD with",
    ]  # fmt: skip
    generated = FinetuneRecipe(data=ChatData(source="synthetic_chat", fields=("role=speaker",)))
    assert ["data.fields" in problem for problem in effect.problems(generated)] == [True]


def test_long_conversations_are_truncated_or_skipped_and_counted(tmp_path: Path) -> None:
    long = {"prompt": "a", "completion": "b" * 100}
    useless = {"prompt": "a" * 100, "completion": "b"}
    path = write(tmp_path / "chats.jsonl", sum_of(1, 1), long, useless)
    source: Any = open_chats(path, seq_len=30).training
    assert source.describe(1) == (
        "2 conversations, 52 tokens (16 of the assistant) in 2 sequences, 84% full, 1 truncated to 31 tokens, "
        "1 skipped as too long, read 4 times"
    )
    assert f"user\na{chr(EOS)}assistant\n" + "b" * 14 in conversations_of(source, 1)
    skipping = open_chats(path, seq_len=30, long_chats="skip").training
    assert "1 conversation," in skipping.describe(1) and "2 skipped as too long" in skipping.describe(1)
    with pytest.raises(UserError, match=r"no conversation for training: 3 in all, 3 longer than training.seq_len = 8$"):
        open_chats(path, seq_len=8, long_chats="skip")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"chats.jsonl, line 2: not JSON: "),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, r"line 2: message 1 is an empty"),
        ({"prompt": "refuse", "completion": "b"}, r"chats.jsonl, line 2: .*template.jinja raises TemplateError: not this one$"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_or_skipped(record: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this one') }}{% endif %}"
        "{{ messages[0].content }}{% generation %}{{ messages[1].content }}<|endoftext|>{% endgeneration %}"
    )
    path = write(tmp_path / "chats.jsonl", sum_of(1, 1), record, sum_of(2, 2))
    with pytest.raises(UserError, match=message):
        open_chats(path, chat_template=str(template))
    source: Any = open_chats(path, chat_template=str(template), bad_records="skip").training
    assert "2 conversations" in source.describe(1) and "1 skipped as bad" in source.describe(1)
    assert "warning: skipped" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"not a file of records; its name must end with .jsonl, .json"):
        open_chats(template)


def test_the_cache_is_read_and_replaced_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "chats.jsonl", sum_of(1, 1))
    cache = str(tmp_path / "cache")
    expected = open_chats(path, cache=cache).training.fingerprint
    [file] = (tmp_path / "cache/chats").glob("*.npz")
    file.write_bytes(file.read_bytes()[:-40])
    assert TokenizedChats.load(file) is None
    assert open_chats(path, cache=cache).training.fingerprint == expected
    written = file.stat().st_mtime_ns
    assert open_chats(path, cache=cache).training.fingerprint == expected
    assert file.stat().st_mtime_ns == written
