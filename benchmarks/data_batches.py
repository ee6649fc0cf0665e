"""Throughput of batches on one CPU core: `python -m benchmarks.data_batches --out FILE.json`.

Shards of random tokens, larger than the processor's caches, are written first. A process that is pinned to one core then builds
batches, as a data-parallel rank does. The cases alternate, and the table gives the median of all rounds. The files are in the page
cache, so disk reads are not measured.

`--baseline FOLDER` compares this checkout with another one instead: each case runs in a process of its own, alternately with
the code of either folder, and the table gives medians of the ratios.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.config.sections import Tokenizer
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import BatchSource, PackedDataset, ShuffledMixture
from titanlike.data.batches.stream import Stream
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import Manifest, Shards
from titanlike.data.tokens.tokenizer import Separator, build_tokenizer

ROOT = Path(__file__).parents[1]
VOCAB_SIZE, DOCUMENT = 50_257, 800  # tokens; the length is typical of web text
SHARD = 2**26  # tokens
# The kind of data, the number of prefetched batches, the number of steps, and whether each step computes for a few ms.
COMPARED = {
    "shards, not prefetched": ("shards", 0, 3000, False),
    "shards, 2 batches prefetched": ("shards", 2, 3000, False),
    "shards, 2 batches prefetched, steps of a few ms": ("shards", 2, 500, True),
    "stream, not prefetched": ("stream", 0, 500, False),
    "stream, 2 batches prefetched": ("stream", 2, 500, False),
    "stream, 2 batches prefetched, steps of a few ms": ("stream", 2, 500, True),
}


def write_shards(folder: Path, num_shards: int, tokens_per_shard: int = SHARD) -> str:
    """Writes shards of random tokens in documents of equal length."""
    folder.mkdir()
    generator, shards = np.random.default_rng(0), []
    for number in range(num_shards):
        writer = ShardWriter(folder, f"train-{number:05}", np.uint16)
        for _ in range(tokens_per_shard // DOCUMENT):
            tokens = generator.integers(0, VOCAB_SIZE, DOCUMENT, dtype=np.uint16)
            tokens[-1] = VOCAB_SIZE - 1
            writer.add(tokens)
        shards.append(writer.close())
    Manifest("uint16", {"fingerprint": "x"}, {"train": shards}, {}).write(folder)
    return str(folder)


def write_text(folder: Path) -> str:
    """Writes 16 files of JSON lines, 64 MB in all."""
    folder.mkdir()
    line = json.dumps({"text": "words of a document " * 200})
    for number in range(16):
        (folder / f"{number:02}.jsonl").write_text(f"{line}\n" * 1000)
    return str(folder)


def build_loader(source: BatchSource, batch: int, *, document_masks: bool = False) -> BatchLoader:
    """Builds the loader of one data-parallel rank of eight."""
    return BatchLoader(
        source, global_batch_size=8 * batch, local_batch_size=batch, data_rank=3, num_data_ranks=8, seed=0,
        device=torch.device("cpu"), document_separator=Separator(VOCAB_SIZE - 1, closes=True) if document_masks else None,
    )  # fmt: skip


def shard_loader(paths: list[str], seq_len: int, batch: int, *, document_masks: bool = False) -> BatchLoader:
    """Builds a loader of packed sequences from token shards."""
    datasets = [PackedDataset(Shards(path), seq_len) for path in paths]
    source = ShuffledMixture(datasets, [1.0] * len(datasets), seed=0, global_batch_size=8 * batch)
    return build_loader(source, batch, document_masks=document_masks)


def stream_loader(path: str, seq_len: int, batch: int) -> BatchLoader:
    """Builds a loader of text that two threads tokenize into bytes."""
    source = Stream(
        [list_files(path)], [1.0], build_tokenizer(Tokenizer()), fields=Fields(), seq_len=seq_len,
        global_batch_size=8 * batch, seed=0, workers=2,
    )  # fmt: skip
    return build_loader(source, batch)


def measure_shards(num_shards: int, rounds: int) -> dict[str, list[float]]:
    """Returns tokens per second of each case and round."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        path = write_shards(Path(folder, "shards"), num_shards)
        cases = {
            "8 x 1024": shard_loader([path], 1024, 8),
            "8 x 1024, document masks": shard_loader([path], 1024, 8, document_masks=True),
            "8 x 1024, mixture of two": shard_loader([path, path], 1024, 8),
            "32 x 128": shard_loader([path], 128, 32),
            "4 x 8192": shard_loader([path], 8192, 4),
            "4 x 8192, document masks": shard_loader([path], 8192, 4, document_masks=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        step = 0
        for _ in range(rounds):
            for name, loader in cases.items():
                tokens, started = 0, time.perf_counter()
                while tokens < 4_000_000:
                    step += 1
                    tokens += sum(batch.labels.numel() for batch in loader.microbatches(step))
                rates[name].append(tokens / (time.perf_counter() - started))
    return rates


def measure_case(name: str) -> dict[str, float]:
    """Returns the throughput, the CPU time and the peak memory of a case, read by this process."""
    torch.set_num_threads(1)
    kind, num_prefetched, steps, computes = COMPARED[name]
    matrix = torch.ones(512, 512)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "shards":
            loader = shard_loader([write_shards(Path(folder, "shards"), 2, 2**22)], 1024, 8)
        else:
            loader = stream_loader(write_text(Path(folder, "text")), 1024, 8)
        tokens, cpu, started = 0, time.process_time(), time.perf_counter()
        with loader.prefetch(num_prefetched, 1, steps):
            for step in range(1, steps + 1):
                tokens += sum(batch.labels.numel() for batch in loader.microbatches(step))
                if computes:
                    _ = matrix @ matrix
        seconds = time.perf_counter() - started
    return {
        "tokens_per_second": tokens / seconds,
        "cpu_seconds_per_million_tokens": (time.process_time() - cpu) / tokens * 1e6,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def compare(baseline: Path, rounds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Returns the measurements of each case: by the code in `baseline` and by this checkout, in turns."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {n: {"baseline": [], "current": []} for n in COMPARED}
    for number in range(rounds):
        for name, measured in found.items():
            checkouts = [("baseline", baseline), ("current", ROOT)]
            for checkout, folder in checkouts[:: -1 if number % 2 else 1]:
                done = subprocess.run(
                    [sys.executable, __file__, "--case", name], env=os.environ | {"PYTHONPATH": str(folder)}, check=True,
                    capture_output=True, text=True,
                )  # fmt: skip
                measured[checkout].append(json.loads(done.stdout))
    return found


def table(report: dict[str, Any]) -> str:
    """Formats the table of the documentation."""
    if "tokens_per_second" in report:
        lines = ["| Sequences x tokens of a rank | million tokens/s | all rounds |", "|---|---|---|"]
        for name, rates in report["tokens_per_second"].items():
            low, middle, high = (f"{rate / 1e6:.0f}" for rate in (min(rates), statistics.median(rates), max(rates)))
            lines.append(f"| {name} | {middle} | {low} to {high} |")
        return "\n".join(lines)
    lines = [
        "| Case | threads: million tokens/s | torchdata: million tokens/s | ratio | CPU time: ratio | peak memory: ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, measured in report["compared"].items():

        def median(key: str, pick: Callable[[float, float], float], measured: Any = measured) -> float:
            rounds = zip(measured["baseline"], measured["current"], strict=True)
            return statistics.median(pick(old[key], new[key]) for old, new in rounds)

        rates = [median("tokens_per_second", pick) / 1e6 for pick in (lambda old, _: old, lambda _, new: new)]
        ratios = [median(key, lambda old, new: new / old) for key in measured["current"][0]]
        lines.append(f"| {name} | " + " | ".join([f"{r:.1f}" for r in rates] + [f"{r:.2f}" for r in ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shards", type=int, default=4, help="number of shards of 67 million tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--baseline", type=Path, help="another checkout to compare with")
    parser.add_argument("--case", choices=COMPARED, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure_case(arguments.case)))
        return
    report: dict[str, Any] = {"torch": torch.__version__, "numpy": np.__version__}
    if arguments.baseline:
        report |= {"machine": f"{os.cpu_count()} cores", "torchdata": version("torchdata")}
        report["compared"] = compare(arguments.baseline, arguments.rounds)
    else:
        report |= {"machine": f"1 of {os.cpu_count()} cores", "tokens_in_shards": arguments.shards * SHARD}
        report["tokens_per_second"] = measure_shards(arguments.shards, arguments.rounds)
    print(table(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
