"""Evaluation tasks from local JSON lines files, as lm-evaluation-harness defines them. Does not import torch.

The fields of the first line tell the format of a file.

| Format | Fields of a line | Score |
|---|---|---|
| `hellaswag` | `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label` | the most likely ending |
| `arc` | `question`, `choices` with `text` and `label`, `answerKey` | the most likely answer |
| `piqa` | `goal`, `sol1`, `sol2`, `label` | the most likely solution |
| `lambada` | `text` | whether the last word is the most likely one |
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.config.sections import metrics_name


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations."""

    context: str
    continuations: tuple[str, ...]
    lengths: tuple[int, ...] = ()  # of the choices in characters, by which acc_norm divides
    correct: int = 0


@dataclass(frozen=True)
class Task:
    """The items of a file."""

    name: str
    format: str
    items: Sequence[Item]

    def scores(self, results: Sequence[Sequence[tuple[float, bool]]]) -> dict[str, float]:
        """Returns the metrics of a task, from the log-likelihood of each continuation of each item, and whether it is the most
        likely one."""
        count = len(self.items)
        if self.format == "lambada":
            firsts = [result[0] for result in results]
            return {
                "acc": sum(is_greedy for _, is_greedy in firsts) / count,
                "perplexity": math.exp(-sum(value for value, _ in firsts) / count),
            }
        correct = normalized = 0
        for item, result in zip(self.items, results, strict=True):
            values = [value for value, _ in result]
            correct += _argmax(values) == item.correct
            relative = [value / max(length, 1) for value, length in zip(values, item.lengths, strict=True)]
            normalized += _argmax(relative) == item.correct
        return {"acc": correct / count, "acc_norm": normalized / count}


def read_task(file: str, limit: int = 0) -> Task:
    """Reads a file. With `limit`, its first items only. Raises `UserError` with the line that has another form."""
    items: list[Item] = []
    format = ""
    try:
        lines = Path(file).read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if not isinstance(item, dict):
                raise ValueError("not an object")
            format = format or _format_of(item)
            for name in TEXT_FIELDS[format]:
                if not isinstance(item[name], str):
                    raise ValueError(f"{name} is not a text")
            items.append(FORMATS[format](item))
        except KeyError as error:
            raise UserError(
                f"{file}, line {number}: no field {error}, which the format {format} of this file requires; add it"
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            what = f"the format {format}" if format else "a task"
            raise UserError(f"{file}, line {number}: not an item of {what}: {shown(str(error))}") from None
        if len(items) == limit:
            break
    if not items:
        raise UserError(f"{file} has no items; give a JSON lines file with an object in each line")
    return Task(metrics_name(file), format, items)


def _choices(context: str, choices: Any, label: Any) -> Item:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("the choices are not a list of texts")
    if str(label) not in map(str, range(len(choices))):
        raise ValueError(f"{label!r} is not the index of one of {len(choices)} choices")
    return Item(context, tuple(f" {choice}" for choice in choices), tuple(map(len, choices)), int(label))


def _hellaswag(item: Mapping[str, Any]) -> Item:
    def clean(text: str) -> str:
        # Brackets are left over from WikiHow, from which a part of the items comes.
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
    endings = item["endings"]
    cleaned = [clean(ending) for ending in endings] if isinstance(endings, list) else endings
    return _choices(clean(context), cleaned, item["label"])


def _arc(item: Mapping[str, Any]) -> Item:
    choices, key = item["choices"], item["answerKey"]
    if not isinstance(choices["label"], list) or key not in choices["label"]:
        raise ValueError(f"answerKey = {key!r} is not one of the labels {', '.join(choices['label'])}")
    return _choices(f"Question: {item['question']}\nAnswer:", choices["text"], choices["label"].index(key))


def _piqa(item: Mapping[str, Any]) -> Item:
    return _choices(f"Question: {item['goal']}\nAnswer:", [item["sol1"], item["sol2"]], item["label"])


def _lambada(item: Mapping[str, Any]) -> Item:
    context, _, word = item["text"].rpartition(" ")
    if not word:
        raise ValueError("text does not end in a word")
    return Item(context, (f" {word}",))


FORMATS: dict[str, Callable[[Mapping[str, Any]], Item]] = {
    "hellaswag": _hellaswag,
    "arc": _arc,
    "piqa": _piqa,
    "lambada": _lambada,
}


# The fields of each format that are texts. The first one tells it from the others.
TEXT_FIELDS = {
    "hellaswag": ("ctx_a", "ctx_b", "activity_label"),
    "arc": ("question", "answerKey"),
    "piqa": ("goal", "sol1", "sol2"),
    "lambada": ("text",),
}


def _format_of(item: Mapping[str, Any]) -> str:
    for format, fields in TEXT_FIELDS.items():
        if fields[0] in item:
            return format
    choices = ", ".join(f"{fields[0]} ({format})" for format, fields in TEXT_FIELDS.items())
    raise ValueError(f"it has none of the fields {choices}")


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # the first of equals
