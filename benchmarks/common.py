"""What measurements share: training runs, Markdown tables, and the command line of a script with the record that it writes."""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from titanlike.config.shipped import recipe_path
from titanlike.distributed.launch_config import child_environment
from titanlike.run.run_dir import versions
from titanlike.tools.programs import options_of

ROOT = Path(__file__).parents[1]


def train(
    recipe: str, overrides: Mapping[str, Any], *, processes: int = 1, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Trains a recipe, a shipped one by its name. Returns the records of its metrics.

    Args:
        overrides: `run.name` is `run` if they have none.
        folder: where the run stays, with its checkpoints. None: it has no checkpoints, and is deleted.
    """
    with tempfile.TemporaryDirectory() as temporary:
        keys = {"sample.tokens": 0, "metrics.trackers": [], "run.name": "run", "run.dir": folder or temporary}
        keys |= ({} if folder else {"checkpoint.enabled": False}) | dict(overrides)
        command = [sys.executable, str(ROOT / "titanlike/run/launch.py"), str(recipe_path(recipe)), *options_of(keys)]
        environment = child_environment({"NPROC": str(processes), "PYTHONPATH": str(ROOT)})
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        lines = Path(keys["run.dir"], keys["run.name"], "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def titanlike(*words: object) -> str:
    """Runs a command of titanlike in one process. Returns what it prints."""
    command = [sys.executable, "-m", "titanlike.tools.cli.main", *map(str, words)]
    environment = child_environment({"NPROC": "1", "PYTHONPATH": str(ROOT)})
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def losses(records: Iterable[Mapping[str, Any]], name: str = "loss") -> dict[int, float]:
    """Returns a loss of a run by step: `loss` or `validation_loss`."""
    return {record["step"]: record[name] for record in records if name in record}


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heads, *rows)]
    return "\n".join([lines[0].replace("|  |", "| |"), "|" + "---|" * len(heads), *lines[1:]])


def cpu_name() -> str:
    """Returns the model name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def peak_memory(process: "subprocess.Popen[bytes]") -> float:
    """Waits for a command. Returns the largest sum of the resident sizes of its processes in MiB, sampled ten times a second."""
    peak = 0
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(process.pid)
            processes = [command, *command.children(recursive=True)]
            peak = max(peak, sum(each.memory_info().rss for each in processes))
        time.sleep(0.1)
    assert process.returncode == 0
    return peak / 2**20


def facts() -> dict[str, Any]:
    """Returns what the record of a measurement says of its command and machine."""
    spec = sys.modules["__main__"].__spec__
    return {
        "command": " ".join(["python", "-m", spec.name if spec else sys.argv[0], *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "platform": platform.platform()},
        "versions": versions(),
        "load": os.getloadavg()[0],
    }


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a script, with the option `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for what was measured")
    return parser


def write(out: Path | None, measured: Any) -> None:
    """Writes what was measured, if there is a file for it."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n")


def script(
    description: str | None,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    text: Callable[[Any], str],
    **options: Any,
) -> None:
    """Measures, writes what was measured to `--out`, and prints it; with `--table FILE`, prints what a file has.

    Args:
        measure: gets the options.
        text: what a page shows of a measurement.
        options: options of the command line with their defaults.
    """
    parser = parser_of(description)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what this file has, and measure nothing")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="(%(default)s)")
    arguments = parser.parse_args()
    if arguments.table is None:
        measured = facts() | measure(arguments)
        write(arguments.out, measured)
    else:
        measured = json.loads(arguments.table.read_text())
    print(text(json.loads(json.dumps(measured))))
