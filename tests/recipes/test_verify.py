"""`titanlike verify` as a user runs it, on a correct recipe and on programs with a planted error."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.launching import ROOT, python
from tests.recipes.test_copy import edited
from titanlike.config import PretrainRecipe, UserError, load
from titanlike.config.load import read
from titanlike.run.preflight import check_recipe
from titanlike.verify import Result, _parse, differences, shrink


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "titanlike.cli.main", "verify", *words)


def copied(folder: Path, old: str, new: str) -> str:
    """Writes a copy of the shipped program with one line changed, and a recipe for it."""
    (folder / "mine.py").write_text(edited((ROOT / "recipes/pretrain.py").read_text(), (old, new)))
    (folder / "mine.toml").write_text((ROOT / "train_configs/debug.toml").read_text().replace('"pretrain"', '"mine"'))
    return "mine.toml"


def test_a_shipped_recipe_is_equal_under_a_layout(tmp_path: Path) -> None:
    done = verify(
        tmp_path, str(ROOT / "train_configs/llama3_8b.toml"), "--layout", "tensor=2,pipeline=2", "--steps", "2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")
    assert "under pipeline 2 x tensor 2 (4 processes) against one process, 2 steps on the CPU" in done.stdout
    assert re.search(r"model\.dim +4096 -> 64\n", done.stdout)
    assert re.search(r"model\.vocab_size +128256 -> 320\n", done.stdout)
    first = re.search(r"^ +1 +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert (
        first
        and float(first[1]) == pytest.approx(float(first[2]))
        and float(first[3]) == pytest.approx(float(first[4]))
    )
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_loss_averaged_twice_is_detected(tmp_path: Path) -> None:
    recipe = copied(
        tmp_path,
        "            loss = model(**batch.inputs, labels=batch.labels) / num_tokens",
        "            loss = model(**batch.inputs, labels=batch.labels) / num_tokens / mesh.num_data_ranks",
    )
    done = verify(tmp_path, recipe, "--layout", "shard=2")
    assert done.returncode == 1
    assert done.stdout.endswith("\nNOT equal: loss, gradient norm, weights\n")
    assert verify(tmp_path, recipe, "--layout", "tensor=2").returncode == 0  # where the error has no effect


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param("layers.*.feed_forward", marks=pytest.mark.every),
        pytest.param("layers.*.ffn_norm", marks=pytest.mark.slow),
    ],
)
def test_a_module_missing_from_the_plan_is_detected(tmp_path: Path, entry: str) -> None:
    recipe = copied(
        tmp_path,
        "import torch\n",
        f"from titanlike.models.llama import TENSOR_PLAN\n\ndel TENSOR_PLAN[{entry!r}]\n\nimport torch\n",
    )
    done = verify(tmp_path, recipe, "--layout", "tensor=2")
    assert done.returncode == 1
    assert "NOT equal: tensor 2 ended with exit code " in done.stdout
    if entry.endswith("norm"):
        assert "the tensor-parallel plan of Llama does not name layers.0.ffn_norm; add it" in done.stderr


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_detected(tmp_path: Path) -> None:
    recipe = copied(
        tmp_path,
        "            norms = gradient_norms(model, mesh.pipeline)",
        "            if mesh.sizes['tensor'] > 1:\n"
        "                model.get_parameter('norm.weight').grad *= 0.5\n"
        "            norms = gradient_norms(model, mesh.pipeline)",
    )
    done = verify(tmp_path, recipe, "--layout", "tensor=2", "--steps=2")
    assert done.returncode == 1
    assert re.search(r"\nNOT equal: .*weights\n$", done.stdout)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tensr=2", "'tensr=2' is not KEY=VALUE with a key of [parallelism], such as tensor=2; did you mean tensor?"),
        ("tensor", "'tensor' is not KEY=VALUE with a key of [parallelism]"),
        ("tensor=0", "'tensor=0': give a number of processes, such as tensor=2"),
        ("shard=-1", "'shard=-1': give a number of processes"),
        ("tensor=8,pipeline=8", "more than 32 processes on one machine"),
    ],
)
def test_an_invalid_layout_is_reported(layout: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        _parse(layout)
    assert message in str(caught.value)


def test_a_layout_may_hold_a_list() -> None:
    chosen = _parse("pipeline=2,pipeline_split=[1, 3],tensor=2")
    assert (chosen["pipeline_split"], chosen["tensor"], chosen["shard"]) == ("[1, 3]", "2", "1")


def test_a_layout_that_the_real_size_excludes_is_reported(tmp_path: Path) -> None:
    done = verify(tmp_path, str(ROOT / "train_configs/llama3_8b.toml"), "--layout", "tensor=16")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "parallelism.tensor = 16 does not divide model.num_kv_heads = 8; use 1, 2, 4 or 8" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("recipe", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "layout",
    ["shard=2", "tensor=2,context=2", "tensor=4", "pipeline=2,pipeline_schedule=zbv", "pipeline=2,tensor=2,shard=2"],
)
def test_the_shrunk_recipe_is_valid_for_the_layout(recipe: Path, layout: str) -> None:
    from titanlike.config.model_configs import GPTConfig

    chosen = {f"parallelism.{key}": value for key, value in _parse(layout).items()}
    if load(PretrainRecipe, recipe).model.vocab_size % 2:
        chosen["model.vocab_size"] = "50304"
    values = load(PretrainRecipe, recipe, chosen)
    processes = 8 if "shard=2" in layout and "tensor" in layout else 4 if "tensor" in layout else 2
    as_dicts = {key: vars(value) for key, value in vars(values).items() if hasattr(value, "__dict__")}
    smaller = shrink(as_dicts, processes, steps=5)
    words = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in smaller.items()}
    made = load(PretrainRecipe, recipe, chosen | words)
    if made.parallelism.tensor <= getattr(values.model, "num_kv_heads", 64):
        check_recipe(made, processes)
    assert made.model.num_parameters() < 1_500_000 or isinstance(made.model, GPTConfig)
    assert read(recipe)


def test_nan_is_never_equal() -> None:
    import torch

    def made(loss: float) -> Result:
        return Result([1.0, loss], [1.0, 1.0], [1.0], {"model": {"w": torch.ones(2)}})

    assert differences(made(1.0), made(1.0))["loss"] == (0.0, "step 1")
    assert differences(made(float("nan")), made(1.0))["loss"] == (float("inf"), "step 2")
    spoiled = made(1.0)
    spoiled.state["model"]["w"] = torch.tensor([1.0, float("nan")])
    assert differences(spoiled, made(1.0))["weights"] == (float("inf"), "w")
