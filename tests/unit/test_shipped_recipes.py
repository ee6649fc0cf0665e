"""Every shipped recipe loads, is right for the machines it names, and builds the published model."""

from pathlib import Path

import pytest
import torch

from titanlike.check import check
from titanlike.config import PretrainRecipe, load
from titanlike.models import build_model
from titanlike.start import program_of

FOLDER = Path(__file__).parents[2] / "train_configs"

# Published parameter counts, to the digit (debug is our own), and the processes that the recipe's comment names.
SHIPPED = {
    "debug": (1_746_624, 1),
    "gpt2_124m": (124_439_808, 8),
    "llama3_1b": (1_235_814_400, 1),
    "llama3_8b": (8_030_261_248, 8),
    "llama3_70b": (70_553_706_496, 64),
    "llama3_405b": (405_853_388_800, 512),
}


def test_this_table_has_every_shipped_recipe() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_and_builds_the_published_model(name: str) -> None:
    count, processes = SHIPPED[name]
    path = FOLDER / f"{name}.toml"
    recipe = load(PretrainRecipe, path)
    check(recipe, processes)
    check(recipe, 8)  # `./run_train.sh` takes every GPU of a machine
    with torch.device("meta"):
        model = build_model(recipe.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert recipe.model.num_parameters() == count
    assert program_of(path).name == "pretrain.py"
