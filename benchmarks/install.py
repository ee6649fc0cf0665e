"""Size of an installation: the wheel, the seconds in which pip installs it where torch is present, and the lines of each program.

python -m benchmarks.install --out benchmarks/results/install.json
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from titanlike.config.shipped import PROGRAMS
from titanlike.tools.clusters.docker import build_wheel


def torch_and_its_dependencies(folder: Path) -> None:
    """Links the installed torch, and what it requires, into a folder: a stand-in for an environment that has nothing else."""
    folder.mkdir()
    names, found = ["torch"], set()
    while names:
        name = names.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        if distribution.name in found:
            continue
        found.add(distribution.name)
        names += [re.split(r"[^\w.-]", each)[0] for each in distribution.requires or [] if "extra ==" not in each]
        for part in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / part).exists():
                (folder / part).symlink_to(distribution.locate_file(part))


def children() -> float:
    """Returns the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(repeats: int) -> dict[str, Any]:
    """Returns the sizes and the seconds of each installation, without pip's cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = folder / build_wheel(folder)
        torch_and_its_dependencies(folder / "torch")
        seconds, cpu_seconds = [], []
        for number in range(repeats):
            environment = folder / f"venv-{number}"
            venv.create(environment, with_pip=True)
            (site,) = environment.glob("lib/python*/site-packages")
            (site / "torch.pth").write_text(f"{folder}/torch\n")
            started, used = time.perf_counter(), children()
            subprocess.run([environment / "bin/pip", "install", "--quiet", "--no-cache-dir", wheel], check=True)
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(children() - used)
            subprocess.run([environment / "bin/titanlike", "--version"], check=True, stdout=subprocess.DEVNULL)
        size = wheel.stat().st_size
    return {
        "wheel_kb": round(size / 1000),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }  # fmt: skip


def programs() -> dict[str, int]:
    """Returns the lines of each program."""
    return {path.name: len(path.read_text().splitlines()) for path in sorted(PROGRAMS.glob("*.py"))}


def sentence(measured: dict[str, Any]) -> str:
    """Returns the sentence of docs/installing.md."""
    lines = ", ".join(f"`{name}` {number}" for name, number in programs().items())
    return (
        f"The wheel has {measured['wheel_kb']} kB. Where torch is present, pip installs it with its other dependencies in "
        f"{statistics.median(measured['cpu_seconds']):.0f} s of CPU time; without pip's cache, and with the two cores busy with "
        f"other work, this took {min(measured['seconds']):.0f} s. Lines of the programs: {lines}."
    )


def main() -> None:
    """Measures, and writes all values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    command = f"python -m benchmarks.install --repeats {options.repeats} --out {options.out}"
    options.out.write_text(json.dumps({"command": command, **measure(options.repeats)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
