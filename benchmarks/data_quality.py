"""Measures the stages of `titanlike data prepare` that select documents: what they find and miss, their time and their memory.

    python -m benchmarks.data_quality --gb 10 --peer-python PYTHON --out benchmarks/results/data_quality.json
    python -m benchmarks.data_quality --table benchmarks/results/data_quality.json     the tables of the documentation

The corpus is that of `benchmarks/quality_corpus.py`, and the tokenizer `bytes`, so that documents are compared as text. All stages
run on the complete corpus and on a tenth of it, with a limit of `LIMIT` bytes per process (RLIMIT_DATA). Peak memory is the largest
sum of the resident sizes of all processes, sampled ten times a second. The first file is prepared again with other numbers of
workers and with kills. With `--peer-python`, an environment with datatrove and datasketch, datatrove and titanlike remove the near
duplicates of the first files, and datasketch estimates similarities of the same sets of shingles.
"""

import argparse
import gzip
import json
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import quality_corpus, quality_texts
from benchmarks.data_prepare import children
from benchmarks.figures import cpu_name
from benchmarks.quality_results import evaluate, evaluate_duplicates, kept_hashes, table
from titanlike.data.tokens.shards import read_manifest
from titanlike.tools.data.quality.hashing import shingles_of, words_of
from titanlike.tools.data.quality.minhash import signatures_of
from titanlike.tools.data.quality.report import read_report

ROOT = Path(__file__).parents[1]
LIMIT = 512 * 2**20  # bytes of data per process
STAGES = ["--quality", "default", "--duplicates", "remove-near", "--repeated-lines", "100"]
PAIRS = 400  # whose similarity is estimated

# The command, in a process that prints when each pass began and ended.
PROGRAM = """
import json, sys, time
from titanlike.tools.cli import data
from titanlike.tools.cli.main import main
times, original = {}, data.progress_text
def progress_text(progress):
    times.setdefault(progress.stage[2], [time.time() - progress.seconds, 0])[1] = time.time()
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
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)), start_new_session=True,
    )  # fmt: skip


def prepare(inputs: Sequence[Path], out: Path, *options: str, workers: int) -> dict[str, Any]:
    """Prepares a folder. Returns the seconds, of each pass too, and the peak memory."""
    before, begin = cpu_seconds(), time.time()
    process = start(inputs, out, *options, workers=workers)
    memory = peak_memory(process)
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


def peak_memory(process: "subprocess.Popen[bytes]") -> dict[str, float]:
    """Waits for a command. Returns the peak memory of its processes in MiB: of all at one time, and of the largest."""
    together = largest = 0
    while process.poll() is None:
        found = [resident(pid) for pid in [process.pid, *children(process.pid)]]
        together = max(together, sum(now for now, _ in found))
        largest = max(largest, *(peak for _, peak in found))
        time.sleep(0.1)
    assert process.returncode == 0
    return {"all_mib": together / 1024, "largest_mib": largest / 1024}


def resident(pid: int) -> tuple[int, int]:
    """Returns the resident size of a process in KiB, and its peak."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split()[0]: line.split()[1] for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return int(values.get("VmRSS:", 0)), int(values.get("VmHWM:", 0))


def cpu_seconds() -> float:
    """Returns the CPU time of the children that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def content_hash(out: Path) -> str:
    """Identifies all files of a folder."""
    names = ["report.json", "manifest.json"]
    return f"{read_manifest(str(out)).fingerprint} " + " ".join(
        f"{quality_corpus.hash_of((out / name).read_bytes()):016x}" for name in names
    )


def prepare_with_kills(inputs: Sequence[Path], out: Path, interval: float) -> int:
    """Kills a preparation every `interval` seconds until it is complete. Returns the number of kills."""
    for kills in count():
        process = start(inputs, out, *STAGES, workers=2)
        try:
            process.communicate(timeout=interval)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            interval += 1
            continue
        assert process.returncode == 0
        return kills
    raise AssertionError


def measure_largest_unit(file: Path, folder: Path) -> dict[str, Any]:
    """Prepares a compressed file, which is one work unit of about the largest size that there is."""
    compressed = folder / f"{file.name}.gz"
    with file.open("rb") as source, gzip.open(compressed, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target)
    measured = prepare([compressed], folder / "out", *STAGES, workers=1)
    shutil.rmtree(folder / "out")
    compressed.unlink()
    return measured | {"bytes": file.stat().st_size}


def check_same_bytes(inputs: Sequence[Path], out: Path) -> dict[str, bool]:
    """Prepares the same files with several numbers of workers and with kills. Returns whether all files are the same as with two
    workers."""
    seconds = prepare(inputs, out, *STAGES, workers=2)["seconds"]
    expected = content_hash(out)
    shutil.rmtree(out)
    same = {}
    for workers in (1, 3):
        prepare(inputs, out, *STAGES, workers=workers)
        same[f"{workers} workers"] = content_hash(out) == expected
        shutil.rmtree(out)
    kills = prepare_with_kills(inputs, out, seconds / 5)
    same[f"{kills} kills"] = content_hash(out) == expected
    shutil.rmtree(out)
    return same


def estimates(folder: Path, peer: str) -> dict[str, Any]:
    """Compares estimated similarities of sets of shingles with exact ones, and with those that datasketch estimates."""
    rng = np.random.default_rng(0)
    arrays, exact, own = {}, [], []
    for number in range(PAIRS):
        words = quality_corpus.draw(rng, int(rng.integers(60, 2000)))
        other = list(words)
        for at in np.flatnonzero(rng.random(len(words)) < rng.choice([0.002, 0.01, 0.02, 0.05, 0.1])).tolist():
            other[at] = "changed"
        both = shingles_of(words_of([" ".join(each).encode() for each in (words, other)]))
        first, second = signatures_of(both)
        own.append(float(np.mean(first == second)))
        exact.append(quality_corpus.similarity(words, other))
        arrays |= {f"first{number}": both.hashes[: both.ends[0]], f"second{number}": both.hashes[both.ends[0] :]}
    np.savez(folder / "pairs.npz", **arrays)
    found = {"titanlike": own, "datasketch": run_peer(peer, "estimate", folder / "pairs.npz")}
    return {
        "pairs": PAIRS,
        **{
            name: {
                "root_mean_square_error": float(np.sqrt(np.mean((np.array(values) - exact) ** 2))),
                "bias": float(np.mean(np.array(values) - exact)),
            }
            for name, values in found.items()
        },
        "expected_error": float(np.sqrt(np.mean(np.array(exact) * (1 - np.array(exact)) / 112))),
    }


def run_peer(python: str, *arguments: object) -> Any:
    """Runs `peers/datatrove_minhash.py`."""
    script = ROOT / "benchmarks/peers/datatrove_minhash.py"
    done = subprocess.run(
        [python, str(script), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare_with_peer(files: Sequence[Path], folder: Path, peer: str, workers: int) -> dict[str, Any]:
    """Removes near duplicates of the same files with datatrove and with titanlike."""
    corpus = folder / "part"
    corpus.mkdir()
    for file in files:
        (corpus / file.name).symlink_to(file)
    result: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in files)}
    before = cpu_seconds()
    seconds = run_peer(peer, "deduplicate", corpus, folder / "datatrove", workers)
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


def main() -> None:
    """Measures, or prints earlier results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument(
        "--folder", type=Path, default=Path("quality-benchmark"), help="for the corpus; deleted at the end"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--peer-python", default="", help="an interpreter with datatrove and datasketch")
    parser.add_argument("--peer-files", type=int, default=2, help="files of 250 MB that datatrove reads")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    folder = arguments.folder.resolve()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.data_quality", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"numpy": np.__version__, "python": platform.python_version()},
        "limit_bytes": LIMIT,
        "load_before": os.getloadavg(),
    }

    def save() -> None:
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(
            json.dumps({key: list(value) if isinstance(value, dict) else value for key, value in result.items()}),
            flush=True,
        )

    result["good_texts"] = quality_texts.measure()
    try:
        files = quality_corpus.write_corpus(folder / "corpus", int(arguments.gb * 1e9), arguments.workers)
        tenth = files[: max(1, len(files) // 10)]
        out = folder / "out"
        save()
        result["without_stages"] = prepare(tenth, out, workers=arguments.workers)
        shutil.rmtree(out)
        for name, part in (("tenth", tenth), ("all", files)):
            measured = prepare(part, out, *STAGES, workers=arguments.workers)
            report = read_report(str(out))
            assert report
            result[name] = measured | {"found": evaluate(part, kept_hashes(out)), "duplicates": report["duplicates"]}
            shutil.rmtree(out)
            save()
        result["largest_unit"] = measure_largest_unit(files[0], folder)
        result["same_bytes"] = check_same_bytes(files[:1], out)
        save()
        if arguments.peer_python:
            result["estimates"] = estimates(folder, arguments.peer_python)
            result["peer"] = compare_with_peer(
                files[: arguments.peer_files], folder, arguments.peer_python, arguments.workers
            )
            save()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["load_after"] = os.getloadavg()
    save()
    print(table(result))


if __name__ == "__main__":
    main()
