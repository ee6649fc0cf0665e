"""Filters that do not depend on the language: length, symbols, and repetition within a document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from titanlike.config.base import section
from titanlike.recipe.load import load, parse_value
from titanlike.tools.data.quality.hashing import Words, shingles_of

Share = Annotated[float, Field(gt=0, le=1)]

_SYMBOLS = bytes(byte for byte in range(33, 127) if not chr(byte).isalnum())
_SPACES = b" \t\r\n\v\f"
_CONTINUATIONS = bytes(range(0x80, 0xC0))  # all bytes of a character but its first


@section
class Thresholds:
    """Limits of the filters of `--quality`. A document that is beyond one is removed."""

    min_characters: Annotated[int, Field(ge=0)] = 100
    """Characters of the shortest document. Shorter ones are mostly titles, menus and messages. 0 disables it."""
    max_characters: Annotated[int, Field(ge=0)] = 0
    """Characters of the longest document. 0, the default, disables it."""
    max_symbols: Share = 0.4
    """Largest share of characters, without white space, that are neither letters nor digits. Source code has up to 0.35. 1
    disables it."""
    max_repeated_lines: Share = 0.4
    """Largest share of the characters of a document in lines that occur in it before. 1 disables it."""
    max_repeated_paragraphs: Share = 0.3
    """The same for paragraphs, which are separated by empty lines. 1 disables it."""
    max_repeated_words: Share = 0.5
    """Largest share of the sequences of five words of a document that occur in it before. 1 disables it."""
    max_frequent_pair: Share = 0.2
    """Largest share of the most frequent sequence of two words in a document of 50 words or more. 1 disables it."""


MIN_PAIRS = 50  # of a document whose most frequent pair of words is judged


class Verdict(NamedTuple):
    """Why a document is removed."""

    reason: str
    detail: str  # the value and its limit


def parse_thresholds(text: str) -> Thresholds:
    """Parses `default`, or limits such as `min_characters=50,max_symbols=0.3`, which replace defaults."""
    items = [] if text == "default" else [item.partition("=") for item in text.replace(" ", "").split(",")]
    return load(Thresholds, Path(f"--quality {text}"), given={name: parse_value(value) for name, _, value in items})


def judge(text: str, content: bytes, limits: Thresholds) -> Verdict | None:
    """Returns why a text, of which `content` is the UTF-8, is removed by its length, symbols, lines or paragraphs, or None."""
    length = len(text)
    if length < limits.min_characters:
        return Verdict("length", f"{length} characters, fewer than {limits.min_characters}")
    if limits.max_characters and length > limits.max_characters:
        return Verdict("length", f"{length:,} characters, more than {limits.max_characters:,}")
    visible = len(content.translate(None, _SPACES + _CONTINUATIONS))
    # The general punctuation, arrows and pictures beyond ASCII begin with these bytes; hardly any letters do.
    symbols = len(content) - len(content.translate(None, _SYMBOLS))
    if not content.isascii():
        symbols += content.count(b"\xe2") + content.count(b"\xc2") + content.count(b"\xf0\x9f")
    verdict = _compare("symbols", symbols / max(visible, 1), limits.max_symbols, "of the characters are symbols")
    if verdict is None:
        share = _repeated([line for line in text.split("\n") if line and not line.isspace()])
        verdict = _compare("repeated_lines", share, limits.max_repeated_lines, "of the text are repeated lines")
    if verdict is None and "\n\n" in text:
        share = _repeated([part for part in text.split("\n\n") if part and not part.isspace()])
        verdict = _compare(
            "repeated_paragraphs", share, limits.max_repeated_paragraphs, "of the text are repeated paragraphs"
        )
    return verdict


def judge_words(words: Words, limits: Thresholds) -> Iterator[Verdict | None]:
    """Yields for each text why it is removed by the repetition of its words, or None."""
    pairs, sequences = shingles_of(words, 2), shingles_of(words)
    per_text = (np.split(each.hashes, each.ends)[:-1] for each in (pairs, sequences))
    for first, second in zip(*per_text, strict=True):
        first.sort()
        second.sort()
        distinct = 1 + np.count_nonzero(second[1:] != second[:-1])
        share = 1 - distinct / max(len(second), 1) if len(second) else 0.0
        verdict = _compare(
            "repeated_words", share, limits.max_repeated_words, "of the sequences of five words are repeated"
        )
        if verdict is None and len(first) >= MIN_PAIRS:
            ends = np.flatnonzero(np.append(first[1:] != first[:-1], True))
            most = int(np.diff(ends, prepend=-1).max())
            verdict = _compare(
                "repeated_words", most / len(first), limits.max_frequent_pair, "of the pairs of words are the same"
            )
        yield verdict


def _compare(reason: str, share: float, limit: float, what: str) -> Verdict | None:
    return Verdict(reason, f"{share:.2f} {what}, more than {limit:g}") if share > limit else None


def _repeated(parts: list[str]) -> float:
    """Returns the share of the characters that are in parts that occurred before."""
    total = sum(map(len, parts))
    return 1 - sum(map(len, set(parts))) / total if total else 0.0
