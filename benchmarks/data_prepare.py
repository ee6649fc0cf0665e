"""Measures the throughput of `titanlike data prepare` relative to the tokenizer libraries, and its memory.

    python -m benchmarks.data_prepare --out benchmarks/results/data_prepare_cpu.json
    python -m benchmarks.data_prepare --table benchmarks/results/data_prepare_cpu.json        the tables of the documentation

The text is Python's standard library, one record per file, repeated up to the size. The tokenizers are trained on it, with the same
merges as a rank file for tiktoken and as a tokenizer.json for Hugging Face's tokenizers. A round of a library encodes records from
memory with as many threads as the command has processes, and discards the tokens. A round of the command includes process startup,
reading and parsing the file, encoding, hashing, writing and fsync. Rounds alternate; a ratio compares two adjacent rounds.

Memory is measured with a limit of `LIMIT` bytes per process (RLIMIT_DATA), so that a process that held a complete file would fail.
The result is the largest sum of the resident sizes of all processes; shared pages are counted once per process.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, cpu_seconds, peak_memory, script
from benchmarks.common import table as table_of
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.tokens.shards import read_manifest, totals
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.tools.data.train_tokenizer import train

BATCH = 512  # records per call of a library
LIMIT = 256 * 2**20  # bytes per process while memory is measured: less than the larger files


def write_corpus(path: Path, size: int) -> list[str]:
    """Writes a JSONL file of at least `size` bytes. Returns its texts."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    sources = [text for file in files if (text := file.read_text(errors="replace"))]
    texts = []
    with path.open("w") as stream:
        while stream.tell() < size:
            text = sources[len(texts) % len(sources)]
            texts.append(text)
            stream.write(json.dumps({"text": text, "id": len(texts)}) + "\n")
    return texts


def library_round(encoding: Path, texts: list[str], threads: int) -> Callable[[], int]:
    """Returns a function that encodes all texts with the library and returns the number of tokens."""
    codec: Any = build_tokenizer(Section(encoding=str(encoding))).codec
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    if encoding.suffix == ".json":
        return lambda: sum(
            len(one) for batch in batches for one in codec.tokenizer.encode_batch(batch, add_special_tokens=False)
        )
    return lambda: sum(
        len(one) for batch in batches for one in codec.encoding.encode_ordinary_batch(batch, num_threads=threads)
    )


def measure_speed(folder: Path, encoding: Path, size: int, workers: int, rounds: int) -> dict[str, Any]:
    """Measures rounds of the library and of the command, and their ratios."""
    corpus, out = folder / "corpus.jsonl", folder / "out"
    texts = write_corpus(corpus, size)
    library = library_round(encoding, texts, workers)
    rounds_done: list[dict[str, float]] = []
    for number in range(rounds + 1):  # the first is a warm-up
        figures: dict[str, float] = {}
        for who in ("library", "titanlike") if number % 2 else ("titanlike", "library"):
            start_time, start_cpu = time.perf_counter(), cpu_seconds()
            if who == "library":
                tokens = library()
            else:
                assert start(corpus, out, encoding, workers).wait() == 0
                manifest = read_manifest(str(out))
                tokens, documents = totals(manifest.splits["train"])
                tokens -= documents  # the library adds no EOS tokens
            figures[who] = tokens / (time.perf_counter() - start_time)
            figures[f"{who}_of_cpu"] = tokens / (cpu_seconds() - start_cpu)
            figures[f"{who}_tokens"] = tokens
        shutil.rmtree(out)
        assert figures["library_tokens"] == figures["titanlike_tokens"], figures
        print(json.dumps(figures), flush=True)
        rounds_done.append(figures)
    rounds_done = rounds_done[1:]
    return {
        "corpus_bytes": corpus.stat().st_size,
        "tokens": int(rounds_done[0]["library_tokens"]),
        "workers": workers,
        "turns": rounds_done,
        "tokens_per_second": {
            who: statistics.median(figures[who] for figures in rounds_done) for who in ("library", "titanlike")
        },
        "ratio": ratio(rounds_done, ""),
        "ratio_of_cpu": ratio(rounds_done, "_of_cpu"),  # tokens per CPU second: less sensitive to other load
    }


def ratio(rounds_done: list[dict[str, float]], kind: str) -> dict[str, float]:
    """Returns statistics of the ratios of adjacent rounds."""
    found = [figures[f"titanlike{kind}"] / figures[f"library{kind}"] for figures in rounds_done]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def start(corpus: Path, out: Path, encoding: Path, workers: int, limit: int = 0) -> "subprocess.Popen[bytes]":
    """Starts the command, with a memory limit for each of its processes if `limit` is not 0."""

    def restrict() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    arguments = [str(corpus), "--out", str(out), "--tokenizer", str(encoding), "--workers", str(workers)]
    command = [sys.executable, "-m", "titanlike.tools.cli.main", "data", "prepare", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=restrict)


def measure_memory(folder: Path, encoding: Path, sizes: list[int], workers: int) -> list[dict[str, Any]]:
    """Measures the peak memory of the command for JSONL files and text files of several sizes."""
    found = []
    for size in sizes:
        texts = write_corpus(folder / "corpus.jsonl", size)
        with (folder / "corpus.txt").open("w") as stream:
            for text in texts:
                stream.write(text)
        del texts
        row: dict[str, Any] = {"corpus_bytes": size, "limit_bytes": LIMIT}
        for kind in ("jsonl", "txt"):
            process = start(folder / f"corpus.{kind}", folder / "out", encoding, workers, LIMIT)
            row[kind] = {"all_mib": peak_memory(process)}
            shutil.rmtree(folder / "out")
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def table(measured: dict[str, Any]) -> str:
    """Returns the tables of docs/data.md."""
    speed, memory = [], []
    for name, row in measured["speed"].items():
        rates = (f"{row['tokens_per_second'][who]:,.0f}" for who in ("library", "titanlike"))
        ratios = (
            f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            for one in (row["ratio"], row["ratio_of_cpu"])
        )
        speed.append((name, f"{row['corpus_bytes'] / 1e6:,.0f} MB", *rates, *ratios))
    for row in measured["memory"]:
        sizes = (row["limit_bytes"] / 2**20, row["jsonl"]["all_mib"], row["txt"]["all_mib"])
        memory.append((f"{row['corpus_bytes'] / 1e6:,.0f} MB", *(f"{size:,.0f} MiB" for size in sizes)))
    heads = ("Tokenizer", "Text", "Library, tokens/s", "`prepare`, tokens/s", "Ratio", "Ratio of tokens per CPU second")
    peaks = ("Text", "Limit per process", "JSONL: peak of all processes", "One text file: peak of all processes")
    return f"{table_of(heads, speed)}\n\n{table_of(peaks, memory)}"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures speed and memory."""
    size, smallest = arguments.megabytes * 10**6, arguments.memory_megabytes * 10**6
    result: dict[str, Any] = {
        "packages": {name: metadata.version(name) for name in ("tiktoken", "tokenizers", "numpy")}
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "training.jsonl", 8 * 10**6)
        names = {"rank file (tiktoken)": "tokenizer.model", "tokenizer.json (tokenizers)": "tokenizer.json"}
        for name in names.values():
            train([str(folder / "training.jsonl")], folder / name, 8192)
        result["speed"] = {
            label: measure_speed(
                folder, folder / name, size // 8 if name.endswith("json") else size, arguments.workers, arguments.rounds
            )
            for label, name in names.items()
        }
        sizes = [smallest * times for times in (1, 2, 4)]
        result["memory"] = measure_memory(folder, folder / "tokenizer.model", sizes, arguments.workers)
    return result


if __name__ == "__main__":
    # A tokenizer.json gets an eighth of the text. Memory is measured with three sizes, of which the smallest is given.
    script(__doc__, measure, table, workers=2, rounds=5, megabytes=128, memory_megabytes=150)
