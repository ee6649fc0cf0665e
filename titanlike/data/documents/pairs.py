"""Preference pairs from records: a chosen and a rejected conversation, which begin with the same prompt. No torch.

A record has `chosen` and `rejected`, each messages or the text of an answer, and a `prompt` of either kind. The prompt may be left
out, or be text besides, if both conversations contain it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlike.config.base import shown
from titanlike.data.documents.conversations import Conversation, conversation_of
from titanlike.data.documents.readers import BadRecord


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same prompt, of which the first one is preferred."""

    chosen: Conversation
    rejected: Conversation


def preference_pair_of(record: dict[str, Any]) -> PreferencePair:
    """Returns the pair in a record. Raises `BadRecord` if it has none, or one that is not valid."""
    if missing := [name for name in ("chosen", "rejected") if not record.get(name)]:
        found = ", ".join(map(shown, map(str, record))) or "none"
        raise BadRecord(
            f"no field {' and no field '.join(map(repr, missing))}, or an empty one; its fields are {found}"
        )
    return PreferencePair(_conversation("chosen", record), _conversation("rejected", record))


def _conversation(name: str, record: dict[str, Any]) -> Conversation:
    answer, prompt, tools = record[name], record.get("prompt"), record.get("tools")
    if isinstance(answer, str):
        if not prompt:
            raise BadRecord(f"{name} is text, but there is no field 'prompt' that it answers")
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list):
        raise BadRecord(f"{name} is neither text nor a list of messages")
    # Data sets repeat the prompt as text beside complete conversations.
    is_complete = isinstance(answer[0], dict) and answer[0].get("role") != "assistant"
    if isinstance(prompt, str):
        prompt = [] if is_complete else [{"role": "user", "content": prompt}]
    messages = [*prompt, *answer] if isinstance(prompt, list) else answer
    try:
        return conversation_of({"messages": messages, "tools": tools})
    except BadRecord as error:
        raise BadRecord(f"{name}: {error}") from None


def synthetic_pairs(count: int = 2000) -> Iterator[PreferencePair]:
    """Generates questions about sums with a right and a wrong answer, to try preference optimization without data."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        first, second = (int(term) for term in rng.integers(0, 6, 2))
        wrong = (first + second + int(rng.integers(1, 11))) % 11
        question = {"role": "user", "content": f"What is {first} plus {second}?"}
        chosen, rejected = (
            Conversation([question, {"role": "assistant", "content": str(total)}]) for total in (first + second, wrong)
        )
        yield PreferencePair(chosen, rejected)
