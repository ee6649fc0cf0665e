"""Measures the stages of `titanlike data prepare` that select documents: what they find and miss, their time and their memory.

    python -m benchmarks.data_quality --gb 10 --peer-python PYTHON --out benchmarks/results/data_quality.json
    python -m benchmarks.data_quality --table benchmarks/results/data_quality.json     the tables of the documentation

The corpus is that of `benchmarks/quality_corpus.py`, and the tokenizer `bytes`, so that documents are compared as text. All stages
run on the complete corpus and on a tenth of it, with a limit of `LIMIT` bytes per process (RLIMIT_DATA). Peak memory is the largest
sum of the resident sizes of all processes, sampled ten times a second. With `--peer-python`, an environment with datatrove,
datatrove and titanlike remove the near duplicates of the first files.
"""

import argparse
import gzip
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import quality_corpus, quality_texts
from benchmarks.common import ROOT, cpu_seconds, peak_memory, script
from benchmarks.quality_results import evaluate, evaluate_duplicates, kept_hashes, table
from titanlike.tools.data.quality.report import read_report

LIMIT = 512 * 2**20  # bytes of data per process
STAGES = ["--quality", "default", "--duplicates", "remove-near", "--repeated-lines", "100"]

# The command, in a process that prints when each pass began and ended.
PROGRAM = """
import json, sys, time
from titanlike.tools.cli import data
from titanlike.tools.cli.main import main
times, original = {}, data.progress_text
def progress_text(progress):
    times.setdefault(progress.stage, [time.time() - progress.seconds, 0])[1] = time.time()
    return original(progress)
data.progress_text = progress_text
main()
print(json.dumps(times))
"""


def start(inputs: Sequence[Path], out: Path, *options: str, workers: int) -> "subprocess.Popen[bytes]":
    """Starts a preparation."""
    arguments = [*map(str, inputs), "--out", str(out), "--tokenizer", "bytes", "--workers", str(workers), *options]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "data", "prepare", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)),
    )  # fmt: skip


def prepare(inputs: Sequence[Path], out: Path, *options: str, workers: int) -> dict[str, Any]:
    """Prepares a folder. Returns the seconds, of each pass too, and the peak memory."""
    before, begin = cpu_seconds(), time.time()
    process = start(inputs, out, *options, workers=workers)
    memory = {"all_mib": peak_memory(process)}
    end = time.time()
    assert process.stdout
    times = json.loads(process.stdout.read().decode().splitlines()[-1])
    names = list(times)
    seconds = {}
    for number, name in enumerate(names):
        # A pass includes what joins its results, until the next one begins.
        stop = times[names[number + 1]][0] if number + 1 < len(names) else end
        seconds[name] = stop - times[name][0]
    size = sum(path.stat().st_size for path in inputs)
    return {
        "bytes": size, "seconds": end - begin, "cpu_seconds": cpu_seconds() - before, "seconds_of_passes": seconds,
        "seconds_per_gb": (end - begin) / size * 1e9, "memory": memory,
    }  # fmt: skip


def measure_largest_unit(file: Path, folder: Path) -> dict[str, Any]:
    """Prepares a compressed file, which is one work unit of about the largest size that there is."""
    compressed = folder / f"{file.name}.gz"
    with file.open("rb") as source, gzip.open(compressed, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target)
    measured = prepare([compressed], folder / "out", *STAGES, workers=1)
    shutil.rmtree(folder / "out")
    compressed.unlink()
    return measured | {"bytes": file.stat().st_size}


PEER_FILES = 2  # of 250 MB each


def compare_with_peer(files: Sequence[Path], folder: Path, peer: str, workers: int) -> dict[str, Any]:
    """Removes near duplicates of the same files with datatrove and with titanlike."""
    corpus = folder / "part"
    corpus.mkdir()
    for file in files:
        (corpus / file.name).symlink_to(file)
    result: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in files)}
    before = cpu_seconds()
    command = [peer, ROOT / "benchmarks/peers/datatrove_minhash.py", corpus, folder / "datatrove", str(workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    seconds = json.loads(done.stdout.splitlines()[-1])
    kept = (
        quality_corpus.hash_of(json.loads(line)["text"].encode())
        for file in sorted((folder / "datatrove/kept").glob("*"))
        for line in file.open()
    )
    result["datatrove"] = {
        "seconds": sum(seconds.values()), "cpu_seconds": cpu_seconds() - before, "seconds_of_passes": seconds,
        "found": evaluate_duplicates(files, kept),
    }  # fmt: skip
    measured = prepare(files, folder / "part-out", "--duplicates", "remove-near", workers=workers)
    result["titanlike"] = measured | {"found": evaluate_duplicates(files, kept_hashes(folder / "part-out"))}
    for name in ("part", "datatrove", "part-out"):
        shutil.rmtree(folder / name)
    result["ratio_of_seconds"] = result["datatrove"]["seconds"] / measured["seconds"]
    result["ratio_of_cpu_seconds"] = result["datatrove"]["cpu_seconds"] / measured["cpu_seconds"]
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures everything, in a folder that is deleted at the end."""
    folder, peer = Path(arguments.folder).resolve(), arguments.peer_python
    result: dict[str, Any] = {"limit_bytes": LIMIT, "good_texts": quality_texts.measure()}
    try:
        files = quality_corpus.write_corpus(folder / "corpus", int(arguments.gb * 1e9), arguments.workers)
        tenth = files[: max(1, len(files) // 10)]
        out = folder / "out"
        result["without_stages"] = prepare(tenth, out, workers=arguments.workers)
        shutil.rmtree(out)
        for name, part in (("tenth", tenth), ("all", files)):
            measured = prepare(part, out, *STAGES, workers=arguments.workers)
            report = read_report(str(out))
            assert report
            result[name] = measured | {"found": evaluate(part, kept_hashes(out)), "duplicates": report["duplicates"]}
            shutil.rmtree(out)
        result["largest_unit"] = measure_largest_unit(files[0], folder)
        if peer:
            result["peer"] = compare_with_peer(files[:PEER_FILES], folder, peer, arguments.workers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


if __name__ == "__main__":
    script(__doc__, measure, table, gb=10.0, folder="quality-benchmark", workers=2, peer_python="")
