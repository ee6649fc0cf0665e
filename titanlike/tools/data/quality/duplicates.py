"""Finds exact and near duplicates: each work unit writes the keys of its documents, and a merge joins documents that share one.

Of each cluster of duplicates, the first document in the order of the input is kept. A work unit writes each key once, with the
first of its documents that has it, and how its own documents are connected; so a document with millions of copies needs no more
memory.
"""

import hashlib
import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit
from titanlike.tools.data.quality.candidates import CandidateDocument, read_unit
from titanlike.tools.data.quality.hashing import Hashes, Numbers, shingles_of
from titanlike.tools.data.quality.minhash import band_keys, signatures_of
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import CODES, NUM_EXAMPLES, REASON_OF, Tallies, Verdicts, orders_of
from titanlike.tools.data.quality.runs import merge, write_run
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory

EXACT, BANDS, PARENTS, VERDICTS = (f"{kind}-{{:05d}}" for kind in ("exact", "bands", "parents", "verdicts"))
MERGED, ALL_VERDICTS = "duplicates.json", "verdicts"
MAX_DOCUMENTS = 2**32 - 1
BLOCK = 2**20  # documents

Parents = npt.NDArray[np.uint32]  # of each document: itself, or an earlier document of its cluster


@dataclass
class Merged:
    """The duplicates among all documents."""

    offsets: list[int]  # index of the first document of each work unit among all
    exact: int
    near: int
    examples: dict[str, list[list[list[int]]]]
    """For each reason, pairs of a duplicate and the document that is kept for it: each a work unit and a position in it."""


def find_keys(unit: WorkUnit, job: WorkerOptions, report: ReportProgress) -> Tallies:
    """Filters the documents of a work unit and writes the keys of those that are kept, and what the merge needs besides."""
    codes, tallies = bytearray(), dict[str, Any]()
    keyed, exact = array("I"), array("Q")
    bands: list[Hashes] = []
    band_documents: list[Numbers] = []
    for group in read_unit(unit, job, None, tallies, report, with_words=job.quality.finds_near_duplicates):
        codes.extend(CODES.get(each.reason, 0) for each in group.documents)
        positions = [each.position for each in group.kept]
        keyed.extend(positions)
        exact.extend(map(_exact_key, group.kept))
        if group.words and job.quality.finds_near_duplicates:
            shingles = shingles_of(group.words)
            [filled] = np.nonzero(np.diff(shingles.ends, prepend=0))
            bands.append(band_keys(signatures_of(shingles)[filled]))
            band_documents.append(np.array(positions, np.int64)[filled])
    verdicts, parents = np.frombuffer(codes, np.uint8), np.arange(len(codes), dtype=np.uint32)
    copies = _connect(job.stages / EXACT.format(unit.number), parents, np.array(exact), np.array(keyed, np.int64))
    verdicts[copies] = CODES["exact_duplicates"]
    if bands:
        documents = np.repeat(np.concatenate(band_documents), bands[0].shape[1])
        _connect(job.stages / BANDS.format(unit.number), parents, np.concatenate(bands).ravel(), documents)
    compress(parents)
    for name, values in ((PARENTS, parents), (VERDICTS, verdicts)):
        atomic_write_text(job.stages / name.format(unit.number), values.tobytes())
    return tallies


def _connect(path: Path, parents: Parents, keys: Hashes, documents: Numbers) -> Numbers:
    """Writes each key with the first document that has it, and joins the clusters of documents that share one. Returns those after
    the first."""
    first, copies = equal_neighbors(keys, documents)
    link(parents, first, copies)
    unique, at = np.unique(keys, return_index=True)  # the documents ascend
    write_run(path, unique, documents[at])
    return copies


def _exact_key(candidate: CandidateDocument) -> int:
    prompt = candidate.document.prompt.encode()
    digest = hashlib.blake2b(candidate.content, digest_size=8, key=hashlib.sha256(prompt).digest() if prompt else b"")
    return int.from_bytes(digest.digest(), "little")


def merge_keys(job: WorkerOptions, num_units: int) -> None:
    """Joins the documents of all work units and writes the verdict on each. Done once."""
    folder, units = job.stages, range(num_units)
    if read_merged(folder):
        return
    counts = [(folder / VERDICTS.format(unit)).stat().st_size for unit in units]
    offsets: Numbers = np.cumsum([0, *counts])
    if offsets[-1] > MAX_DOCUMENTS:
        raise UserError(f"{offsets[-1]:,} documents: --duplicates finds duplicates among at most {MAX_DOCUMENTS:,}")
    # In files that the kernel may write to the disk, for data with more documents than memory has room for.
    size = max(int(offsets[-1]), 1)
    parents = np.memmap(folder / "parents.partial", np.uint32, "w+", shape=(size,))[: offsets[-1]]
    file = np.memmap(folder / f"{ALL_VERDICTS}.partial", np.uint8, "w+", shape=(size,))
    verdicts = file[: offsets[-1]]
    for unit in units:
        unit_range = slice(offsets[unit], offsets[unit + 1])
        parents[unit_range] = np.fromfile(folder / PARENTS.format(unit), np.uint32) + np.uint32(offsets[unit])
        verdicts[unit_range] = np.fromfile(folder / VERDICTS.format(unit), np.uint8)
    for name in (EXACT, BANDS):
        with_keys = [unit for unit in units if (folder / name.format(unit)).exists()]
        starts: Numbers = offsets[np.array(with_keys, np.int64)]
        for part in merge([folder / name.format(unit) for unit in with_keys]):
            first, second = equal_neighbors(part.keys, starts[part.files] + part.numbers)
            link(parents, first, second)
            if name == EXACT:
                verdicts[second] = CODES["exact_duplicates"]
    compress(parents)
    merged = _classify(parents, verdicts, offsets, removes=job.quality.removes_duplicates)
    file.flush()
    (folder / f"{ALL_VERDICTS}.partial").replace(folder / ALL_VERDICTS)
    (folder / "parents.partial").unlink()
    fsync_directory(folder)
    atomic_write_text(folder / MERGED, json.dumps(vars(merged)))


def _classify(parents: Parents, verdicts: Verdicts, offsets: Numbers, *, removes: bool) -> Merged:
    """Counts the duplicates and draws examples. Changes the verdict on them to "near duplicate", or to "kept" unless `removes`."""
    exact, near = CODES["exact_duplicates"], CODES["near_duplicates"]
    counts = {exact: 0, near: 0}
    drawn: dict[int, list[tuple[int, int, int]]] = {exact: [], near: []}
    for start in range(0, len(parents), BLOCK):
        block = slice(start, start + BLOCK)
        own, root, codes = np.arange(start, start + len(parents[block])), parents[block], verdicts[block]
        codes[(codes == 0) & (root != own)] = near
        for code in counts:
            [at] = np.nonzero(codes == code)
            counts[code] += len(at)
            units = np.searchsorted(offsets, own[at], side="right") - 1
            orders = orders_of(units, own[at] - offsets[units])
            best = np.argsort(orders, kind="stable")[:NUM_EXAMPLES]
            found = [(int(orders[i]), int(own[at[i]]), int(root[at[i]])) for i in best]
            drawn[code] = sorted(drawn[code] + found)[:NUM_EXAMPLES]
            if not removes:
                codes[at] = 0

    def place(document: int) -> list[int]:
        unit = int(np.searchsorted(offsets, document, side="right")) - 1
        return [unit, document - int(offsets[unit])]

    examples = {
        REASON_OF[code]: [[place(each), place(root)] for _, each, root in found] for code, found in drawn.items()
    }
    return Merged(offsets.tolist(), counts[exact], counts[near], examples)


def read_merged(folder: Path) -> Merged | None:
    """Returns the result of the merge, or None if it is not finished."""
    path = folder / MERGED
    return Merged(**json.loads(path.read_text())) if path.exists() else None


def read_verdicts(folder: Path, merged: Merged, unit: int) -> Verdicts:
    """Returns the verdict on each document of a work unit."""
    start, stop = merged.offsets[unit : unit + 2]
    return np.fromfile(folder / ALL_VERDICTS, np.uint8, stop - start, offset=start)


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
