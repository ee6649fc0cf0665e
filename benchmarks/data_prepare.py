"""How fast text becomes token shards, beside what the tokenizers' own libraries do on as many cores; and in how much memory.

    python -m benchmarks.data_prepare --out benchmarks/results/data_prepare_cpu.json
    python -m benchmarks.data_prepare --table benchmarks/results/data_prepare_cpu.json        the tables of the documents

The text is that of Python's own library, one file a record, again and again up to the size. The tokenizers are trained on it, one
set of merges as a rank file for tiktoken and as a tokenizer.json for Hugging Face's tokenizers. A turn of a library encodes
records that are in memory, on as many threads as we have processes, and throws the tokens away. A turn of ours is the whole
command: it starts its processes, reads and parses the file, encodes, hashes, writes and fsyncs. They take turns, and a ratio is
between neighbours in time.

Where memory is measured, the system gives no process more than `LIMIT` bytes of its own, so one that held a file would fail.
What is told is the peak of all processes of the command together: for each the most that it has ever had resident (VmHWM), summed,
pages that several share counted several times.
"""

import argparse
import json
import os
import platform
import resource
import shlex
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

from benchmarks.figures import cpu_name
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.text.tokenizer import build_tokenizer
from titanlike.data.text.train_tokenizer import train
from titanlike.data.token_shards import read_manifest, totals

ROOT = Path(__file__).parents[1]
BATCH = 512  # records that a library is given at once
LIMIT = (
    256 * 2**20
)  # bytes that the system lets a process take, where memory is measured: less than the larger files have


def write_corpus(path: Path, size: int) -> list[str]:
    """A JSONL file of so many bytes, and the texts in it."""
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


def library_turn(encoding: Path, texts: list[str], threads: int) -> Callable[[], int]:
    """What the library does by itself; returns the number of tokens."""
    codec: Any = build_tokenizer(Section(encoding=str(encoding))).codec
    parts = [texts[place : place + BATCH] for place in range(0, len(texts), BATCH)]
    if encoding.suffix == ".json":
        return lambda: sum(
            len(one) for part in parts for one in codec.tokenizer.encode_batch(part, add_special_tokens=False)
        )
    return lambda: sum(
        len(one) for part in parts for one in codec.encoding.encode_ordinary_batch(part, num_threads=threads)
    )


def measure_speed(folder: Path, encoding: Path, size: int, workers: int, rounds: int) -> dict[str, Any]:
    """Turns of both, and the ratios between neighbours."""
    corpus, out = folder / "corpus.jsonl", folder / "out"
    texts = write_corpus(corpus, size)
    library = library_turn(encoding, texts, workers)
    turns: list[dict[str, float]] = []
    for number in range(rounds + 1):  # the first warms up what is to be warmed up
        turn: dict[str, float] = {}
        for who in ("library", "titanlike") if number % 2 else ("titanlike", "library"):
            begun, worked = time.perf_counter(), cpu_seconds()
            if who == "library":
                tokens = library()
            else:
                assert start(corpus, out, encoding, workers).wait() == 0
                manifest = read_manifest(str(out))
                tokens, documents = totals(manifest.splits["train"])
                tokens -= documents  # the library closes none
            turn[who] = tokens / (time.perf_counter() - begun)
            turn[f"{who}_of_cpu"] = tokens / (cpu_seconds() - worked)
            turn[f"{who}_tokens"] = tokens
        shutil.rmtree(out)
        assert turn["library_tokens"] == turn["titanlike_tokens"], turn
        print(json.dumps(turn), flush=True)
        turns.append(turn)
    turns = turns[1:]
    return {
        "corpus_bytes": corpus.stat().st_size,
        "tokens": int(turns[0]["library_tokens"]),
        "workers": workers,
        "turns": turns,
        "tokens_per_second": {who: statistics.median(turn[who] for turn in turns) for who in ("library", "titanlike")},
        "ratio": ratio(turns, ""),
        "ratio_of_cpu": ratio(turns, "_of_cpu"),  # tokens per second of a core: what others do meanwhile counts less
    }


def ratio(turns: list[dict[str, float]], kind: str) -> dict[str, float]:
    """Of neighbours in time."""
    found = [turn[f"titanlike{kind}"] / turn[f"library{kind}"] for turn in turns]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def cpu_seconds() -> float:
    """Of this process and of those that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def start(corpus: Path, out: Path, encoding: Path, workers: int, limit: int = 0) -> "subprocess.Popen[bytes]":
    """The command, as a user gives it; if there is a limit, with so many bytes for each of its processes, at most."""

    def restrict() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    words = [str(corpus), "--out", str(out), "--tokenizer", str(encoding), "--workers", str(workers)]
    command = [sys.executable, "-m", "titanlike.cli.main", "data", "prepare", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=restrict)


def measure_memory(folder: Path, encoding: Path, sizes: list[int], workers: int) -> list[dict[str, Any]]:
    """Peaks of the command, of a JSONL file and of one text file, of several sizes."""
    found = []
    for size in sizes:
        texts = write_corpus(folder / "corpus.jsonl", size)
        with (folder / "corpus.txt").open("w") as stream:
            for text in texts:
                stream.write(text)
        del texts
        row: dict[str, Any] = {"corpus_bytes": size, "limit_bytes": LIMIT}
        for kind in ("jsonl", "txt"):
            row[kind] = peaks(start(folder / f"corpus.{kind}", folder / "out", encoding, workers, LIMIT))
            shutil.rmtree(folder / "out")
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def peaks(process: "subprocess.Popen[bytes]") -> dict[str, float]:
    """Most MiB that a command's processes have had, all together and the largest."""
    most: dict[int, int] = {}
    while process.poll() is None:
        for pid in [process.pid, *children(process.pid)]:
            most[pid] = max(most.get(pid, 0), high_water(pid))
        time.sleep(0.05)
    assert process.returncode == 0
    return {"all_mib": sum(most.values()) / 1024, "largest_mib": max(most.values()) / 1024, "processes": len(most)}


def children(pid: int) -> list[int]:
    """Of a process, those that it has started."""
    try:
        found = [
            int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()
        ]
    except OSError:
        return []
    return [each for child in found for each in (child, *children(child))]


def high_water(pid: int) -> int:
    """KiB that a process has had at most."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def table(result: dict[str, Any]) -> str:
    """What was found, for a document."""
    lines = [
        "| Tokenizer | Text | tokens/s of the library | tokens/s of `prepare` | ratio | ratio per second of a core |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["speed"].items():
        rates = row["tokens_per_second"]
        ratios = [
            f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            for one in (row["ratio"], row["ratio_of_cpu"])
        ]
        lines.append(
            f"| {name} | {row['corpus_bytes'] / 1e6:,.0f} MB | {rates['library']:,.0f} | {rates['titanlike']:,.0f} | "
            f"{' | '.join(ratios)} |"
        )
    lines += [
        "",
        "| Text | limit of a process | JSONL: peak of all processes | one text file: peak |",
        "|---|---|---|---|",
    ]
    for row in result["memory"]:
        sizes = [row["limit_bytes"] / 2**20, row["jsonl"]["all_mib"], row["txt"]["all_mib"]]
        lines.append(f"| {row['corpus_bytes'] / 1e6:,.0f} MB | {' | '.join(f'{size:,.0f} MiB' for size in sizes)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--megabytes", type=int, default=128, help="of the rank file's text; tokenizer.json has an eighth"
    )
    parser.add_argument(
        "--memory-megabytes", type=int, default=150, help="of the smallest; the others are 2 and 4 times that"
    )
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    size, smallest = arguments.megabytes * 10**6, arguments.memory_megabytes * 10**6
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.data_prepare", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {name: metadata.version(name) for name in ("tiktoken", "tokenizers", "numpy")},
        "load_before": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
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
    result["load_after"] = os.getloadavg()
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
