"""Clusters of documents that are connected by pairs, with the first document of each as its root."""

import numpy as np
import numpy.typing as npt

from titanlike.tools.data.quality.hashing import Hashes, Numbers

Parents = npt.NDArray[np.uint32]  # of each document: itself, or an earlier document of its cluster
BLOCK = 2**20


def link(parents: Parents, first: Numbers, second: Numbers) -> None:
    """Joins the clusters of each pair of documents. Changes `parents`."""
    while len(first):
        first, second = _roots(parents, first), _roots(parents, second)
        differ = first != second
        first, second = first[differ], second[differ]
        low, high = np.minimum(first, second), np.maximum(first, second)
        np.minimum.at(parents, high, low.astype(np.uint32))


def compress(parents: Parents) -> None:
    """Makes every document point at the root of its cluster: its first document."""
    for start in range(0, len(parents), BLOCK):
        parents[start : start + BLOCK] = _roots(parents, parents[start : start + BLOCK].astype(np.int64))


def equal_neighbors(keys: Hashes, documents: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the pairs of documents that share a key: each with the next one. Those with the same key must ascend."""
    order = np.argsort(keys, kind="stable")
    keys, documents = keys[order], documents[order]
    same = keys[1:] == keys[:-1]
    return documents[:-1][same], documents[1:][same]


def _roots(parents: Parents, documents: Numbers) -> Numbers:
    while True:
        above = parents[documents].astype(np.int64)
        if np.array_equal(above, documents):
            return above
        documents = above
