"""Tables of README.md and docs/recipes.md are what their programs print."""

import pytest

from benchmarks import other_projects, recipe_table
from tests.launching import ROOT
from titanlike.config.shipped import shipped_recipes


def test_the_readme_has_the_table_of_other_projects() -> None:
    assert f"\n\n{other_projects.table()}\n\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["llama3_1b", "llama3_8b", "qwen3_30b_a3b"])
def test_the_table_of_recipes_has_the_plan(name: str) -> None:
    cells = recipe_table.row(shipped_recipes()[name])
    assert f"\n| {' | '.join(cells)} |\n" in (ROOT / "docs/recipes.md").read_text()


@pytest.mark.slow
def test_the_table_of_recipes_is_complete() -> None:
    assert f"\n\n{recipe_table.table()}\n\n" in (ROOT / "docs/recipes.md").read_text()
