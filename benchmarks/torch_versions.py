"""Runs the tests of one process, of parity, float8 and transforms with other versions of torch, and records the results.

Each version is installed into a virtual environment of its own, which is removed afterwards. One with CUDA libraries takes 6 GB.

    python -m benchmarks.torch_versions 2.11 2.13 2.15       # run the tests, record them, print the table of docs/installing.md
    python -m benchmarks.torch_versions                      # print the table
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import cpu_name

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/torch_versions.json"
DISTRIBUTED = [f"tests/distributed/test_{name}.py" for name in ("parity", "float8_layouts", "transforms", "layouts")]
FOLDERS = "commands config data float8 losses metrics models optim source start"  # of tests of one process
COMMAND = ["pytest", "-n", "2", *(f"tests/{name}" for name in FOLDERS.split()), *DISTRIBUTED]
PACKAGES = ("torch", "torchao", "torchdata", "numpy")


def main() -> None:
    """Records the tests of each version on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="versions of torch, such as 2.11")
    parser.add_argument("--dir", help="directory for the virtual environments (default: the temporary directory)")
    arguments = parser.parse_args()
    for version in arguments.versions:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            result = run(version, Path(folder))
        recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        recorded = sorted((recorded | {version: result}).items(), key=lambda item: release(item[0]))
        RECORD.write_text(json.dumps(dict(recorded), indent=2) + "\n")
    print(table(json.loads(RECORD.read_text())))


def run(version: str, folder: Path) -> dict[str, Any]:
    """Installs the project with a version of torch, runs the tests, and returns what is recorded."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python, report = folder / "venv/bin/python", folder / "report.xml"
    # pip compiles what it installs: the tests would report warnings of the compiler about packages as errors.
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-e", ".[dev]", f"torch=={version}.*"], cwd=ROOT, check=True
    )
    subprocess.run([python, "-m", *COMMAND, f"--junitxml={report}"], cwd=ROOT, check=False)
    script = (
        "import json, sys; from importlib.metadata import version; print(json.dumps([*map(version, sys.argv[1:])]))"
    )
    versions = subprocess.run([python, "-c", script, *PACKAGES], capture_output=True, text=True, check=True).stdout
    return {
        **counts(report),
        "packages": dict(zip(PACKAGES, json.loads(versions), strict=True)),
        "python": sys.version.split()[0],
        "cpu": cpu_name(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m", *COMMAND]),
    }


def counts(report: Path) -> dict[str, Any]:
    """Returns the numbers of tests that passed, failed and were skipped, and the names of the failed ones."""
    failed, skipped, passed = set(), set(), set()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = {child.tag for child in case}
        (failed if outcome & {"failure", "error"} else skipped if "skipped" in outcome else passed).add(name)
    return {"passed": len(passed - failed), "failed": len(failed), "skipped": len(skipped), "failures": sorted(failed)}


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version such as 2.11, which compare as versions do."""
    return tuple(map(int, version.split(".")))


def table(recorded: dict[str, Any]) -> str:
    """Returns a row per version of torch."""
    lines = [
        "| torch | torchao | torchdata | NumPy | Python | Passed | Failed | Skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in recorded.values():
        cells = [*(result["packages"][name] for name in PACKAGES), result["python"]]
        lines.append(f"| {' | '.join(cells)} | {result['passed']:,} | {result['failed']} | {result['skipped']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
