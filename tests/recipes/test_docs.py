"""The documentation is correct: its commands, code, keys, tables, files and links."""

import ast
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import titanlike
from benchmarks import (
    data_batches,
    data_prepare,
    figures,
    float8_quality,
    install,
    optimizers,
    quality_results,
    real_model,
    restart_bytes,
    routing,
    save_stall,
    soak,
    startup,
)
from tests.launching import ROOT, SMALL, free_port, python, run
from tests.parity import CASES, MOE_CASES, moe_table, summary, table
from tests.programs import PAGES, blocks
from tests.training import tiny, train
from titanlike.checkpoint.loader import read_whole
from titanlike.config.layout import DIMENSIONS
from titanlike.config.schema import describe
from titanlike.config.sections import DType, Tokenizer
from titanlike.data.batches.packed_dataset import BatchSource
from titanlike.tools.data.prepare import prepare
from titanlike.tools.programs import load_known, recipe_types
from titanlike.tools.sweep.results import table as sweep_table
from titanlike.tools.verify.recipe import TOLERANCES

KEYS = {key.name for recipe_type in recipe_types().values() for key in describe(recipe_type)}


def own_text(page: Path) -> str:
    """Returns the text without the keys and files of other projects, which coming_from.md has in its first column, and migration.md
    in the rows of their files."""
    text = re.sub(r"^\| \[[^]]*\]\(https://.*", "", page.read_text(), flags=re.MULTILINE)
    return re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE) if page.name == "coming_from.md" else text


def slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_readme_has_the_two_commands_that_ci_runs_once() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.count("pip install -e . && ./run_train.sh") == 1
    assert lines.count('pip install -e ".[dev]" && pytest') == 1
    assert len(lines) <= 120


def test_the_changelog_has_the_version() -> None:
    releases = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases[:2] == ["Unreleased", titanlike.__version__]
    assert f"Version {titanlike.__version__} " in (ROOT / "README.md").read_text()


def test_the_sagemaker_command_of_the_readme_runs(tmp_path: Path) -> None:
    (line,) = [line for block in blocks(ROOT / "README.md") for line in block.splitlines() if "sagemaker/" in line]
    program, recipe, *options = shlex.split(line, comments=True)[1:]
    done = python(tmp_path, str(ROOT / program), str(ROOT / recipe), *options)
    assert done.returncode == 0, done.stderr
    assert '"InstanceCount": 1' in done.stdout


def test_the_code_of_the_checkpoints_page_loads_a_run(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
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


def test_the_python_code_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "example.py").write_text(program)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    done = python(tmp_path, "example.py", variables=variables | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_the_loop_of_the_readme_is_that_of_the_program() -> None:
    (excerpt,) = blocks(ROOT / "README.md", "py")
    program = [line.strip() for line in (ROOT / "recipes/pretrain.py").read_text().splitlines()]
    for line in excerpt.splitlines():
        assert line.strip().partition("model, mesh, ...)")[0] in program


def test_the_page_for_users_of_other_projects_has_every_parallel_dimension() -> None:
    """A dimension that was added later is not described as missing."""
    text = (ROOT / "docs/coming_from.md").read_text()
    for project in re.split(r"^## ", text, flags=re.MULTILINE)[2:4]:  # torchtitan, Megatron-LM
        for dimension in (*(set(DIMENSIONS) - {"replicate", "shard"}), "expert"):
            assert f"| `parallelism.{dimension}` |" in project, (project.splitlines()[0], dimension)


def test_what_is_described_as_missing_was_not_added_later() -> None:
    text = (ROOT / "docs/coming_from.md").read_text().split("## What it is not\n")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, flags=re.MULTILINE)[1:]
    assert len(rows) >= 12
    files = [path for folder in ("titanlike", "recipes", "sagemaker") for path in (ROOT / folder).rglob("*.py")]
    imported = {
        name.partition(".")[0]
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
    }  # fmt: skip
    others = (
        "tensorflow jax torch_xla torch_neuronx torchft trl peft bitsandbytes gguf vllm fastapi flask huggingface_hub"
    )
    assert "torch" in imported and not imported & set(others.split())
    programs = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert programs == {"pretrain", "mlm", "seq2seq", "finetune", "dpo", "distill"}  # no reinforcement learning
    assert set(get_args(DType)) == {"float32", "bfloat16"}
    assert {path.stem for path in (ROOT / "titanlike/tools/clusters").glob("*.py")} == {
        "__init__", "cluster_job", "docker", "kubernetes", "skypilot", "slurm",
    }  # fmt: skip


@pytest.mark.slow
def test_the_quickstart_ends_with_a_continuation_by_transformers(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "docs/commands.md") if "pipeline(" in block]
    train_line, export_line, generate_line = (shlex.split(line, comments=True)[1:] for line in block.splitlines())
    # Fewer steps: the continuation is nonsense, and all lines run.
    trained = run(tmp_path, *train_line, **SMALL)
    assert trained.returncode == 0, trained.stderr
    exported = python(tmp_path, "-m", "titanlike.tools.cli.main", *export_line)
    assert exported.returncode == 0, exported.stderr
    done = subprocess.run([sys.executable, *generate_line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("def ") and len(done.stdout.strip()) > len("def "), done.stderr  # it may end early


def test_the_shard_format_is_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_data_tables_are_the_measurements() -> None:
    measurements = (
        (data_batches, "data_batches_cpu", "data"), (data_batches, "data_torchdata_cpu", "data"),
        (data_prepare, "data_prepare_cpu", "data"), (quality_results, "data_quality", "data_quality"),
    )  # fmt: skip
    for made_by, name, document in measurements:
        page = (ROOT / f"docs/{document}.md").read_text()
        measured = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for part in made_by.table(measured).strip().split("\n\n"):
            assert f"\n\n{part}\n\n" in page, name


def test_the_parity_table_is_what_the_tests_measured() -> None:
    measured = json.loads((ROOT / "docs/parity.json").read_text())
    assert list(measured["cases"]) == [case.name for case in CASES], (
        "docs/parity.json is outdated: record it again (tests/parity.py)"
    )
    assert f"-->\n\n{table(measured)}\n\n" in (ROOT / "docs/layouts.md").read_text() + "\n"
    assert summary(measured) in " ".join((ROOT / "README.md").read_text().split())
    for case in measured["cases"].values():
        for model in case.keys() - {"processes"}:
            for what, worst in case[model].items():
                assert worst <= TOLERANCES[what]


def test_the_parity_table_of_experts_is_what_the_tests_measured() -> None:
    measured = json.loads((ROOT / "docs/parity_moe.json").read_text())
    assert list(measured["cases"]) == list(MOE_CASES), "docs/parity_moe.json is outdated: record it again"
    assert f"-->\n\n{moe_table(measured)}\n" in (ROOT / "docs/mixture_of_experts.md").read_text()
    measured = json.loads((ROOT / "docs/parity_encoder_decoders.json").read_text())
    assert f"-->\n\n{moe_table(measured)}\n" in (ROOT / "docs/encoder_decoders.md").read_text()


def test_the_float8_losses_are_the_measurements() -> None:
    page = (ROOT / "docs/float8.md").read_text()
    for folder, rate in (("docs/float8", "6e-4"), ("docs/float8/high_lr", "1.5e-3")):
        found = float8_quality.read(ROOT / folder)
        last = {name: losses[500] for name, losses in found.items()}
        assert all(len(losses) == 20 for losses in found.values())
        differences = [100 * (last[name] / last["baseline"] - 1) for name in float8_quality.VARIANTS[1:]]
        assert (
            f"| {rate} | {last['baseline']:.4f} | " + " | ".join(f"{each:+.2f}%" for each in differences) + " |" in page
        )
        assert rate != "6e-4" or max(map(abs, differences)) < 1.0


def test_the_optimizer_table_is_the_measurement() -> None:
    measured = json.loads((ROOT / "docs/optimizers.json").read_text())
    assert list(measured) == list(optimizers.VARIANTS)
    assert f"\n\n{optimizers.table(measured)}\n\n" in (ROOT / "docs/float8.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("cpu_*.json")), ids=lambda path: path.stem)
def test_the_speed_tables_are_the_measurements(path: Path) -> None:
    measured = json.loads(path.read_text())
    assert figures.table([measured]).strip() in (ROOT / "docs/speed.md").read_text()
    assert measured["command"].endswith(f"--out benchmarks/results/{path.name}")
    assert all(one.get("losses_match") for one in measured["rows"].values() if "failed" not in one)


def test_the_startup_table_is_the_measurement() -> None:
    measured = json.loads((ROOT / "benchmarks/results/startup_cpu.json").read_text())
    page = (ROOT / "docs/speed.md").read_text()
    assert f"\n\n{startup.table(measured)}\n\n" in page
    assert f"\n{measured['command']}\n" in page


def test_the_size_of_an_installation_is_the_measurement() -> None:
    measured = json.loads((ROOT / "benchmarks/results/install.json").read_text())
    page = (ROOT / "docs/installing.md").read_text()
    assert install.sentence(measured) in " ".join(page.split())
    assert f"<!-- {measured['command']} -->" in page


def test_the_figures_of_a_published_model_are_the_measurement() -> None:
    measured = json.loads((ROOT / "benchmarks/results/real_model.json").read_text())
    page = (ROOT / "docs/hugging_face.md").read_text()
    assert real_model.paragraph(measured) in " ".join(page.split())
    assert f"\n{measured['command']}\n" in page
    found = measured["figures"]
    assert found["equal texts"] == found["equal texts of the exported model"] == len(real_model.PROMPTS)
    assert found["loss"] == pytest.approx(found["loss of transformers"], rel=real_model.LOSS_TOLERANCE)
    assert found["largest difference from PEFT"] < real_model.LOGIT_TOLERANCE * found["largest logit"]


def test_the_table_of_routing_is_the_measurement() -> None:
    measured = json.loads((ROOT / "benchmarks/results/routing_cpu.json").read_text())
    page = (ROOT / "docs/mixture_of_experts.md").read_text()
    assert f"\n\n{routing.table(measured)}\n\n" in page
    assert measured["command"] in " ".join(page.split())


def test_the_checkpoint_tables_are_the_measurements() -> None:
    page = (ROOT / "docs/checkpoints.md").read_text()
    for program, file in (
        (soak, "soak_cpu.json"),
        (save_stall, "save_stall_cpu.json"),
        (restart_bytes, "restart_bytes.json"),
    ):
        measured = json.loads((ROOT / "benchmarks/results" / file).read_text())
        assert f"-->\n\n{program.table(measured)}\n\n" in page
        assert f"\n{measured['command']}\n" in page
    runs = json.loads((ROOT / "benchmarks/results/soak_cpu.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [scenario.name for scenario in soak.SCENARIOS]
    assert all(run["differences"] == [] == run["leftovers"] and run["kills"] for run in runs)


def test_the_sweep_table_is_the_measurement() -> None:
    page = (ROOT / "docs/sweeps.md").read_text()
    measured = json.loads((ROOT / "benchmarks/results/sweep_cpu.json").read_text())
    assert f"\n```\n{sweep_table(measured['killed'])}\n```\n" in page
    assert measured["is_equal"] and measured["killed"] == measured["whole"] and len(measured["kills"]) == 2
    assert f"<!-- {measured['command']} -->" in page


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


def test_the_readme_links_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"({page.relative_to(ROOT)})" in text, page.name


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


def test_keys_of_other_projects_that_are_the_same_exist() -> None:
    rows = re.findall(r"^\| ([^|]*) \| the same \|", (ROOT / "docs/coming_from.md").read_text(), flags=re.MULTILINE)
    assert len(rows) >= 3
    for row in rows:
        first, *others = re.findall(r"`([\w.]+)`", row)
        section = first.partition(".")[0]
        names = [first, *(name if "." in name else f"{section}.{name}" for name in others)]
        assert KEYS.issuperset(names), names


def test_the_repository_layout_lists_every_package() -> None:
    text = (ROOT / "docs/how_it_works.md").read_text()
    layout = text.split("```\nrun_train.sh")[1].split("```")[0]
    for path in (ROOT / "titanlike").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name.startswith("__") or f"  {name} " in layout, f"{name} is not in the repository layout"


def test_the_table_of_recipes_has_the_parameter_counts() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    for path in (ROOT / "train_configs").glob("*.toml"):
        count = load_known(path, {}).model.num_parameters()
        assert re.search(rf"/{path.stem}\.toml\).*\| {count:,} \|", text), f"{path.stem}: {count:,}"
