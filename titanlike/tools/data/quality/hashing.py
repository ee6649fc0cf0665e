"""Hashes of the words and shingles of texts, and MinHash, computed by numpy over a batch of texts. They depend on the text only.

A text is UTF-8. The hash of a range of bytes is a polynomial modulo 2**64 in a fixed odd base. Its coefficients are random numbers,
one for each of the 256 byte values. A prefix sum over the batch gives every range by one subtraction, whatever its length.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

GROUP = 2**17  # bytes of short texts that are hashed at once: the arrays stay in the cache
PIECE = 2**18  # bytes of a longer text that are hashed at once; bounds the memory and the tables
SHINGLE = 5  # words
BANDS, ROWS = (
    14,
    8,
)  # as FineWeb: a pair with similarity 0.75 shares a band with probability 0.77, one with 0.8 with 0.92

_SEPARATOR, _WORD, _SINGLE = 0, 1, 2
_SINGLE_LEADS = [*range(0xE3, 0xEA), 0xF0]  # first bytes of Chinese and Japanese characters and of symbols: a word each
# Two-byte prefixes, and the third bytes, of punctuation and spaces beyond ASCII.
_PUNCTUATION = {
    (0xE2, 0x80): (0x80, 0xBF),  # general punctuation
    (0xE2, 0x81): (0x80, 0x9F),
    (0xE3, 0x80): (0x80, 0x9F),  # Chinese and Japanese punctuation
    (0xEF, 0xBC): (0x81, 0x8F),  # fullwidth forms
}
# Thai, Lao, Burmese and Khmer are written without spaces between words, too.
_UNSPACED = {0xE0: (0xB8, 0xB9, 0xBA, 0xBB), 0xE1: (0x80, 0x81, 0x9E, 0x9F)}  # the second bytes, by the first


class Words(NamedTuple):
    """Values of the words or shingles of several texts, one text after the other."""

    hashes: Hashes  # (W,)
    ends: Numbers  # (N,) index after the last one of each text


class _Tables(NamedTuple):
    classes: bytes  # class of each byte
    coefficients: Hashes  # (256,) of each byte, the same for upper and lower case
    powers: Hashes  # (PIECE + 1,)
    inverse_powers: Hashes


@cache
def _tables() -> _Tables:
    classes = bytearray([_SEPARATOR] * 128 + [_WORD] * 128)
    for byte in range(128):
        if chr(byte).isalnum():
            classes[byte] = _WORD
    for byte in _SINGLE_LEADS:
        classes[byte] = _SINGLE
    coefficients = mix(np.arange(1, 257, dtype=np.uint64))
    coefficients[ord("A") : ord("Z") + 1] = coefficients[ord("a") : ord("z") + 1]
    base = 0x9E3779B97F4A7C15
    powers, inverse = (
        np.cumprod(np.array([1] + [factor] * (2 * PIECE), np.uint64), dtype=np.uint64)
        for factor in (base, pow(base, -1, 2**64))
    )
    return _Tables(bytes(classes), coefficients, powers, inverse)


def mix(values: Hashes) -> Hashes:
    """Returns a bijective hash of each value, whose bits all depend on all bits (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


def pieces(content: bytes) -> list[bytes]:
    """Splits a long text into pieces that are hashed one by one, between lines or words if it has any."""
    if len(content) <= PIECE:
        return [content]
    found, start = [], 0
    while len(content) - start > PIECE:
        middle, limit = start + PIECE // 2, start + PIECE
        end = (content.rfind(b"\n", middle, limit) + 1) or (content.rfind(b" ", middle, limit) + 1) or limit
        found.append(content[start:end])
        start = end
    return [*found, content[start:]]


def words_of(contents: Sequence[bytes]) -> Words:
    """Returns the hashes of the words of each text: runs of letters and digits, without regard to the case of ASCII letters.

    In scripts without spaces between words, each character is a word.
    """
    split = [pieces(content) for content in contents]
    found = [_hash_words(batch) for batch in _batches([piece for each in split for piece in each])]
    counts = np.concatenate([np.diff(words.ends, prepend=0) for words in found])  # of each piece
    first = np.cumsum([0, *map(len, split)])[:-1]  # piece of each text
    return Words(np.concatenate([words.hashes for words in found]), np.cumsum(np.add.reduceat(counts, first)))


def _batches(parts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yields the pieces that are hashed at once: `GROUP` bytes, or one piece."""
    batch: list[bytes] = []
    size = 0
    for piece in parts:
        if batch and size + len(piece) + 1 > GROUP:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece) + 1
    yield batch


def _hash_words(contents: Sequence[bytes]) -> Words:
    """Returns the hashes of the words of texts that are not long."""
    tables = _tables()
    joined = b"\n".join(contents) + b"\n"
    codes = np.frombuffer(bytearray(joined.translate(tables.classes)), np.uint8)
    content = np.frombuffer(joined, np.uint8)
    if not joined.isascii():
        _classify_characters(content, codes)
    is_word = codes != _SEPARATOR  # the last byte is a line break
    boundaries = np.flatnonzero(np.diff(is_word, prepend=False))
    starts, ends = boundaries[::2], boundaries[1::2]
    singles = np.flatnonzero(codes == _SINGLE)
    if len(singles):
        after = singles + np.where(content[singles] == 0xF0, 4, 3)
        after = after[after < len(content)]
        cuts = np.concatenate([singles, after[is_word[after]]])
        starts = np.union1d(starts, cuts)
        ends = np.union1d(ends, cuts[is_word[cuts - 1] & (cuts > 0)])
    hashes = _ranges(content, starts, ends)
    text_ends = np.cumsum([len(each) + 1 for each in contents])
    return Words(hashes, np.searchsorted(starts, text_ends))


def shingles_of(words: Words, size: int = SHINGLE) -> Words:
    """Returns the hashes of all sequences of `size` consecutive words. A text with fewer words has one, of all its words."""
    counts = np.diff(words.ends, prepend=0)
    # Zeros behind each text, so that no shingle has words of two texts.
    padded = np.zeros(len(words.hashes) + (size - 1) * len(counts) + size, np.uint64)
    word_positions = np.arange(len(words.hashes)) + (size - 1) * np.repeat(np.arange(len(counts)), counts)
    padded[word_positions] = words.hashes
    num_shingles = np.where(counts >= size, counts - size + 1, np.minimum(counts, 1))
    ends = np.cumsum(num_shingles)
    starts = words.ends - counts + (size - 1) * np.arange(len(counts))  # of the texts in `padded`
    indices = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + num_shingles, num_shingles)
    hashes = padded[indices]
    for offset in range(1, size):
        hashes = hashes * np.uint64(0xD1342543DE82EF95) + padded[indices + offset]
    return Words(mix(hashes), ends)


def select(words: Words, kept: Sequence[bool]) -> Words:
    """Returns the words of some of the texts."""
    counts = np.diff(words.ends, prepend=0)
    return Words(words.hashes[np.repeat(kept, counts)], np.cumsum(counts[np.array(kept, bool)]))


def _classify_characters(content: npt.NDArray[Any], codes: npt.NDArray[np.uint8]) -> None:
    """Corrects the classes of characters whose first byte does not tell."""
    last = len(content) - 3
    for lead in {*_UNSPACED, *(first for first, _ in _PUNCTUATION)}:
        at = np.flatnonzero(content == lead)
        at = at[at <= last]
        for (first, second), (low, high) in _PUNCTUATION.items():
            if first == lead:
                third = content[at + 2]
                found = at[(content[at + 1] == second) & (third >= low) & (third <= high)]
                codes[found] = codes[found + 1] = codes[found + 2] = _SEPARATOR
        for second in _UNSPACED.get(lead, ()):
            codes[at[content[at + 1] == second]] = _SINGLE
    at = np.flatnonzero(content == 0xC2)  # no-break space, quotation marks and other signs
    codes[at] = codes[at[at <= last] + 1] = _SEPARATOR


def _ranges(content: npt.NDArray[np.uint8], starts: Numbers, ends: Numbers) -> Hashes:
    """Returns the hash of each range of bytes, which does not depend on its position."""
    tables = _tables()
    sums = np.empty(len(content) + 1, np.uint64)
    sums[0] = 0
    np.take(tables.coefficients, content, out=sums[1:], mode="clip")
    sums[1:] *= tables.powers[: len(content)]
    np.cumsum(sums[1:], out=sums[1:])
    return mix((sums[ends] - sums[starts]) * tables.inverse_powers[starts])


@cache
def _multipliers() -> npt.NDArray[np.uint32]:
    """Returns odd numbers. A product with one modulo 2**32 permutes the 32-bit shingles, which are uniformly distributed."""
    drawn = mix(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (drawn >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def signatures_of(shingles: Words) -> npt.NDArray[np.uint32]:
    """Returns the smallest permuted shingle of each text, for each permutation (N, BANDS * ROWS). Without shingles, it is the
    largest number."""
    multipliers = _multipliers()
    counts = np.diff(shingles.ends, prepend=0)
    values = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
    signatures = np.full((len(counts), len(multipliers)), np.iinfo(np.uint32).max, np.uint32)
    [filled] = np.nonzero(counts)
    if len(filled):
        starts = (shingles.ends - counts)[filled]
        for number, multiplier in enumerate(multipliers):
            signatures[filled, number] = np.minimum.reduceat(values * multiplier, starts)
    return signatures


def band_keys(signatures: npt.NDArray[np.uint32]) -> Hashes:
    """Returns the key of each band (N, BANDS). Keys of different bands differ."""
    rows = signatures.reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), rows.shape[:2])
    for row in range(ROWS):
        keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + rows[:, :, row])
    return keys
