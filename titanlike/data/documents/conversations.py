"""Conversations from records of chat and instruction data. No torch.

A record has `messages`, each with a role and a content, or a prompt and a completion under one of their common names.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlike.config.base import shown
from titanlike.data.documents.readers import BadRecord, replace_surrogates

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPTS, COMPLETIONS = ("prompt", "instruction"), ("completion", "output", "response")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages between a user and an assistant, and descriptions of the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None


def conversation_of(record: dict[str, Any]) -> Conversation:
    """Returns the conversation in a record. Raises `BadRecord` if it has none, or one that is not valid."""
    if "messages" not in record:
        return Conversation(_instruction(record))
    messages = record["messages"]
    if not isinstance(messages, list):
        raise BadRecord(f"messages is not a list: {_short(messages)}")
    conversation = [_message(f"messages.{number}", message) for number, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in conversation):
        raise BadRecord("messages has none with the role 'assistant', so there is nothing to learn")
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRecord(f"tools is not a list: {_short(tools)}")
    return Conversation(conversation, tools)


def _message(name: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadRecord(f"{name} is not an object: {_short(message)}")
    message = {
        key: value for key, value in message.items() if value is not None
    }  # Parquet has all keys in all messages
    role = message.get("role")
    if role not in ROLES:
        raise BadRecord(f"{name}.role = {_short(role)}; use one of {', '.join(ROLES)}")
    content = message.get("content", "" if message.get("tool_calls") else None)
    if not isinstance(content, str):
        raise BadRecord(f"{name}.content is not text: {_short(content)}")
    return message | {"content": content}


def _instruction(record: dict[str, Any]) -> list[Message]:
    """Returns the messages of a record with a prompt and a completion."""
    names = [next((name for name in known if name in record), "") for known in (PROMPTS, COMPLETIONS)]
    if not all(names):
        found = ", ".join(map(shown, map(str, record))) or "none"
        raise BadRecord(
            f"no field 'messages', and no {' or '.join(PROMPTS)} with {' or '.join(COMPLETIONS)}; its fields are {found}"
        )
    for name in (*names, "input", "system"):
        if not isinstance(record.get(name) or "", str):
            raise BadRecord(f"the field {name!r} is not text: {_short(record[name])}")
    prompt, completion = (record[name] or "" for name in names)
    if record.get("input"):
        prompt = f"{prompt}\n\n{record['input']}"
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    return [*system, {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


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
