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
from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit, check_unchanged
from titanlike.tools.data.quality.candidates import CandidateDocument, filter_group, grouped, read_candidates, skip_bad
from titanlike.tools.data.quality.forest import Parents, compress, equal_neighbors, link
from titanlike.tools.data.quality.hashing import Hashes, Numbers, mix, shingles_of
from titanlike.tools.data.quality.minhash import band_keys, signatures_of
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import CODES, NUM_EXAMPLES, REASON_OF, Tallies, Verdicts, tallies_to_json
from titanlike.tools.data.quality.runs import merge, write_run
from titanlike.utils.atomic_write import atomic_write_text, atomic_writer, fsync_directory, write_all

RESULT, EXACT, BANDS, PARENTS, VERDICTS = (
    f"{kind}-{{:05d}}" for kind in ("documents", "exact", "bands", "parents", "verdicts")
)
MERGED, ALL_VERDICTS = "duplicates.json", "verdicts"
MAX_DOCUMENTS = 2**32 - 1
BLOCK = 2**20  # documents


@dataclass
class Merged:
    """The duplicates among all documents."""

    offsets: list[int]  # index of the first document of each work unit among all
    exact: int
    near: int
    examples: dict[str, list[list[list[int]]]]
    """For each reason, pairs of a duplicate and the document that is kept for it: each a work unit and a position in it."""


def find_keys(unit: WorkUnit, job: WorkerOptions, report: ReportProgress) -> None:
    """Filters the documents of a work unit and writes the keys of those that are kept, and what the merge needs besides."""
    verdicts, tallies = bytearray(), dict[str, Any]()
    keyed, exact = array("I"), array("Q")
    bands: list[Hashes] = []
    band_documents: list[Numbers] = []
    for span in unit.spans:
        unread = span.size
        for group in grouped(read_candidates(span, job, len(verdicts), skip_bad(job))):
            filtered = filter_group(
                group, unit.number, job.quality, tallies, with_words=job.quality.finds_near_duplicates
            )
            verdicts.extend(CODES[reason] if reason else 0 for reason in filtered.reasons)
            positions = [candidate.position for candidate in filtered.kept]
            keyed.extend(positions)
            exact.extend(map(_exact_key, filtered.kept))
            if filtered.words and job.quality.finds_near_duplicates:
                shingles = shingles_of(filtered.words)
                [filled] = np.nonzero(np.diff(shingles.ends, prepend=0))
                bands.append(band_keys(signatures_of(shingles)[filled]))
                band_documents.append(np.array(positions, np.int64)[filled])
            read = min(sum(candidate.document.size for candidate in group), unread)
            unread -= read
            report(read, 0)
        check_unchanged(span.file)
        report(unread, 0)
    _write(unit.number, job, verdicts, tallies, (keyed, exact), bands, band_documents)


def _write(
    unit: int,
    job: WorkerOptions,
    verdicts: bytearray,
    tallies: Tallies,
    keys: tuple[Any, Any],
    bands: Any,
    band_documents: Any,
) -> None:
    folder, codes = job.stages, np.frombuffer(verdicts, np.uint8)
    parents: Parents = np.arange(len(codes), dtype=np.uint32)
    documents: Numbers = np.array(keys[0], np.int64)
    exact: Hashes = np.array(keys[1], np.uint64)
    first, copies = equal_neighbors(exact, documents)
    codes[copies] = CODES["exact_duplicates"]
    link(parents, first, copies)
    _write_keys(folder / EXACT.format(unit), exact, documents)
    if bands:
        key_documents = np.repeat(np.concatenate(band_documents), bands[0].shape[1])
        near = np.concatenate(bands).ravel()
        link(parents, *equal_neighbors(near, key_documents))
        _write_keys(folder / BANDS.format(unit), near, key_documents)
    compress(parents)
    for name, values in ((PARENTS, parents), (VERDICTS, codes)):
        with atomic_writer(folder / name.format(unit)) as file:
            write_all(file, values.tobytes())
    fsync_directory(folder)
    atomic_write_text(
        folder / f"{RESULT.format(unit)}.json",
        json.dumps({"documents": len(codes), "tallies": tallies_to_json(tallies)}),
    )


def _write_keys(path: Path, keys: Hashes, documents: Numbers) -> None:
    """Writes each key with the first document that has it."""
    unique, first = np.unique(keys, return_index=True)  # the documents ascend
    write_run(path, unique, documents[first].astype(np.uint32))


def _exact_key(candidate: CandidateDocument) -> int:
    prompt = candidate.document.prompt.encode()
    digest = hashlib.blake2b(candidate.content, digest_size=8, key=hashlib.sha256(prompt).digest() if prompt else b"")
    return int.from_bytes(digest.digest(), "little")


def read_result(folder: Path, unit: int) -> dict[str, Any] | None:
    """Returns what a work unit found, or None if it is not finished."""
    try:
        found: dict[str, Any] = json.loads((folder / f"{RESULT.format(unit)}.json").read_text())
        count = found["documents"]
        sizes = ((folder / name.format(unit)).stat().st_size for name in (PARENTS, VERDICTS))
        return found if list(sizes) == [4 * count, count] else None
    except (OSError, ValueError, KeyError):
        return None


def merge_keys(job: WorkerOptions, num_units: int) -> Merged:
    """Joins the documents of all work units and writes the verdict on each. Done once."""
    folder, quality = job.stages, job.quality
    merged = read_merged(folder)
    if merged:
        return merged
    units = range(num_units)
    counts = [result["documents"] for unit in units if (result := read_result(folder, unit))]
    assert len(counts) == num_units
    offsets = np.cumsum([0, *counts])
    if offsets[-1] > MAX_DOCUMENTS:
        raise UserError(f"{offsets[-1]:,} documents: --duplicates finds duplicates among at most {MAX_DOCUMENTS:,}")
    # In files that the kernel may write to the disk, for data with more documents than memory has room for.
    parents = _array(folder / "parents.partial", np.uint32, int(offsets[-1]))
    verdicts = _array(folder / f"{ALL_VERDICTS}.partial", np.uint8, int(offsets[-1]))
    for unit in units:
        unit_range = slice(offsets[unit], offsets[unit + 1])
        parents[unit_range] = np.fromfile(folder / PARENTS.format(unit), np.uint32) + np.uint32(offsets[unit])
        verdicts[unit_range] = np.fromfile(folder / VERDICTS.format(unit), np.uint8)
    for name in [EXACT, BANDS] if quality.finds_near_duplicates else [EXACT]:
        paths = [folder / name.format(unit) for unit in units if (folder / name.format(unit)).exists()]
        starts = np.array([offsets[unit] for unit in units if (folder / name.format(unit)).exists()], np.int64)
        for part in merge(paths):
            first, second = equal_neighbors(part.keys, starts[part.files] + part.numbers)
            link(parents, first, second)
            if name == EXACT:
                verdicts[second] = CODES["exact_duplicates"]
    compress(parents)
    merged = _classify(parents, verdicts, offsets, removes=quality.removes_duplicates)
    if isinstance(verdicts, np.memmap):  # not without documents
        verdicts.flush()
    (folder / f"{ALL_VERDICTS}.partial").replace(folder / ALL_VERDICTS)
    (folder / "parents.partial").unlink()
    fsync_directory(folder)
    atomic_write_text(folder / MERGED, json.dumps(vars(merged)))
    return merged


def _array(path: Path, dtype: Any, size: int) -> npt.NDArray[Any]:
    with path.open("wb") as file:
        file.truncate(max(size, 1) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=(size,)) if size else np.zeros(0, dtype)


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
            orders = _orders(units, own[at] - offsets[units])
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


def _orders(units: Numbers, positions: Numbers) -> Hashes:
    """Returns `order_of` of many documents."""
    return mix(units.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64)) >> np.uint64(1)


def read_merged(folder: Path) -> Merged | None:
    """Returns the result of the merge, or None if it is not finished."""
    try:
        return Merged(**json.loads((folder / MERGED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_verdicts(folder: Path, merged: Merged, unit: int) -> Verdicts:
    """Returns the verdict on each document of a work unit."""
    start, stop = merged.offsets[unit : unit + 2]
    return np.fromfile(folder / ALL_VERDICTS, np.uint8, stop - start, offset=start)
