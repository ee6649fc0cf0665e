"""How fast one core makes batches of token shards: `python -m benchmarks.data_batches --out FILE.json`.

Shards of random tokens are written first, larger than the processor's caches. Then a process that is kept to one core makes
batches, as a data rank does; the kinds take turns, and the median of all rounds counts. The files are in the system's cache:
what the disk adds is not measured.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.data.loader import BatchLoader
from titanlike.data.packed_dataset import PackedDataset, ShuffledMixture
from titanlike.data.text.tokenizer import Separator
from titanlike.data.token_shards import Manifest, Shards, ShardWriter

VOCABULARY, DOCUMENT = 50_257, 800  # tokens, about as in web text
SHARD = 2**26  # tokens


def write(folder: Path, num_shards: int) -> str:
    """Shards of random tokens, a document as long as another."""
    folder.mkdir()
    generator, shards = np.random.default_rng(0), []
    for number in range(num_shards):
        writer = ShardWriter(folder, f"train-{number:05}", np.uint16)
        for _ in range(SHARD // DOCUMENT):
            tokens = generator.integers(0, VOCABULARY, DOCUMENT, dtype=np.uint16)
            tokens[-1] = VOCABULARY - 1
            writer.add(tokens)
        shards.append(writer.close())
    Manifest("uint16", {"fingerprint": "x"}, {"train": shards}, {}).write(folder)
    return str(folder)


def make(places: list[str], seq_len: int, batch: int, *, document_masks: bool = False) -> BatchLoader:
    """BatchLoader of one data rank of eight."""
    windows = [PackedDataset(Shards(place), seq_len) for place in places]
    feed = ShuffledMixture(windows, [1.0] * len(windows), seed=0, global_batch_size=8 * batch)
    return BatchLoader(
        feed, global_batch_size=8 * batch, local_batch_size=batch, data_rank=3, num_data_ranks=8, seed=0,
        device=torch.device("cpu"), document_separator=Separator(VOCABULARY - 1, closes=True) if document_masks else None,
    )  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The table of the documents."""
    lines = ["| Sequences x tokens of a rank | million tokens/s | all rounds |", "|---|---|---|"]
    for name, found in report["tokens_per_second"].items():
        low, middle, high = (f"{rate / 1e6:.0f}" for rate in (min(found), statistics.median(found), max(found)))
        lines.append(f"| {name} | {middle} | {low} to {high} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shards", type=int, default=4, help="of 67 million tokens")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder, "shards"), arguments.shards)
        kinds = {
            "8 x 1024": make([place], 1024, 8),
            "8 x 1024, documents apart": make([place], 1024, 8, document_masks=True),
            "8 x 1024, mixture of two": make([place, place], 1024, 8),
            "32 x 128": make([place], 128, 32),
            "4 x 8192": make([place], 8192, 4),
            "4 x 8192, documents apart": make([place], 8192, 4, document_masks=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        step = 0
        for _ in range(arguments.rounds):
            for name, batches in kinds.items():
                tokens, started = 0, time.perf_counter()
                while tokens < 4_000_000:
                    step += 1
                    tokens += sum(batch.labels.numel() for batch in batches.microbatches(step))
                rates[name].append(tokens / (time.perf_counter() - started))
    report: dict[str, Any] = {
        "machine": f"1 of {os.cpu_count()} cores", "torch": torch.__version__, "numpy": np.__version__,
        "tokens_in_shards": arguments.shards * SHARD, "tokens_per_second": rates,
    }  # fmt: skip
    print(table(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
