"""Filters of documents: length, symbols and repetition, which do not depend on the language, and a function of one's own in a
Python file, which says whether a document is kept, or returns another text for it."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from titanlike.config import UserError
from titanlike.config.base import section
from titanlike.data.documents.readers import replace_surrogates
from titanlike.recipe.load import load, parse_value
from titanlike.tools.data.quality.hashing import Words, shingles_of

Share = Annotated[float, Field(gt=0, le=1)]

_SYMBOLS = bytes(byte for byte in range(33, 127) if not chr(byte).isalnum())
SPACES = b" \t\r\n\v\f"
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
    visible = len(content.translate(None, SPACES + _CONTINUATIONS))
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


@dataclass(frozen=True)
class OwnFilter:
    """A function that is named `FILE.py:FUNCTION`, and the content of its file when the command started."""

    name: str
    source: bytes

    @property
    def fingerprint(self) -> str:
        """Identifies the content of the file."""
        return hashlib.sha256(self.source).hexdigest()[:16]

    @property
    def takes_record(self) -> bool:
        """Whether the function takes the complete record: its first parameter is called `record`."""
        return _load(self)[1]

    def apply(self, text: str, record: dict[str, Any]) -> str | None:
        """Returns the text of a document that is kept, and None for one that is removed."""
        function, takes_record = _load(self)
        try:
            result = function(record if takes_record else text)
        except (Exception, SystemExit) as error:
            raise UserError(f"--filter {self.name} raised {type(error).__name__}: {error}") from error
        if isinstance(result, str):
            return replace_surrogates(result) or None
        if isinstance(result, (bool, np.bool_)):
            return text if result else None
        raise UserError(
            f"--filter {self.name} returned {type(result).__name__}; return True to keep the document, False to remove it, or its "
            "new text"
        )


def open_filter(name: str) -> OwnFilter:
    """Checks a name `FILE.py:FUNCTION` and returns its filter."""
    file, separator, function = name.rpartition(":")
    if not separator or not file.endswith(".py") or not function.isidentifier():
        raise UserError(f"--filter {name}: give a file and a function, such as my_filter.py:keep")
    try:
        own = OwnFilter(name, Path(file).read_bytes())
    except OSError as error:
        raise UserError(f"--filter {name}: {file} cannot be read: {error.strerror}") from None
    _load(own)
    return own


@lru_cache(maxsize=1)
def _load(own: OwnFilter) -> tuple[Callable[[Any], Any], bool]:
    file, _, name = own.name.rpartition(":")
    module = sys.modules["<filter>"] = ModuleType("<filter>")  # where dataclasses look up their annotations
    names = vars(module)
    try:
        exec(compile(own.source, file, "exec"), names)
    except (Exception, SystemExit) as error:
        raise UserError(f"--filter {own.name}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    function = names.get(name)
    if not callable(function):
        functions = ", ".join(each for each, value in names.items() if inspect.isfunction(value)) or "none"
        raise UserError(f"--filter {own.name}: {file} has no function {name!r}; its functions: {functions}")
    return function, [*inspect.signature(function).parameters][:1] == ["record"]
