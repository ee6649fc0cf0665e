"""A corpus with planted duplicates, near duplicates, boilerplate lines and rubbish, of any size, and the truth about it.

Every document is a function of the seed, the number of its file and its index, so that copies of documents of other files are made
without reading them. Words come from a vocabulary of random letters with Zipf's frequencies.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SEED = 7
FILE_BYTES = 250 * 10**6
VOCAB_SIZE, EXPONENT = 60_000, 1.05
SHINGLE = 5
# Kind of a document, with its share. The others are fresh.
SHARES = {"exact": 0.05, "near": 0.06, "related": 0.02, "length": 0.01, "symbols": 0.01, "lines": 0.01, "words": 0.01}
KINDS = ["fresh", *SHARES, "menu"]  # "menu": fresh, and mostly boilerplate lines
RECORD = struct.Struct("<QBfIQ")  # the fields of `Truth`
MENU_SHARE, MENU_LINES, MENU_DOMINATED = 0.25, 40, 0.005


class Truth(NamedTuple):
    """What is known of a document."""

    hash: int  # of the text without boilerplate lines
    kind: str
    similarity: float  # exact Jaccard similarity of its shingles to those of the original
    num_bytes: int
    cluster: int  # number of the document that it is a copy of, or its own


@cache
def vocabulary() -> Any:
    """Returns words, each as often as it is likely to be drawn."""
    rng = np.random.default_rng(SEED)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    weights = 1 / np.arange(2, 28) ** 0.8
    words: dict[str, None] = {}
    while len(words) < VOCAB_SIZE:
        length = int(rng.integers(2, 5)) if len(words) < 300 else int(rng.integers(4, 12))
        words["".join(rng.choice(letters, length, p=weights / weights.sum()))] = None
    probabilities = 1 / (np.arange(VOCAB_SIZE) + 2.7) ** EXPONENT
    counts = np.maximum(np.round(probabilities / probabilities.sum() * 2**20), 1).astype(np.int64)
    return np.repeat(np.array(list(words), object), counts)


@cache
def menus() -> list[str]:
    """Returns the boilerplate lines."""
    rng = np.random.default_rng(SEED + 1)
    return [" | ".join(word.capitalize() for word in draw(rng, 6)) for _ in range(MENU_LINES)]


def draw(rng: np.random.Generator, count: int) -> list[str]:
    """Returns random words."""
    words = vocabulary()
    drawn: list[str] = words[rng.integers(0, len(words), count)].tolist()
    return drawn


def text_of(words: Sequence[str]) -> str:
    """Returns words as sentences and paragraphs."""
    parts = list(words)
    parts[13::14] = [f"{word}.\n" for word in parts[13::14]]
    parts[69::70] = [f"{word}\n" for word in parts[69::70]]
    return " ".join(parts).replace("\n ", "\n")


def generator_of(file: int, index: int) -> np.random.Generator:
    """Returns the generator of a document."""
    return np.random.default_rng([SEED, file, index])


def kind_of(rng: np.random.Generator) -> str:
    """Draws the kind of a document: the first number of its generator."""
    value = rng.random()
    for kind, share in SHARES.items():
        if value < share:
            return kind
        value -= share
    return "fresh"


def fresh_words(rng: np.random.Generator) -> list[str]:
    """Draws a document that is a copy of none."""
    return draw(rng, int(np.clip(rng.lognormal(5.8, 0.9), 60, 20_000)))


def shingles(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Returns the sequences of `SHINGLE` words."""
    return {tuple(words[at : at + SHINGLE]) for at in range(len(words) - SHINGLE + 1)}


def similarity(first: Sequence[str], second: Sequence[str]) -> float:
    """Returns the exact Jaccard similarity of two documents."""
    one, two = shingles(first), shingles(second)
    return len(one & two) / len(one | two)


def original_of(rng: np.random.Generator, file: int, index: int) -> tuple[int, int] | None:
    """Draws a fresh document before this one: of the same file, or, one time in four, of an earlier file. None: there is none."""
    if file == 0 and index < 20:
        return None
    while True:
        source = int(rng.integers(0, file)) if file and (not index or rng.random() < 0.25) else file
        number = int(rng.integers(0, index if source == file else 10_000))
        if kind_of(generator_of(source, number)) == "fresh":
            return source, number


def words_of_text(text: str) -> list[str]:
    """Returns the words of a text, as titanlike and datatrove see them."""
    return text.lower().replace("|", " ").replace(".", " ").split()


def edited(rng: np.random.Generator, words: list[str]) -> list[str]:
    """Returns a near copy: words replaced at random, and sometimes a new beginning or end."""
    rate = float(rng.choice([0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08]))
    at = np.flatnonzero(rng.random(len(words)) < rate)
    if not len(at):
        at = rng.integers(0, len(words), 1)
    changed = list(words)
    for place, word in zip(at.tolist(), draw(rng, len(at)), strict=True):
        changed[place] = word
    if rng.random() < 0.3:
        changed = [*draw(rng, int(rng.integers(1, 10))), *changed]
    if rng.random() < 0.3:
        changed = changed[: -int(rng.integers(1, 10))]
    return changed


def document(file: int, index: int) -> tuple[str, Truth]:
    """Returns a document and the truth about it."""
    rng = generator_of(file, index)
    kind, likeness = kind_of(rng), 0.0
    words: list[str] = []
    cluster, original = (file, index), None
    if kind in ("exact", "near", "related"):
        original = original_of(rng, file, index)
        if original is None:
            kind = "fresh"
            rng = generator_of(file, index)
            kind_of(rng)
    if original:
        shown, truth = document(*original)
        if kind == "exact":
            return shown, truth._replace(kind="exact", similarity=1.0)
        copied = generator_of(*original)
        kind_of(copied)
        words = fresh_words(copied)
        if kind == "near":
            words, cluster = edited(rng, words), original
        else:  # shares a third of its text with another document, which does not make it a copy
            words = [*words[: len(words) // 2], *draw(rng, len(words) // 2 + 1)]
        likeness = similarity(words_of_text(shown), words)
    if kind == "fresh":
        words = fresh_words(rng)
    text = text_of(words)
    if kind == "length":
        text = " ".join(draw(rng, 8))[:90]
    elif kind == "symbols":
        text = "".join(rng.choice(list("#$%&*+-/<=>@\\^_|~ "), int(rng.integers(200, 3000))))
    elif kind == "lines":
        lines = [" ".join(draw(rng, 10)) for _ in range(3)]
        text = "\n".join(lines[each] for each in rng.integers(0, 3, 60))
    elif kind == "words":
        text = text_of(draw(rng, 4) * int(rng.integers(30, 200)))
    clean, shown = text, text
    if kind == "fresh" and rng.random() < MENU_DOMINATED:
        kind = "menu"
        shown = "\n".join(menus()[each] for each in rng.integers(0, MENU_LINES, 9)) + "\n" + " ".join(words[:20])
        clean = shown
    elif kind == "fresh" and rng.random() < MENU_SHARE:
        first, last = rng.integers(0, MENU_LINES, 2)
        shown = f"{menus()[first]}\n{text}\n{menus()[last]}"
        clean = f"{text}\n"
    number = cluster[0] << 32 | cluster[1]
    return shown, Truth(hash_of(clean.encode()), kind, likeness, len(shown.encode()), number)


def hash_of(content: bytes) -> int:
    """Returns a hash of a text."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def write_file(folder: Path, file: int) -> int:
    """Writes a file of about `FILE_BYTES` bytes, and the truth about it. Returns its size."""
    with (folder / f"{file:04}.jsonl").open("w") as stream, (folder / f"{file:04}.truth").open("wb") as truths:
        size = index = 0
        while size < FILE_BYTES:
            text, truth = document(file, index)
            size += stream.write(json.dumps({"text": text, "id": f"{file}-{index}"}) + "\n")
            truths.write(RECORD.pack(*truth._replace(kind=KINDS.index(truth.kind))))  # type: ignore[arg-type]
            index += 1
    return size


def write_corpus(folder: Path, num_bytes: int, processes: int) -> list[Path]:
    """Writes files of `num_bytes` bytes together."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(max(1, round(num_bytes / FILE_BYTES)))
    with ProcessPoolExecutor(processes) as executor:
        list(executor.map(write_file, [folder] * len(numbers), numbers))
    return [folder / f"{number:04}.jsonl" for number in numbers]


def read_truths(files: Sequence[Path]) -> Iterator[Truth]:
    """Yields the truth about each document, in order."""
    for file in files:
        for value, kind, *others in RECORD.iter_unpack(file.with_suffix(".truth").read_bytes()):
            yield Truth(value, KINDS[kind], *others)
