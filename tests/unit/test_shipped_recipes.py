"""Every shipped recipe loads, passes the checks for its number of processes, and builds the published model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlike.config import PretrainRecipe, load
from titanlike.config.load import joined
from titanlike.models import build_model
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run.preflight import check_recipe
from titanlike.run.start import program_of
from titanlike.utils.dtensor import local_tensor

FOLDER = Path(__file__).parents[2] / "train_configs"

# Parameter counts, equal to the published ones (debug has none), and the number of processes in the recipe's comment.
SHIPPED = {
    "debug": (1_746_624, 1),
    "gpt2_124m": (124_439_808, 8),
    "gpt2_124m_c4": (124_439_808, 8),
    "llama3_1b": (1_235_814_400, 1),
    "llama3_1b_fineweb_edu": (1_235_814_400, 1),
    "llama3_8b": (8_030_261_248, 8),
    "llama3_8b_float8": (8_030_261_248, 8),
    **{f"study/{name}": (8_030_261_248, 8) for name in ("baseline", "compile", "float8", "float8_all_gather")},
    "llama3_70b": (70_553_706_496, 64),
    "llama3_405b": (405_853_388_800, 512),
}


def test_the_table_has_every_shipped_recipe() -> None:
    assert {str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_and_builds_the_published_model(name: str) -> None:
    count, processes = SHIPPED[name]
    path = FOLDER / f"{name}.toml"
    recipe = load(PretrainRecipe, path)
    check_recipe(recipe, processes)
    check_recipe(recipe, 8)  # `./run_train.sh` takes every GPU of a machine
    with torch.device("meta"):
        model = build_model(recipe.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert recipe.model.num_parameters() == count
    assert program_of(path).name == "pretrain.py"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, {}) for name in SHIPPED),
        ("llama3_70b", {"tensor": "8"}),
        ("llama3_405b", {"tensor": "8"}),
        ("llama3_405b", {"tensor": "8", "context": "4"}),
    ],
    ids=str,
)
def test_a_shipped_recipe_shards_over_its_number_of_processes(name: str, overrides: dict[str, str]) -> None:
    """Applies the transforms of the recipe at full size, on the meta device and a fake process group."""
    count, processes = SHIPPED[name]
    recipe = load(PretrainRecipe, FOLDER / f"{name}.toml", {f"parallelism.{key}": n for key, n in overrides.items()})
    check_recipe(recipe, processes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        layout = recipe.parallelism.resolve(processes)
        with torch.device("meta"):
            model = build_model(recipe.model)
        parallelize(
            model, build_mesh("cpu", **layout.dimensions()), split=[recipe.model.num_layers],
            training=recipe.training, parallelism=layout, activation_checkpoint=recipe.activation_checkpoint,
            compile=recipe.compile, float8=replace(recipe.float8, emulate=True),
        )  # fmt: skip
        local = [local_tensor(parameter) for parameter in model.parameters()]
        assert sum(shard.numel() for shard in local) == pytest.approx(count / processes, rel=1e-3)
        assert {shard.dtype for shard in local} == {torch.float32}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_joined_with_its_bases_is_equal(name: str, tmp_path: Path) -> None:
    text = joined(FOLDER / f"{name}.toml")
    assert "extends" not in text
    (tmp_path / "one.toml").write_text(text)
    # The fields of a model size are not written out, so that an override of the size still sets them.
    for keys in ({}, {"model.dim": "256"}):
        assert load(PretrainRecipe, tmp_path / "one.toml", keys) == load(PretrainRecipe, FOLDER / f"{name}.toml", keys)
