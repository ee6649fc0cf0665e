"""Hashes of words and shingles, MinHash and the merge of keys, against plain Python."""

import random
from itertools import pairwise

import numpy as np
import pytest

from titanlike.tools.data.quality.duplicates import copies_of, link, roots
from titanlike.tools.data.quality.hashing import (
    BANDS,
    ROWS,
    Words,
    band_keys,
    shingles_of,
    signatures_of,
    words_of,
)


def split(words: Words) -> list[list[int]]:
    return [words.hashes[start:end].tolist() for start, end in pairwise([0, *words.ends.tolist()])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World -- hello\tworld", "hello world hello world"),
        ("", ""),
        (" .,! ", ""),
        ("a_b1 c's", "a b1 c s"),
        ("«été» “fin”… l\u00a0an", "été fin l an"),
        ("今天天气,好 ok", "今 天 天 气 好 ok"),
        ("ひらがな。カ「タ」", "ひ ら が な カ タ"),
        ("สวัสดี a", "ส ว ั ส ด ี a"),
        ("한국어 문장", "한국어 문장"),
        ("go 🎉🎉now", "go 🎉 🎉 now"),
    ],
)
def test_words_of_a_text(text: str, expected: str) -> None:
    [found], words = split(words_of([text.encode()])), expected.split()
    assert found == [split(words_of([word.encode()]))[0][0] for word in words]
    assert len(set(found)) == len(set(words))


def random_texts(rng: random.Random, count: int) -> list[str]:
    return [" ".join(rng.choices("abcdefgh", k=rng.choice([0, 1, 3, 4, 5, 6, 300]))) for _ in range(count)]


def test_signatures_estimate_the_similarity() -> None:
    rng = np.random.default_rng(0)
    errors = []
    for shared in (0, 50, 200, 350, 400):
        # Two sets of 400 values, `shared` of which are the same.
        both = np.array([rng.integers(0, 2**63, 400, dtype=np.uint64) for _ in range(2)])
        both[1, :shared] = both[0, :shared]
        first, second = signatures_of(Words(both.ravel(), np.array([400, 800])))
        errors.append(np.mean(first == second) - shared / (800 - shared))
    assert np.abs(errors).max() < 0.12  # 2.5 standard deviations of 112 drawn permutations
    assert errors[0] == errors[-1] == 0


def test_signature_does_not_depend_on_the_other_texts() -> None:
    texts = [*random_texts(random.Random(2), 40), " ".join(map(str, range(20_000))), "", "last one"]
    together = signatures_of(shingles_of(words_of([text.encode() for text in texts])))
    for text, signature in zip(texts, together, strict=True):
        assert (signatures_of(shingles_of(words_of([text.encode()])))[0] == signature).all()
    keys = band_keys(together)
    assert keys.shape == (len(texts), BANDS)
    changed = together.copy()
    changed[:, ROWS] ^= 1  # of the second band
    assert ((band_keys(changed) != keys) == (np.arange(BANDS) == 1)).all()


def test_clusters_against_a_search() -> None:
    rng = np.random.default_rng(0)
    parents = np.arange(300, dtype=np.uint32)
    pairs = rng.integers(0, 300, (160, 2))
    neighbors: dict[int, set[int]] = {number: {number} for number in range(300)}
    for chunk in np.split(pairs, 4):
        link(parents, *chunk.T)
    for first, second in pairs.tolist():
        joined = neighbors[first] | neighbors[second]
        for member in joined:
            neighbors[member] = joined
    assert roots(parents, np.arange(300)).tolist() == [min(neighbors[number]) for number in range(300)]
    first, copies = copies_of(np.array([7, 3, 7, 7, 3], np.uint64), np.arange(5))
    assert list(zip(first.tolist(), copies.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 4)]
