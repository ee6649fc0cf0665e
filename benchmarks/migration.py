"""Converts job configs of other programs, checks the recipes, and records what became of their keys.

    python -m benchmarks.migration FOLDER --out benchmarks/results/migration.json

The folder has the files and a `sources.json` with, for each file, its public address, the number of GPUs of the job and the
environment of a script: `{"llama3_8b.toml": {"link": "https://...", "gpus": 64, "env": {}}}`. Prints the table of
docs/results.md. Or all configs of torchtitan 0.3.0, which the Python of its environment builds:

    python -m benchmarks.migration --torchtitan venv/bin/python --out benchmarks/results/migration_configs.json
"""

import hashlib
import json
import os
import subprocess
from collections import Counter
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
    """Returns a row for each file, as Markdown: how many of its keys are mapped, and what is not."""
    cells = []
    for row in rows:
        name = f"[{row['file']}]({row['link']})"
        if row["env"]:
            name += f", with {', '.join(f'`--env {key}={value}`' for key, value in row['env'].items())}"
        if "refused" in row:
            cells.append([name, row["gpus"], "", "", f"error: {row['refused']}"])
            continue
        lost = ", ".join(f"`{key}`" for key in row["not_mapped"])
        result = f"`--check` {row['check']}" + (f"; not converted: {lost}" if lost else "")
        cells.append([name, row["gpus"], row["keys"], row["mapped"], result])
    return table_of(("File", "GPUs", "Keys", "Mapped", "Result"), cells)


def table_of_models(rows: list[dict[str, Any]]) -> str:
    """Returns a row for each model of torchtitan: how many of its configs are imported, and why others are not."""
    models: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(row["file"].partition(".")[0], []).append(row)
    cells = []
    for model, alike in models.items():
        reasons = Counter(row["refused"].rpartition(": ")[2].partition(";")[0] for row in alike if "refused" in row)
        passed = sum(row.get("check") == "passes" for row in alike)
        cells.append(
            (model, len(alike), passed, "; ".join(f"{reason} ({number})" for reason, number in reasons.items()))
        )
    return table_of(("Model", "Configs", "Imported", "Errors"), cells)


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
        rows, text = configs(arguments.torchtitan), table_of_models
    else:
        sources = json.loads((arguments.folder / SOURCES).read_text())
        rows, text = [result(arguments.folder / name, **source) for name, source in sources.items()], table
    write(arguments.out, rows)
    print(text(rows))


if __name__ == "__main__":
    main()
