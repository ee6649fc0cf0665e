"""The documentation is correct: its commands, code, keys, tables, files and links."""

import ast
import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import tomli
import torch

import titanlike
from benchmarks import optimizers, published_gpu, real_model, results_page, sagemaker_study, soak
from docs import llms
from tests import parity
from tests.launching import ROOT, SMALL, python, run
from tests.pool import Ranks
from tests.programs import PAGES, blocks
from tests.training import tiny, train
from titanlike.checkpoint.loader import read_whole
from titanlike.config.layout import DIMENSIONS
from titanlike.config.schema import describe
from titanlike.config.sections import Tokenizer
from titanlike.config.shipped import recipe_path, shipped_recipes
from titanlike.models.families import FAMILIES, config_class
from titanlike.tools.data.prepare import prepare
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.plan import plan_or_none
from titanlike.tools.planning.report import brief
from titanlike.tools.programs import load_known, recipe_types

KEYS = {key.name for recipe_type in recipe_types().values() for key in describe(recipe_type)}


def own_text(page: Path) -> str:
    """Returns the text without the keys of other projects, which coming_from.md has in its first column, and results.md in the
    rows of public files."""
    text = re.sub(r"^\| \[[^]]*\]\(https://.*", "", page.read_text(), flags=re.MULTILINE)
    return re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE) if page.name == "coming_from.md" else text


def slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_changelog_has_the_version() -> None:
    releases = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases[:2] == ["Unreleased", titanlike.__version__]
    assert f"Version {titanlike.__version__} " in (ROOT / "README.md").read_text()


def test_the_code_of_the_checkpoints_page_loads_a_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain PyTorch, from shards that two ranks saved."""
    recipe = tiny(
        tmp_path / "runs", "NAME", training=dict(steps=2), schedule=dict(warmup_steps=1), validation=dict(interval=0),
    )  # fmt: skip
    train(ranks(2), recipe)
    step = tmp_path / "runs/NAME/checkpoints/step-00000002"
    expected = read_whole(step)
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(ROOT / "docs/checkpoints.md", "python")
    assert "titanlike" not in program
    found: dict[str, Any] = {}
    exec(program.replace("step-00001000", step.name), found)
    assert found["weights"].keys() == expected["model"].keys()
    assert all(torch.equal(value, expected["model"][name]) for name, value in found["weights"].items())
    state = {
        name.removeprefix("optimizer."): v for name, v in found["tensors"].items() if name.startswith("optimizer.")
    }
    assert state.keys() == expected["optimizer"].keys()
    assert all(torch.equal(value, expected["optimizer"][name]) for name, value in state.items())


def test_the_loop_of_the_readme_is_that_of_the_program() -> None:
    (excerpt,) = blocks(ROOT / "README.md", "py")
    program = (ROOT / "recipes/pretrain.py").read_text()
    assert program.endswith(f'{indent(excerpt, " " * 8)}\n\nif __name__ == "__main__":\n    main(recipe)\n')
    (main,) = [node for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)]
    assert main.end_lineno and main.end_lineno - main.lineno < 50 and len(program.splitlines()) <= 90


def test_the_page_for_users_of_other_projects_has_every_parallel_dimension() -> None:
    """A dimension that was added later is not described as missing."""
    text = (ROOT / "docs/coming_from.md").read_text()
    for heading in ("Keys of torchtitan", "Options of Megatron-LM"):
        project = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        for dimension in (*(set(DIMENSIONS) - {"replicate", "shard"}), "expert"):
            assert f"| `parallelism.{dimension}` |" in project, (heading, dimension)


@pytest.mark.slow
def test_the_quickstart_ends_with_a_continuation_by_transformers(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "docs/quickstart.md") if "pipeline(" in block]
    export_line, generate_line = (shlex.split(line, comments=True)[1:] for line in block.splitlines())
    # A small model after a few steps: the continuation is nonsense, and both lines run.
    trained = run(tmp_path, "--run.name=tonight", **SMALL)
    assert trained.returncode == 0, trained.stderr
    exported = python(tmp_path, "-m", "titanlike.tools.cli.main", *export_line)
    assert exported.returncode == 0, exported.stderr
    done = subprocess.run([sys.executable, *generate_line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("The moon is") and len(done.stdout.strip()) > len("The moon is"), (
        done.stderr
    )  # it may end early


def test_the_shard_format_is_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *_ = blocks(ROOT / "docs/data.md", "python")
    (tmp_path / "a.txt").write_text("the first")
    (tmp_path / "b.txt").write_text("the second")
    prepare([str(tmp_path / "*.txt")], tmp_path / "data/corpus", Tokenizer(), workers=0)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)
    assert bytes(names["first"][:-1].tolist()) == b"the first"
    assert names["documents"].tolist() == [[10, 0], [21, 10]]


def test_the_page_of_results_is_generated() -> None:
    assert (ROOT / "docs/results.md").read_text() == results_page.page(), (
        "python -m benchmarks.results_page > docs/results.md"
    )


def test_the_measurements_name_the_commands_that_record_them() -> None:
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        measured = json.loads(path.read_text())
        if isinstance(measured, dict) and " --out " in (command := measured.get("command", "")):
            assert f"--out benchmarks/results/{path.name}" in command, path.name


# What other pages show of a measurement: the page, the recorded measurement, and what makes text of it.
SHOWN: list[tuple[str, str, Callable[[Any], str]]] = [
    ("README.md", "docs/parity.json", parity.summary),
    ("benchmarks/LOG.md", "benchmarks/results/real_model.json", real_model.paragraph),
    ("benchmarks/LOG.md", "benchmarks/results/published_gpu.json", published_gpu.markdown),
]  # fmt: skip


@pytest.mark.parametrize(("page", "measurement", "text"), SHOWN, ids=lambda value: str(value) * (not callable(value)))
def test_a_page_shows_what_was_measured(page: str, measurement: str, text: Callable[[Any], str]) -> None:
    shown, measured = (ROOT / page).read_text(), json.loads((ROOT / measurement).read_text())
    for part in text(measured).strip().split("\n\n"):
        assert f"\n{part}\n" in shown or f" {part}" in " ".join(shown.split())


def test_the_plans_of_published_runs_are_those_of_today() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/published_gpu.json").read_text())["runs"]
    assert recorded == published_gpu.plans(), "record them again (benchmarks/published_gpu.py)"


# The table of docs/sagemaker.md: the name of a plan, and the keys that it changes.
BEST = "`best.toml`: also float8 and `training.local_batch_size = 2`"
SAGEMAKER_PLANS: dict[str, dict[str, str]] = {
    "the recipe with these two keys": {}, "with `--activation_checkpoint.mode=none`": {"activation_checkpoint.mode": "none"},
    BEST: {
        "activation_checkpoint.mode": "none", "training.local_batch_size": "2", "float8.scaling": "tensorwise",
        "float8.all_gather": "true",
    },
}  # fmt: skip


def test_the_cost_of_jobs_is_that_of_today() -> None:
    assert f"\n{sagemaker_study.cost()}\n" in (ROOT / "benchmarks/LOG.md").read_text()
    page = (ROOT / "docs/sagemaker.md").read_text()
    found = {}
    for name, keys in SAGEMAKER_PLANS.items():
        recipe = load_known(recipe_path("llama3_8b"), {"model.size": "3.1-8B", "training.steps": "95_000", **keys})
        plan = plan_or_none(recipe, 32, load_hardware("ml.p5.48xlarge"))
        assert plan and plan.dollars
        found[name] = plan
        figures = f"{plan.reserved / 2**30:.1f} | {plan.tokens_per_second_per_gpu:,.0f} | {plan.hours:.1f} | ${plan.dollars:,.0f}"
        assert f"\n| {name} | {figures} |\n" in page
    best = found[BEST]
    assert f"\nplan        {brief(best)}\n" in page
    minutes = best.job.recipe.checkpoint.interval * best.time.seconds / 60
    prose = " ".join(page.split())
    assert f"steps, here {best.job.recipe.checkpoint.interval}, planned as {minutes:.0f} minutes" in prose
    assert f"{100 * best.time.seconds / 60:.0f}" == "4" and "train 100 steps, planned as four minutes" in prose
    rows = json.loads((ROOT / "benchmarks/results/planner_validation.json").read_text())["rows"]
    errors = [row["error"] for row in rows if row["table"] in ("SageMaker study", "AWS sample")]
    assert f"[{min(errors):.0%} to {max(errors):.0%} higher](results.md#accuracy-of-plans)" in prose
    assert 1 / (1 + max(errors)) < best.range.low


@pytest.mark.slow
def test_the_search_of_the_sagemaker_page_writes_its_recipe(tmp_path: Path) -> None:
    (line,) = [
        line for block in blocks(ROOT / "docs/sagemaker.md") for line in block.splitlines() if "--search" in line
    ]
    done = python(tmp_path, "-m", *shlex.split(line))
    assert done.returncode == 0, done.stderr
    values = tomli.loads((tmp_path / "best.toml").read_text())
    del values["extends"]
    found = {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}
    assert {key: str(value).lower() for key, value in found.items()} == {
        "model.size": "3.1-8b", "training.steps": "95000", **SAGEMAKER_PLANS[BEST]
    }  # fmt: skip


def test_all_cases_are_measured() -> None:
    for measurement, cases in (
        ("docs/parity.json", [case.name for case in parity.CASES]), ("docs/parity_moe.json", [*parity.MOE_CASES]),
    ):  # fmt: skip
        assert list(json.loads((ROOT / measurement).read_text())["cases"]) == cases, "record it again (tests/parity.py)"
    assert list(json.loads((ROOT / "docs/optimizers.json").read_text())["variants"]) == list(optimizers.VARIANTS)
    runs = json.loads((ROOT / "benchmarks/results/soak_cpu.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [scenario.name for scenario in soak.SCENARIOS]


def messages() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    return re.findall(r"^(?:error|warning): (.+)$", text, flags=re.MULTILINE)


@functools.cache
def literals(folder: Path) -> list[tuple[list[str], re.Pattern[str]]]:
    """Returns the constant parts of each string literal, and a pattern with a group for each, and any text for formatted values."""
    patterns: dict[str, list[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(len(text) for text in texts if isinstance(text, str)) >= 12:
                pattern = "".join(f"({re.escape(text)})" if isinstance(text, str) else ".*?" for text in texts)
                patterns[pattern] = [text for text in texts if isinstance(text, str)]
    return [(parts, re.compile(pattern)) for pattern, parts in patterns.items()]


@pytest.mark.parametrize("message", messages(), ids=lambda message: message[:40])
def test_a_message_of_the_troubleshooting_page_is_printed_by_the_program(message: str) -> None:
    covered: set[int] = set()
    for parts, pattern in literals(ROOT / "titanlike"):
        # A search that fails is slow: each `.*?` tries every length.
        if all(part in message for part in parts) and (match := pattern.search(message)):
            covered |= {i for group in range(1, len(match.groups()) + 1) for i in range(*match.span(group))}
    assert len(covered) >= 0.6 * len(message), "".join(c if i in covered else "_" for i, c in enumerate(message))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https://)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_the_index_has_every_page() -> None:
    trees = re.findall(
        r"^```{toctree}\n(.*?)^```", (ROOT / "docs/index.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert len(listed) == len(set(listed))
    pages = {*PAGES, *(ROOT / "docs/api").glob("*.md")} - {ROOT / "docs/index.md"}
    assert {(ROOT / f"docs/{name}.md").resolve() for name in listed} >= pages


def test_llms_txt_has_every_page_with_a_sentence() -> None:
    lines = [line for line in llms.text().splitlines() if line.startswith("- ")]
    for page, line in zip(llms.pages(), lines, strict=True):
        assert re.fullmatch(rf"- \[.+\]\(_sources/{page.relative_to(ROOT)}\.txt\): .+", line), line


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_names_modules_that_exist(picture: Path) -> None:
    names = re.findall(r'<text class="c"[^>]*>([^<]+)<', picture.read_text())
    assert names
    for name in ", ".join(names).split(", "):
        assert (ROOT / "titanlike" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", own_text(page)):
        assert (ROOT / name).exists() or (ROOT / "titanlike" / name).exists() or name.startswith("custom/"), name


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_keys_that_are_named_exist(page: Path) -> None:
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    for name in re.findall(r"`-{0,2}(\w+\.\w+)(?: ?=[^`]*)?`", own_text(page)):
        is_file = name in ("tokenizer.model", "tokenizer.json", "metrics.jsonl", "mlm.py", "seq2seq.py")
        if name.partition(".")[0] in sections and not is_file:
            assert name in KEYS, name


def test_the_page_for_users_of_other_projects_has_the_measured_figures() -> None:
    page = (ROOT / "docs/coming_from.md").read_text()
    models = json.loads((ROOT / "benchmarks/results/other_checkpoints.json").read_text())["models"]
    difference = max(
        abs(found[str(step)] - runs[name.partition(",")[0]][str(step)])
        for runs in models.values()
        for name, found in runs.items()
        for step in range(11, 16)
    )
    assert f"[differ by at most {difference:.1e}](results.md" in page and difference < 1e-5
    rows = json.loads((ROOT / "benchmarks/results/null_gpu_side_by_side.json").read_text())["cases"]["1b"]
    host = {name: f"{min(rows[name]['host_cpu_ms']):.1f}" for name in ("titanlike", "torchtitan", "torchtitan_0_2")}
    assert f"{host['titanlike']} ms of CPU time in a step" in page
    assert f"with CUDA graphs {host['torchtitan']}, 0.2.2 {host['torchtitan_0_2']} |" in page


def test_keys_of_other_projects_that_are_the_same_exist() -> None:
    rows = re.findall(r"^\| ([^|]*) \| the same \|", (ROOT / "docs/coming_from.md").read_text(), flags=re.MULTILINE)
    assert len(rows) >= 3
    for row in rows:
        first, *others = re.findall(r"`([\w.]+)`", row)
        section = first.partition(".")[0]
        names = [first, *(name if "." in name else f"{section}.{name}" for name in others)]
        assert KEYS.issuperset(names), names


def test_the_table_of_models_has_every_family_and_size() -> None:
    rows = [line for line in (ROOT / "docs/models.md").read_text().splitlines() if line.startswith("| `")]
    for name in FAMILIES:
        row = next(row for row in rows if f"`{name}`" in row.split("|")[1])
        for size in config_class(name).sizes:
            assert f"`{size}`" in row or size == "debug", f"{name}: {size}"


def test_the_repository_layout_lists_every_package() -> None:
    text = (ROOT / "docs/how_it_works.md").read_text()
    layout = text.split("```\nrun_train.sh")[1].split("```")[0]
    for path in (ROOT / "titanlike").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name.startswith("__") or f"  {name} " in layout, f"{name} is not in the repository layout"


def test_the_table_of_recipes_has_the_parameter_counts() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    for name, path in shipped_recipes().items():
        count = load_known(path, {}).model.num_parameters()
        is_stage = name.startswith("stages/")  # a row for all three
        assert is_stage or re.search(rf"/{name}\.toml\).*\| {count:,} \|", text), f"{name}: {count:,}"
