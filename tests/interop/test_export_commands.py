"""`titanlike export` and `titanlike import` as a user calls them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interop.models import LLAMA, T5, export_model, model_of
from tests.launching import ROOT, SMALL, python, run
from titanlike.interop.hf_folder import fields_of
from titanlike.models.llama.config import LLAMA_SIZES, LlamaConfig
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools.programs import load_known


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two checkpoints."""
    folder: Path = tmp_path_factory.mktemp("commands")
    options = SMALL | {"training.steps": "4", "checkpoint.interval": "2"}
    done = run(folder, **options, **{"run.name": "first"})
    assert done.returncode == 0, done.stderr
    return folder


def titanlike(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "titanlike.tools.cli.main", *words)


def test_export_and_import(runs: Path, tmp_path: Path) -> None:
    done = titanlike(runs, "export", "runs/first", str(tmp_path / "model"), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "bytes of weights, from runs/first/checkpoints/step-00000004\n" in done.stdout
    earlier = titanlike(runs, "export", "runs/first", str(tmp_path / "earlier"), "--step", "2")
    assert "from runs/first/checkpoints/step-00000002\n" in earlier.stdout
    done = titanlike(runs, "import", str(tmp_path / "model"), str(tmp_path / "next.toml"))
    assert done.returncode == 0, done.stderr
    # The recipe needs data, and has a learning rate for weights that are trained.
    checked = run(tmp_path, "next.toml", "--check", "2")
    message = "error: data.source = 'chat' requires data.path, which is empty; set it, or data.mixture\n"
    assert (checked.returncode, checked.stderr) == (2, message)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 99)
    options = {"data.path": str(tmp_path / "chats.jsonl")}
    checked = run(tmp_path, "next.toml", "--check", "2", **options)
    assert checked.returncode == 0, checked.stderr
    imported = load_known(tmp_path / "next.toml", options)
    assert imported.optimizer.lr == 1e-5 and imported.schedule.decay == "cosine"


@pytest.mark.parametrize("config", [LLAMA, T5], ids=lambda value: value.name)
def test_a_folder_says_its_size(config: Any, tmp_path: Path) -> None:
    folder = export_model(model_of(config), config, tmp_path / "hf")
    sizes = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    assert sizes == {"total_size": 4 * config.num_parameters(), "total_parameters": config.num_parameters()}


def test_a_config_has_the_name_of_its_published_size() -> None:
    published = LlamaConfig.published(LLAMA_SIZES["3.2-1B"])
    assert published.size == "3.2-1B"
    assert LlamaConfig.from_hugging_face(published.to_hugging_face()) == published
    assert fields_of(published) == {"name": "llama", "size": "3.2-1B"}
    # Of a size, with other values in its folder.
    changed = LlamaConfig.published({**LLAMA_SIZES["3.2-1B"], "norm_eps": 1e-6})
    fields = fields_of(changed)
    assert fields == {"name": "llama", "size": "3.2-1B", "norm_eps": 1e-6}
    assert (
        load(
            PretrainRecipe,
            ROOT / "train_configs/debug.toml",
            {f"model.{key}": str(value) for key, value in fields.items()},
        ).model
        == changed
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "runs/frist", "out"], "runs/frist does not exist; give a run directory, a checkpoint or a Hugging Face"),
        (["export", "runs/first/recipe.toml", "out"], "runs/first/recipe.toml is a file; give a run directory"),
        (["export", "runs", "out"], "runs contains no checkpoint and no config.json"),
        (["export", "runs/first", "runs"], "runs exists; choose another name, or remove it"),
        (["export", "runs/first", "out", "--step", "3"], "runs/first/checkpoints has no step 3; it contains steps 2, 4"),
        (["export", "runs/first", "runs/first/recipe.toml/out"], "cannot be written: Not a directory"),
        (["import", "runs", "out.toml"], "runs contains no checkpoint and no config.json"),
    ],
)  # fmt: skip
def test_a_mistake_has_one_message(runs: Path, words: list[str], message: str) -> None:
    before = sorted(runs.rglob("*"))
    done = titanlike(runs, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") or (message in done.stderr and done.stderr.startswith("error: "))
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert sorted(runs.rglob("*")) == before


def test_a_damaged_checkpoint_and_another_tokenizer_are_not_exported(runs: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", str(runs / "runs/first"), str(tmp_path / "copy")], check=True)
    [file] = (tmp_path / "copy/checkpoints/step-00000004").glob("rank-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = titanlike(tmp_path, "export", "copy", "out")
    assert "rank-00000.safetensors is corrupt: SHA-256 mismatch" in done.stderr and done.returncode == 2
    assert not (tmp_path / "out").exists()


def test_the_recipe_is_not_overwritten(tmp_path: Path) -> None:
    export_model(model_of(LLAMA), LLAMA, tmp_path / "hf")
    (tmp_path / "mine.toml").write_text("# mine\n")
    done = titanlike(tmp_path, "import", "hf", "mine.toml")
    assert done.stderr == "error: mine.toml exists; choose another name, or remove it\n"
    assert (tmp_path / "mine.toml").read_text() == "# mine\n"
