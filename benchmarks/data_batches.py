"""Throughput of batches on one CPU core.

    python -m benchmarks.data_batches --out benchmarks/results/data_batches_cpu.json

Shards of random tokens, larger than the processor's caches, are written first. A process that is pinned to one core then builds
batches, as a data-parallel rank does. The cases alternate, and the table gives the median of all rounds. The files are in the page
cache, so disk reads are not measured.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import script
from benchmarks.common import table as table_of
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import PackedDataset, ShuffledMixture
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import Manifest, Shards
from titanlike.data.tokens.tokenizer import Separator

VOCAB_SIZE, DOCUMENT = 50_257, 800  # tokens; the length is typical of web text
SHARD = 2**26  # tokens


def write_shards(folder: Path, num_shards: int) -> str:
    """Writes shards of random tokens in documents of equal length."""
    folder.mkdir()
    generator, shards = np.random.default_rng(0), []
    for number in range(num_shards):
        writer = ShardWriter(folder, f"train-{number:05}", np.uint16)
        for _ in range(SHARD // DOCUMENT):
            tokens = generator.integers(0, VOCAB_SIZE, DOCUMENT, dtype=np.uint16)
            tokens[-1] = VOCAB_SIZE - 1
            writer.add(tokens)
        shards.append(writer.close())
    Manifest("uint16", {"fingerprint": "x"}, {"train": shards}, {}).write(folder)
    return str(folder)


def build_loader(paths: list[str], seq_len: int, batch: int, *, document_masks: bool = False) -> BatchLoader:
    """Builds the loader of one data-parallel rank of eight, of packed sequences from token shards."""
    datasets = [PackedDataset(Shards(path), seq_len) for path in paths]
    return BatchLoader(
        ShuffledMixture(datasets, [1.0] * len(datasets), seed=0, global_batch_size=8 * batch),
        global_batch_size=8 * batch, local_batch_size=batch, data_rank=3, num_data_ranks=8, seed=0, device=torch.device("cpu"),
        document_separator=Separator(VOCAB_SIZE - 1, closes=True) if document_masks else None,
    )  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns tokens per second of each case and round."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        path = write_shards(Path(folder, "shards"), arguments.shards)
        cases = {
            "8 x 1024": build_loader([path], 1024, 8),
            "8 x 1024, document masks": build_loader([path], 1024, 8, document_masks=True),
            "8 x 1024, mixture of two": build_loader([path, path], 1024, 8),
            "32 x 128": build_loader([path], 128, 32),
            "4 x 8192": build_loader([path], 8192, 4),
            "4 x 8192, document masks": build_loader([path], 8192, 4, document_masks=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        step = 0
        for _ in range(arguments.rounds):
            for name, loader in cases.items():
                tokens, started = 0, time.perf_counter()
                while tokens < 4_000_000:
                    step += 1
                    tokens += sum(batch.labels.numel() for batch in loader.microbatches(step))
                rates[name].append(tokens / (time.perf_counter() - started))
    return {"tokens_in_shards": arguments.shards * SHARD, "tokens_per_second": rates}


def table(measured: dict[str, Any]) -> str:
    """Returns the table of docs/results.md."""
    rows = []
    for name, rates in measured["tokens_per_second"].items():
        low, middle, high = (f"{rate / 1e6:.0f}" for rate in (min(rates), statistics.median(rates), max(rates)))
        rows.append((name, middle, f"{low} to {high}"))
    return table_of(("Sequences x tokens of a rank", "million tokens/s", "all rounds"), rows)


if __name__ == "__main__":
    script(__doc__, measure, table, shards=4, rounds=7)
