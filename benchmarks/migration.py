"""Converts job configs of other programs, checks the recipes, and records what became of their keys.

    python -m benchmarks.migration FOLDER --out benchmarks/results/migration.json

The folder has the files and a `sources.json` with, for each file, its public address, the number of GPUs of the job and the
environment of a script: `{"llama3_8b.toml": {"link": "https://...", "gpus": 64, "env": {}}}`. Prints the table of
docs/migration_results.md. Or all configs of torchtitan 0.3.0, which the Python of its environment builds:

    python -m benchmarks.migration --torchtitan venv/bin/python --out benchmarks/results/migration_configs.json
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import ROOT, parser_of, write
from benchmarks.common import table as table_of
from titanlike.config import UserError
from titanlike.config.shipped import PROGRAMS
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools.migration.formats import convert
from titanlike.tools.programs import run_program

SOURCES = "sources.json"
REGISTRIES = "https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan/models"


def result(path: Path, link: str, gpus: int, env: Mapping[str, str]) -> dict[str, Any]:
    """Returns what became of a file. A script has the environment `env`."""
    row: dict[str, Any] = {
        "file": path.name,
        "link": link,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "gpus": gpus,
        "env": env,
    }
    with TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.toml")
        try:
            if error := json.loads(path.read_text()).get("error") if path.suffix == ".json" else "":
                raise UserError(f"torchtitan does not build it: {error}")
            job = convert(path, gpus, env)
            assert job is not None, f"{path} is of no known program"
            recipe.write_text(job.text())
        except UserError as error:
            return row | {"refused": str(error).removeprefix(f"{path}: ")}
        row |= {
            "program": job.program,
            "keys": len(job.given),
            "mapped": len(job.mapped),
            "not_mapped": {one.key: one.reason for one in job.not_mapped.values() if one.changes},
            "without_effect": len(job.not_mapped) - sum(one.changes for one in job.not_mapped.values()),
            "differences": job.differences,
        }
        try:
            row["parameters"] = load(PretrainRecipe, recipe).model.num_parameters()
            run_program(PROGRAMS / "pretrain.py", str(recipe), f"--check={gpus}")
            row["check"] = "passes"
        except UserError as error:
            row["check"] = str(error).replace(str(recipe), "the recipe")
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the results as a table in Markdown."""
    cells = []
    for row in rows:
        name = f"[{row['file']}]({row['link']})"
        if row["env"]:
            name += f", with {', '.join(f'`--env {key}={value}`' for key, value in row['env'].items())}"
        if "refused" in row:
            cells.append([name, row["gpus"], *[""] * 4, f"refused: {row['refused']}"])
            continue
        lost = "; ".join(f"`{key}`: {reason}" for key, reason in row["not_mapped"].items()) or "none"
        cells.append([name, row["gpus"], row["keys"], row["mapped"], lost, row["without_effect"], row["check"]])
    heads = ("File", "GPUs", "Keys", "Mapped", "Not mapped, of effect", "Without effect", "`--check`")
    return table_of(heads, cells)


def configs(python: str) -> list[dict[str, Any]]:
    """Returns what became of torchtitan's configs, as jobs of 64 GPUs."""
    with TemporaryDirectory() as folder:
        command = [python, "-m", "benchmarks.subjects.torchtitan_configs", folder]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
        return [
            result(path, f"{REGISTRIES}/{path.name.partition('.')[0]}/config_registry.py", 64, {}) | {"file": path.stem}
            for path in sorted(Path(folder).iterdir())
        ]


def main() -> None:
    """Runs the command."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="files of other programs, and sources.json")
    parser.add_argument("--torchtitan", metavar="PYTHON", help="Python with torchtitan 0.3.0, in place of the folder")
    arguments = parser.parse_args()
    if arguments.torchtitan:
        rows = configs(arguments.torchtitan)
    else:
        sources = json.loads((arguments.folder / SOURCES).read_text())
        rows = [result(arguments.folder / name, **source) for name, source in sources.items()]
    write(arguments.out, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
