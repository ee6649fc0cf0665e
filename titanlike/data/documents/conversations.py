"""Conversations from records of chat and instruction data. No torch.

A record has messages, each with a role and a content, or a prompt and a completion, which are texts or messages. Fields have one of
their common names (`FIELDS`) or one that the recipe gives. A field that is null is as one that is missing.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlike.config.base import shown
from titanlike.config.finetune import FIELDS, ROLES
from titanlike.data.documents.readers import BadRecord, replace_surrogates

# Of ShareGPT's data and of what continues its format, of OpenAI's older functions, and of Gemma's templates.
COMMON_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
Message = dict[str, Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages between a user and an assistant, and descriptions of the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None


def is_answer(message: Message) -> bool:
    """Whether a message is trained on: the assistant's, unless its weight is 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


class RecordReader:
    """Reads fields of records by their names, and remembers which it has read and which not.

    Args:
        fields: other names, as `data.fields` has them.
    """

    def __init__(self, fields: Sequence[str] = ()) -> None:
        given: dict[str, list[str]] = {}
        for name, _, other in (each.partition("=") for each in fields):
            given.setdefault(name, []).append(other)
        self.names = {name: tuple(given.get(name, common)) for name, common in FIELDS.items()}
        self.roles = COMMON_ROLES | {other: role for role in ROLES for other in given.get(role, ())}
        # In the order in which they were found. What is passed to the template is read if the template does.
        self._found, self._read, self._passed = dict[str, None](), dict[str, None](), dict[str, None]()

    def open(self, record: Record) -> Record:
        """Returns a record without fields that are null. Raises `BadRecord` if it has more than text."""
        record = _without_nulls(record)
        self._found.update(dict.fromkeys(map(str, record)))
        if media := [name for name in MEDIA if record.get(name)]:
            raise BadRecord(f"the field {media[0]!r} is not empty, but models read text only; leave this record out")
        return record

    def fields_read(self, reads: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Returns the names of the fields that were read, and of the others. `reads` says whether the template reads a name."""
        read = self._read | {name: None for name in self._passed if reads(name.rpartition(".")[2])}
        return list(read), [name for name in (self._found | self._passed) if name not in read]

    def get(self, record: Record, field: str) -> tuple[str, Any]:
        """Returns the name and the value of the first of the names of a field that a record has; "" and None if it has none."""
        name = next((name for name in self.names[field] if name in record), "")
        if name:
            self._read[name] = None
        return name, record.get(name)

    def text(self, record: Record, field: str) -> str:
        """Returns the text of a field; "" if a record does not have it."""
        name, value = self.get(record, field)
        if not isinstance(value or "", str):
            raise BadRecord(f"the field {name!r} is not text: {_short(value)}")
        return value or ""

    def turn(self, record: Record, name: str, role: str) -> list[Message]:
        """Returns the messages in a field, or its text as a message with this role."""
        self._read[name] = None
        value = record[name]
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        if not isinstance(value, list | dict):
            raise BadRecord(f"the field {name!r} is neither text nor messages: {_short(value)}")
        return self.messages(name, value)

    def messages(self, name: str, value: Any) -> list[Message]:
        """Returns messages with the common names of their fields and roles. A single one needs no list."""
        value = [value] if isinstance(value, dict) and value else value
        if not isinstance(value, list):
            raise BadRecord(f"{name} is not a list: {_short(value)}")
        return [self._message(name, f"{name}.{number}", message) for number, message in enumerate(value)]

    def with_system(self, record: Record, messages: list[Message]) -> list[Message]:
        """Returns messages that begin with the system message of the record, unless they have one."""
        if messages and messages[0]["role"] == "system":
            return messages
        system = self.text(record, "system")
        return [{"role": "system", "content": system}, *messages] if system else messages

    def prompt(self, record: Record, name: str) -> list[Message]:
        """Returns the messages of a prompt, whose text is followed by an input."""
        messages = self.turn(record, name, "user")
        if isinstance(record[name], str) and (text := self.text(record, "input")):
            messages[0]["content"] += f"\n\n{text}"
        return messages

    def tools(self, record: Record) -> list[Any] | None:
        """Returns the descriptions of tools, which may be JSON in a text."""
        name = next((name for name in self.names["tools"] if name in record), "")
        tools = record.get(name)
        if isinstance(tools, str):
            tools = _from_json(name, tools) if tools.strip() else []
        if not isinstance(tools, list | None):
            raise BadRecord(f"{name} is not a list: {_short(tools)}")
        if tools:
            self._passed[name] = None
        return tools or None

    def _message(self, field: str, name: str, message: Any) -> Message:
        if not isinstance(message, dict):
            raise BadRecord(f"{name} is not an object: {_short(message)}")
        message = dict(message)
        given = {
            key: next((each for each in self.names[key] if each in message), self.names[key][0]) for key in MESSAGE
        }
        role, content, weight = (message.pop(given[key], None) for key in MESSAGE)
        if not isinstance(role, str) or role not in self.roles:
            raise BadRecord(
                f"{name}.{given['role']} = {_short(role)}; use one of {', '.join(self.roles)}, or set data.fields"
            )
        if role == "function_call":
            message["function_call"], content = _from_json(f"{name}.{given['content']}", content), ""
        if (calls := message.pop("function_call", None)) and not message.get("tool_calls"):
            calls = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        if weight not in (None, 0, 1):
            raise BadRecord(
                f"{name}.{given['weight']} = {_short(weight)}; use 0 to leave a message out of the loss, or 1"
            )
        found = {"role": self.roles[role], "content": self._content(f"{name}.{given['content']}", content, message)}
        self._passed.update({f"{field}.{key}": None for key in message})
        return message | found | ({} if weight is None else {"weight": int(weight)})

    def _content(self, name: str, content: Any, others: Message) -> str:
        if isinstance(content, list):
            for number, part in enumerate(content):
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise BadRecord(f"{name}.{number} is not a part of text, but {_short(part)}; models read text only")
            return "".join(part["text"] for part in content)
        if content is None and "tool_calls" in others:
            return ""
        if not isinstance(content, str):
            raise BadRecord(f"{name} is not text: {_short(content)}")
        return content


MESSAGE = ("role", "content", "weight")


def conversation_of(record: Record, reader: RecordReader | None = None) -> Conversation:
    """Returns the conversation in a record. Raises `BadRecord` if it has none, or one that is not valid."""
    reader = reader or RecordReader()
    record = reader.open(record)
    name, value = reader.get(record, "messages")
    messages = reader.messages(name, value) if name else _instruction(record, reader)
    if not any(map(is_answer, messages)):
        raise BadRecord(
            f"{name or 'the completion'} has none with the role 'assistant' and a weight other than 0, so there is nothing to learn"
        )
    for number, message in enumerate(messages):
        if is_answer(message) and not message["content"] and "tool_calls" not in message:
            raise BadRecord(
                f"message {number} is an empty answer; leave this record out, or set the weight of the message to 0"
            )
    return Conversation(reader.with_system(record, messages), reader.tools(record))


def _instruction(record: Record, reader: RecordReader) -> list[Message]:
    """Returns the messages of a record with a prompt and a completion. Messages of the prompt are not trained on."""
    prompts, completions = reader.names["prompt"], reader.names["completion"]
    # Fields of one format belong together: some data has the prompt and its completion in another one again.
    for prompt, completion in (*zip(prompts, completions, strict=False), *itertools.product(prompts, completions)):
        if prompt in record and record.get(completion) not in (None, "", []):
            before = [
                message | {"weight": 0} if is_answer(message) else message for message in reader.prompt(record, prompt)
            ]
            return before + reader.turn(record, completion, "assistant")
    raise BadRecord(
        f"no {' or '.join(reader.names['messages'])}, and no {' or '.join(prompts)} with a {' or '.join(completions)} that is not "
        f"empty; its fields are {', '.join(map(shown, map(str, record))) or 'none'}; name others in data.fields"
    )


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys that are null: a record of Parquet has the keys of all records, below lists too."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _from_json(name: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise BadRecord(f"{name} is not JSON: {_short(text)}") from None


def _short(value: Any) -> str:
    return shown(replace_surrogates(json.dumps(value, default=str, ensure_ascii=False)))[:60]


def synthetic_conversations(count: int = 1000) -> Iterator[Conversation]:
    """Generates conversations of one to three questions about sums, to try fine-tuning without data."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        total, messages = int(rng.integers(0, 10)), []
        for turn in range(int(rng.integers(1, 4))):
            term = int(rng.integers(0, 10))
            question = f"Add {term}." if turn else f"What is {total} plus {term}?"
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{total} + {term} = {total + term}"},
            ]
            total += term
        yield Conversation(messages)
