"""The formats of chats: a record of each gives its conversation, and the assistant's messages are the labels."""

from pathlib import Path
from typing import Any

import pytest

from tests.chat_formats import FORMATS, Format
from titanlike.config.finetune import FIELDS, ROLES
from titanlike.config.sections import Tokenizer
from titanlike.data.documents.conversations import RecordReader, conversation_of, is_answer
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chat_template import ChatTemplate
from titanlike.data.tokens.tokenizer import build_tokenizer

PAGE = Path(__file__).parents[2] / "docs/post_training.md"
# Writes all that a conversation may have, and separates messages by the special token.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def written(message: dict[str, Any]) -> str:
    calls = ['add{"a": 17, "b": 5}' for _ in message.get("tool_calls", ())]
    return "".join([message.get("reasoning_content", ""), message["content"], *calls, "<|endoftext|>"])


@pytest.mark.parametrize("format", FORMATS, ids=[each.name for each in FORMATS])
def test_a_record_is_its_conversation(format: Format) -> None:
    conversation = conversation_of(format.record, RecordReader(format.names))
    assert conversation.messages == format.messages and conversation.tools == format.tools
    template = ChatTemplate(TEMPLATE, build_tokenizer(Tokenizer()))
    [(tokens, labels)] = template.encode(conversation)
    decode = template.tokenizer.codec.decode
    assert decode(tokens.tolist()) == "".join(f"{each['role']}:{written(each)}" for each in format.messages)
    assert decode(tokens[labels].tolist()) == "".join(map(written, filter(is_answer, format.messages)))


def test_the_page_has_the_names_of_fields_and_roles() -> None:
    assert len({each.name for each in FORMATS}) == len(FORMATS) > 12
    page = PAGE.read_text()
    for field, names in FIELDS.items():
        assert all(f"`{name}`" in page or f'"{name}"' in page for name in (field, *names)), field
    assert all(role in page for role in ROLES)


def test_nulls_are_absent_on_every_level() -> None:
    call = {"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    chat = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    conversation = conversation_of({"messages": chat, "prompt": None, "tools": None})
    arguments = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages == [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [arguments]}
    ]  # fmt: skip
    # A pair of fields that belong together comes first: the prompt of this data contains the answer.
    both = {"instruction": "a", "input": "", "output": "b", "prompt": "Answer this: a. b"}
    assert [message["content"] for message in conversation_of(both).messages] == ["a", "b"]
    # An empty completion is as none.
    assert [message["content"] for message in conversation_of(both | {"completion": ""}).messages] == ["a", "b"]


def test_each_role_and_each_name_of_the_messages_is_known() -> None:
    for field in ("messages", "conversations", "conversation"):
        roles = ("system", "developer", "user", "assistant")
        found = conversation_of({field: [{"role": role, "content": role} for role in roles]})
        assert [message["role"] for message in found.messages] == list(roles)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": None, "prompt": None, "completion": None, "instruction": None, "output": None}, r"its fields are none; "),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
         r"^messages has none with the role 'assistant' and a weight other than 0"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]},
         r"^messages.1.weight = 0.5; use 0 to leave a message out of the loss, or 1$"),
        ({"prompt": "a", "completion": "b", "images": ["x.png"]}, r"^the field 'images' is not empty, but models read text only"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         r'^messages.0.content.0 is not a part of text, but \{"type": "image_url", .* models read text only$'),
        ({"conversations": [{"from": "alien", "value": "a"}]}, r'^conversations.0.from = "alien"; use one of system, .*, or set'),
        ({"conversations": [{"from": "function_call", "value": "add 1"}]}, r'^conversations.0.value is not JSON: "add 1"$'),
        ({"prompt": "a", "completion": "b", "tools": "{"}, r'^tools is not JSON: "\{"$'),
    ],
)  # fmt: skip
def test_what_is_not_a_conversation_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        conversation_of(record)
