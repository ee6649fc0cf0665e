"""Runs the benchmarks and tests that need a GPU, part by part. Each part writes a JSON file.

    python -m benchmarks.gpu first-hour --out DIR              the first hour on a GPU
    python -m benchmarks.gpu 1b_bfloat16 8b_bfloat16 --out DIR parts by name
    python -m benchmarks.gpu --list                            prints the command of each part
    python -m benchmarks.gpu first-hour --rehearse             the same commands on a CPU, with tiny models

A second call continues: parts that succeeded are skipped, and parts that failed come last. `--minutes` ends a call at a part's end,
for machines that limit the time of a command. Peers are rows of the comparison:

    --python torchtitan_0_2=peer/bin/python --path nanochat=/path/to/nanochat
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.published_gpu import RUNS

# With torch 2.11, as on the measured GPU, torchtitan 0.3.0 cannot be imported.
PEERS = "plain,titanlike,torchtitan_0_2,litgpt,nanochat"
TINY = "cpu_tiny"  # the model of a rehearsal


@dataclass(frozen=True)
class Part:
    """A command of a module, to which `--out FILE` is added. `rehearsal` are its arguments on a CPU."""

    command: str
    rehearsal: str
    limit: float = 570.0  # seconds


def compare(model: str, precision: str, subjects: str, rows: str = "best", more: str = "") -> Part:
    """Returns a part that compares projects on a model."""
    command = f"benchmarks.run --precision {precision} --subject {subjects}"
    tiny = f"--device cpu --model {TINY} --sequential --steps 2 --warmup 1"
    # A rehearsal compiles nothing, which would take most of its time, and emulates float8 matmuls.
    tiny_rows = rows.replace("best", "shipped")
    for row in tiny_rows.split(","):
        if row not in ("shipped", "baseline"):  # which compile nothing on a CPU
            tiny += f" --option titanlike.{row}:compile.backend=eager"
        if "float8" in precision + row:
            tiny += f" --option titanlike.{row}:float8.emulate=true --option 'titanlike.{row}:float8.layers=[\"*\"]'"
    # Blocks of four steps differ by 1% on an H200.
    steps = "--steps 12 --warmup 4 --block 4"
    return Part(
        f"{command} --rows {rows} --device cuda --model {model} {steps} {more}".strip(),
        f"{command} --rows {tiny_rows} {tiny} {more}".strip(),
    )


def tests(options: str) -> Part:
    """Returns a part that runs tests of `tests/gpu`."""
    # pytest-benchmark, if installed, warns of several processes, which is an error here.
    command = f"pytest tests/gpu -o addopts= -p no:cacheprovider -p no:benchmark -q --durations=10 {options}"
    return Part(command, f"{command} --collect-only", 540)


# By name, which is that of the JSON file.
PARTS = {
    # The tests need a GPU: a rehearsal only imports them.
    "tests": tests("-n 6 --dist loadfile -m 'not whole_gpu'"),
    "tests_whole_gpu": tests("-m whole_gpu"),
    "ladder_8b": compare("llama3_8b_8layers", "bfloat16", "titanlike", "baseline,compile,float8", "--once"),
    "1b_bfloat16": compare("llama3_1b", "bfloat16", PEERS),
    "1b_float8": compare("llama3_1b", "float8", "titanlike,torchtitan_0_2,nanochat"),
    "gpt2_bfloat16": compare("gpt2_124m", "bfloat16", "plain,titanlike,nanogpt,hf,nanochat"),
    "8b_bfloat16": compare("llama3_8b_8layers", "bfloat16", PEERS, more="--once"),
    "8b_float8": compare("llama3_8b_8layers", "float8", "titanlike,torchtitan_0_2,nanochat", more="--once"),
    "1b_shipped": compare("llama3_1b", "bfloat16", "titanlike,torchtitan_0_2,litgpt,hf", "shipped"),
    **{name: Part(f"benchmarks.published_gpu {name}", f"benchmarks.published_gpu {name} --rehearse") for name in RUNS},
}  # fmt: skip
FIRST_HOUR = ("tests", "tests_whole_gpu", "ladder_8b", "1b_bfloat16", "1b_float8", "gpt2_bfloat16")


def argv_of(name: str, folder: Path, *, rehearse: bool, others: Sequence[str] = ()) -> list[str]:
    """Returns the command line of a part."""
    part = PARTS[name]
    argv = shlex.split(part.rehearsal if rehearse else part.command)
    out = folder.absolute() / f"{name}.json"
    if argv[0] == "pytest":
        return [*argv, "--record", str(out)]
    return [*argv, *(others if argv[0] == "benchmarks.run" else ()), "--out", str(out)]


def run(name: str, folder: Path, *, rehearse: bool, others: Sequence[str], limits: float = 1.0) -> dict[str, Any]:
    """Runs a part, writes its output to a log, and returns how it ended."""
    start = time.monotonic()
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv_of(name, folder, rehearse=rehearse, others=others)],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limits * PARTS[name].limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            code = None
    state = "ok" if code == 0 else "failed" if code is not None else "stopped"
    return {"state": state, "code": code, "seconds": round(time.monotonic() - start, 1), "log": log.name}


def main() -> None:
    """Runs parts, and records how each ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"first-hour, or of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="(benchmarks/results/gpu; of a rehearsal, a new folder)")
    parser.add_argument("--minutes", type=float, default=25.0, help="start no part after this time")
    parser.add_argument("--limits", type=float, default=1.0, metavar="X", help="X times the time limit of each part")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--list", action="store_true")
    arguments, others = parser.parse_known_args()
    names = [name for part in arguments.parts for name in (FIRST_HOUR if part == "first-hour" else (part,))]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: unknown; choose from first-hour, {', '.join(PARTS)}")
    if arguments.out is None:
        rehearsal = arguments.rehearse and not arguments.list
        arguments.out = Path(tempfile.mkdtemp(prefix="rehearsal-") if rehearsal else ROOT / "benchmarks/results/gpu")
        if rehearsal:
            print(f"results in {arguments.out}; continue with --out {arguments.out}")
    if arguments.list or not names:
        for name in names or PARTS:
            print(f"{name}: python -m {shlex.join(argv_of(name, arguments.out, rehearse=arguments.rehearse))}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = arguments.out / "parts.json"
    states: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    states = {name: state for name, state in states.items() if state["rehearsed"] == arguments.rehearse}
    order = sorted(dict.fromkeys(names), key=lambda name: name in states)  # parts that failed before come last
    end = time.monotonic() + 60 * arguments.minutes
    for name in order:
        if states.get(name, {}).get("state") == "ok":
            print(f"{name}: done before")
            continue
        if time.monotonic() > end:
            print(f"{name}: not started, after {arguments.minutes:g} minutes; run the same command again to continue")
            continue
        result = run(name, arguments.out, rehearse=arguments.rehearse, others=others, limits=arguments.limits)
        states[name] = result | {"rehearsed": arguments.rehearse}
        record.write_text(json.dumps(states, indent=1) + "\n")
        print(f"{name}: {result['state']} after {result['seconds']:.0f} s", flush=True)
        if result["state"] != "ok":
            print("\n".join((arguments.out / result["log"]).read_text().splitlines()[-15:]), flush=True)
    sys.exit(any(states.get(name, {}).get("state") != "ok" for name in names))


if __name__ == "__main__":
    main()
