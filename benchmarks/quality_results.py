"""Compares what data preparation kept with the truth about a corpus, and formats the results of `benchmarks/data_quality.py`."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import quality_corpus
from benchmarks.common import table as table_of
from titanlike.data.tokens.shards import read_manifest

BINS = [0.0, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]  # of the similarity of planted near copies
FALSE = {"fresh", "related"}  # kinds of documents that should be kept


def kept_hashes(out: Path) -> Iterator[int]:
    """Yields the hash of each document of a folder of byte tokens."""
    for shard in read_manifest(str(out)).splits["train"]:
        tokens = np.memmap(out / f"{shard.name}.tokens", "<u2", "r")
        ends = np.fromfile(out / f"{shard.name}.documents", "<i8").reshape(-1, 2)[:, 0].tolist()
        begin = 0
        for end in ends:
            yield quality_corpus.hash_of(tokens[begin : end - 1].astype(np.uint8).tobytes())
            begin = end


def evaluate(files: Sequence[Path], kept: Iterator[int]) -> dict[str, Any]:
    """Compares the documents that were kept with the truth. Which document of a cluster of copies is kept makes no difference."""
    rest = Counter(kept)
    documents, removed, sizes = Counter[str](), Counter[str](), Counter[str]()
    bins = defaultdict[float, list[int]](lambda: [0, 0])
    lost, swapped = (
        set[int](),
        0,
    )  # clusters whose original was removed, and those of which a copy was kept in its place
    for truth in quality_corpus.read_truths(files):
        documents[truth.kind] += 1
        sizes[truth.kind] += truth.num_bytes
        found = not rest[truth.hash]
        if not found:
            rest[truth.hash] -= 1
        if truth.kind == "fresh" and found:
            lost.add(truth.cluster)
        elif truth.kind in ("exact", "near") and not found and truth.cluster in lost:
            lost.remove(truth.cluster)
            removed["fresh"] -= 1
            found = True
            swapped += 1
        removed[truth.kind] += found
        if truth.kind == "near":
            counts = bins[max(each for each in BINS if each <= truth.similarity)]
            counts[0] += 1
            counts[1] += found
    copies = [kind for kind in documents if kind not in FALSE and kind != "near"]
    similar = [sum(counts[i] for start, counts in bins.items() if start >= 0.8) for i in (0, 1)]
    wrong, right = (
        sum(removed[kind] for kind in documents if (kind in FALSE) == is_wrong) for is_wrong in (True, False)
    )
    return {
        "documents": dict(documents),
        "bytes_of_kinds": dict(sizes),
        "removed": dict(removed),
        "near_copies": [
            {"similarity": low, "planted": planted, "removed": found} for low, (planted, found) in sorted(bins.items())
        ],
        "recall_near_from_0.8": similar[1] / max(similar[0], 1),
        "recall_others": {kind: removed[kind] / documents[kind] for kind in copies},
        "wrongly_removed": wrong,
        "copies_kept_in_place_of_originals": swapped,
        "precision": right / max(right + wrong, 1),
        "unknown_texts": sum(rest.values()),  # documents of the output that are no clean document of the corpus
    }


def evaluate_duplicates(files: Sequence[Path], kept: Iterator[int]) -> dict[str, Any]:
    """Like `evaluate`, for texts from which no lines were removed: the truth about them is taken from the files."""
    hashes = Counter(kept)
    clean: list[int] = []
    for file in files:
        for line, truth in zip(file.open(), quality_corpus.read_truths([file]), strict=True):
            value = quality_corpus.hash_of(json.loads(line)["text"].encode())
            if hashes[value]:
                hashes[value] -= 1
                clean.append(truth.hash)
    found = evaluate(files, iter(clean))
    names = (
        "near_copies",
        "recall_near_from_0.8",
        "recall_others",
        "wrongly_removed",
        "precision",
        "copies_kept_in_place_of_originals",
    )
    return {name: found[name] for name in names}


def table(result: dict[str, Any]) -> str:
    """Returns the tables of docs/results.md."""
    found = result["all"]["found"]
    planted = []
    for kind, number in found["documents"].items():
        removed = found["removed"].get(kind, 0)
        planted += [(kind, f"{number:,}", f"{removed:,}", f"{removed / number:.4f}")] if kind != "near" else []
    for row, following in zip(found["near_copies"], [*found["near_copies"][1:], {"similarity": 1.0}], strict=True):
        label = f"near copies, similarity {row['similarity']:.2f} to {following['similarity']:.2f}"
        planted.append((label, f"{row['planted']:,}", f"{row['removed']:,}", f"{row['removed'] / row['planted']:.3f}"))
    names = {
        "without_stages": "no stage", "tenth": "all stages", "all": "all stages", "largest_unit": "all stages, one work unit"
    }  # fmt: skip
    times = []
    for name, label in names.items():
        row = result[name]
        passes = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in row["seconds_of_passes"].items())
        cpu = row["cpu_seconds"] / row["bytes"] * 1e9
        cells = (f"{row['bytes'] / 1e9:.2g} GB, {label}", f"{row['seconds']:,.0f}", f"{cpu:.0f}", passes)
        times.append((*cells, f"{row['memory']['all_mib']:,.0f} MiB"))
    tables = [
        table_of(("Planted", "Documents", "Removed", "Recall"), planted),
        table_of(("Text", "Seconds", "CPU seconds per GB", "Seconds of the passes", "Peak of all processes"), times),
    ]
    if "peer" in result:
        peers = []
        for name in ("datatrove", "titanlike"):
            row = result["peer"][name]
            recall, precision = row["found"]["recall_near_from_0.8"], row["found"]["precision"]
            cells = (name, f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}", f"{recall:.3f}", f"{precision:.5f}")
            peers.append(cells)
        tables.append(table_of(("Program", "Seconds", "CPU seconds", "Recall from 0.8", "Precision"), peers))
    good = ((name, f"{row['texts']:,}", row["removed"]) for name, row in result["good_texts"].items())
    return "\n\n".join([*tables, table_of(("Good text", "Texts", "Removed"), good)])
