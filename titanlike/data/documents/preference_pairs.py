"""Preference pairs from records: a chosen and a rejected conversation, which begin with the same prompt. No torch.

A record has `chosen` and `rejected`, each messages or the text of an answer, and a `prompt` of either kind. The prompt may be left
out, or be text besides, if both conversations contain it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from titanlike.config.base import shown
from titanlike.data.documents.conversations import Conversation, Message, Record, RecordReader, is_answer
from titanlike.data.documents.readers import BadRecord

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same prompt, of which the first one is preferred."""

    chosen: Conversation
    rejected: Conversation


def preference_pair_of(record: Record, reader: RecordReader | None = None) -> PreferencePair:
    """Returns the pair in a record. Raises `BadRecord` if it has none, or one that is not valid."""
    reader = reader or RecordReader()
    record = reader.open(record)
    names = [next((name for name in reader.names[side] if record.get(name)), "") for side in SIDES]
    if missing := [side for side, name in zip(SIDES, names, strict=True) if not name]:
        found = ", ".join(map(shown, map(str, record))) or "none"
        raise BadRecord(
            f"no field {' and no field '.join(map(repr, missing))}, or an empty one; its fields are {found}; name others in "
            "data.fields"
        )
    pair = PreferencePair(*(_conversation(name, record, reader) for name in names))
    for number, messages in enumerate(zip(pair.chosen.messages, pair.rejected.messages, strict=False)):
        if messages[0] != messages[1]:
            if any(message["role"] != "assistant" for message in messages):
                raise BadRecord(
                    f"chosen and rejected have different prompts: message {number} differs, and is not the assistant's in both; "
                    "leave this record out"
                )
            break
    return pair


def _conversation(name: str, record: Record, reader: RecordReader) -> Conversation:
    answer = reader.turn(record, name, "assistant")
    question, prompt = next((each for each in reader.names["prompt"] if each in record), ""), list[Message]()
    # Data sets repeat the prompt beside complete conversations.
    is_complete = bool(answer) and answer[0]["role"] != "assistant"
    if question and not (is_complete and isinstance(record[question], str)):
        prompt = reader.prompt(record, question)
    if isinstance(record[name], str) and not prompt:
        raise BadRecord(f"{name} is text, but there is no field {' or '.join(reader.names['prompt'])} that it answers")
    messages = answer if answer[: len(prompt)] == prompt else [*prompt, *answer]
    if not any(map(is_answer, messages)):
        raise BadRecord(f"{name} has no message with the role 'assistant', so there is nothing to compare")
    return Conversation(reader.with_system(record, messages), reader.tools(record))


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
