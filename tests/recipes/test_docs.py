"""What the documents say can be done, can be done: their commands, keys, files and links."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data_batches, data_prepare, figures, float8_quality, optimizers, save_stall, soak, startup
from tests.launching import ROOT
from tests.parity import CASES, table
from titanlike.cli.main import build_parser
from titanlike.config import PretrainRecipe, load
from titanlike.config.layout import DIMENSIONS
from titanlike.config.schema import describe
from titanlike.config.sections import Tokenizer
from titanlike.data.packed_dataset import BatchSource
from titanlike.data.prepare.prepare import prepare
from titanlike.run.preflight import check_recipe
from titanlike.run.start import DEFAULT_RECIPE, Arguments
from titanlike.verify import TOLERANCES, _parse

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
KEYS = {key.name for key in describe(PretrainRecipe)}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines()]
    return sorted({line for line in lines if "./run_train.sh" in line and "-e ." not in line})


def test_the_two_lines_are_there_once_for_ci_to_run() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.count("pip install -e . && ./run_train.sh") == 1
    assert lines.count('pip install -e ".[dev]" && pytest') == 1


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documents_is_a_right_one(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    arguments = Arguments(words[words.index("./run_train.sh") + 1 :])
    recipe = load(PretrainRecipe, arguments.recipe, arguments.overrides)
    processes = next((int(word.split("=")[1]) for word in words if word.startswith("NPROC=")), None)
    check_recipe(recipe, arguments.check or processes or (1 if arguments.recipe == DEFAULT_RECIPE else 8))


def test_other_commands_of_the_documents_are_right_ones() -> None:
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines()]
    ours = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("titanlike ")]
    assert {words[1] for words in ours if words[0] == "data"} == {"prepare", "inspect", "train-tokenizer"}
    for words in ours:
        build_parser().parse_args(words)


def test_shards_are_what_the_documents_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/data.md").read_text()
    program, _, source = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    members = {name for name in BatchSource.__dict__ if not name.startswith("_")} | set(BatchSource.__annotations__)
    assert set(re.findall(r"def (\w+)|^    (\w+) =", source, flags=re.MULTILINE)) == {
        ("", name) if name == "seq_len" else (name, "") for name in members
    }
    (tmp_path / "a.txt").write_text("the first")
    (tmp_path / "b.txt").write_text("the second")
    prepare([str(tmp_path / "*.txt")], tmp_path / "data/corpus", Tokenizer(), workers=0)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)
    assert bytes(names["first"][:-1].tolist()) == b"the first"
    assert names["documents"].tolist() == [[10, 0], [21, 10]]


def test_what_data_costs_is_what_was_measured() -> None:
    page = (ROOT / "docs/data.md").read_text()
    measurements = (
        (data_batches, "data_batches_cpu"), (data_batches, "data_torchdata_cpu"), (data_prepare, "data_prepare_cpu")
    )  # fmt: skip
    for made_by, name in measurements:
        measured = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for part in made_by.table(measured).strip().split("\n\n"):
            assert f"\n\n{part}\n\n" in page, name


def test_what_the_documents_verify_can_be_verified() -> None:
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines() if "verify" in line]
    assert len(lines) >= 2
    for line in lines:
        _, command, recipe, option, layout = shlex.split(line, comments=True)
        assert (command, option) == ("verify", "--layout")
        chosen = _parse(layout)
        processes = math.prod(int(chosen[name]) for name in DIMENSIONS)
        overrides = {f"parallelism.{key}": value for key, value in chosen.items()}
        check_recipe(load(PretrainRecipe, ROOT / recipe, overrides), processes)


def test_the_table_of_layouts_is_what_the_tests_measured() -> None:
    measured = json.loads((ROOT / "docs/parity.json").read_text())
    assert list(measured["cases"]) == [case.name for case in CASES], (
        "made of other tests: make it anew (tests/parity.py)"
    )
    assert f"-->\n\n{table(measured)}\n\n" in (ROOT / "README.md").read_text()
    for case in measured["cases"].values():
        for model in ("llama", "gpt"):
            for what, worst in case[model].items():
                assert worst <= TOLERANCES[what]


def test_what_float8_does_to_the_loss_is_what_the_runs_measured() -> None:
    page = (ROOT / "docs/float8.md").read_text()
    for folder, rate in (("docs/float8", "6e-4"), ("docs/float8/high_lr", "1.5e-3")):
        found = float8_quality.read(ROOT / folder)
        last = {name: losses[500] for name, losses in found.items()}
        assert all(len(losses) == 20 for losses in found.values())
        apart = [100 * (last[name] / last["baseline"] - 1) for name in float8_quality.VARIANTS[1:]]
        assert f"| {rate} | {last['baseline']:.4f} | " + " | ".join(f"{each:+.2f}%" for each in apart) + " |" in page
        assert rate != "6e-4" or max(map(abs, apart)) < 1.0


def test_what_optimizers_keep_is_what_was_counted() -> None:
    measured = json.loads((ROOT / "docs/optimizers.json").read_text())
    assert list(measured) == list(optimizers.VARIANTS)
    assert f"\n\n{optimizers.table(measured)}\n\n" in (ROOT / "docs/float8.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("cpu_*.json")), ids=lambda path: path.stem)
def test_the_tables_of_speed_are_what_was_measured(path: Path) -> None:
    measured = json.loads(path.read_text())
    assert figures.table([measured]).strip() in (ROOT / "docs/speed.md").read_text()
    assert measured["command"].endswith(f"--out benchmarks/results/{path.name}")
    assert all(one.get("losses_agree") for one in measured["rows"].values() if "failed" not in one)


def test_the_table_of_starts_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/startup_cpu.json").read_text())
    page = (ROOT / "docs/speed.md").read_text()
    assert f"\n\n{startup.table(measured)}\n\n" in page
    assert f"\n{measured['command']}\n" in page


def test_the_tables_of_checkpoints_are_what_was_measured() -> None:
    page = (ROOT / "docs/checkpoints.md").read_text()
    for program, file in ((soak, "soak_cpu.json"), (save_stall, "save_stall_cpu.json")):
        measured = json.loads((ROOT / "benchmarks/results" / file).read_text())
        assert f"-->\n\n{program.table(measured)}\n\n" in page
        assert f"\n{measured['command']}\n" in page
    killed = json.loads((ROOT / "benchmarks/results/soak_cpu.json").read_text())
    assert killed["differences"] == [] == killed["leftovers"]
    assert len(killed["kills"]) >= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_are_named_exist(page: Path) -> None:
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    for name in re.findall(r"`-{0,2}(\w+\.\w+)(?: ?=[^`]*)?`", page.read_text()):
        if name.partition(".")[0] in sections and name not in (
            "tokenizer.model",
            "tokenizer.json",
            "metrics.jsonl",
        ):  # files
            assert name in KEYS, name


def test_the_list_of_folders_is_that_of_the_package() -> None:
    text = (ROOT / "README.md").read_text()
    listed = text.split("```\nrun_train.sh")[1].split("```")[0]
    for path in (ROOT / "titanlike").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name.startswith("__") or f"  {name} " in listed, f"{name} is not on the README's map"


def test_the_table_of_recipes_has_the_counts_that_are_built() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "train_configs").glob("*.toml"):
        count = load(PretrainRecipe, path).model.num_parameters()
        assert re.search(rf"\[{path.stem}\].*\| {count:,} \|", text), f"{path.stem}: {count:,}"
