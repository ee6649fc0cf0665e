"""The JSON Schema, the configuration reference and `--help` are generated from the sections."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import tomli

from tests.launching import Cli
from titanlike.config import UserError
from titanlike.config.help import help_text
from titanlike.config.schema import describe
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.tools.programs import recipe_types
from titanlike.tools.schema import editor_schema, markdown

ROOT = Path(__file__).parents[2]
PROGRAMS = recipe_types()
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))


def test_the_committed_schema_is_up_to_date() -> None:
    committed = json.loads((ROOT / "recipe.schema.json").read_text())
    assert committed == editor_schema(PROGRAMS), "run: titanlike schema > recipe.schema.json"


def test_the_committed_configuration_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs/config.md").read_text()
    assert committed == markdown(PROGRAMS), "run: titanlike schema --markdown > docs/config.md"


def test_the_configuration_reference_has_every_key() -> None:
    rows = markdown(PROGRAMS).splitlines()
    for key in (*describe(DpoRecipe), *describe(DistillRecipe)):
        if key.name.startswith("teacher."):  # the keys of `model`
            continue
        found = [row for row in rows if row.startswith(f"| `{key.name}` | ") and f"{key.doc} " in row]
        parts = [f"`{json.dumps(key.default)}`", *(f"`{choice}`" for choice in key.choices)]
        assert any(all(part in row for part in parts) for row in found)


def test_the_schema_is_valid_draft_4() -> None:
    jsonschema.Draft4Validator.check_schema(editor_schema(PROGRAMS))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_matches_the_schema(path: Path) -> None:
    jsonschema.Draft4Validator(editor_schema(PROGRAMS)).validate(tomli.loads(path.read_text()))


@pytest.mark.parametrize(
    "recipe",
    [
        {"training": {"stepz": 3}},
        {"training": {"steps": 0}},
        {"optimizer": {"lr": 0}},
        {"model": {"name": "gpt", "num_kv_heads": 2}},
        {"model": {"name": "lama"}},
        {"extends": 3},
        {"preference": {"loss": "ppo"}},
        {"distillation": {"loss": "forward"}},
        {"teacher": {"name": "lama"}},
        {"data": {"source": "preferences"}},
    ],
)
def test_the_schema_rejects_what_the_loader_rejects(recipe: dict[str, object]) -> None:
    assert not jsonschema.Draft4Validator(editor_schema(PROGRAMS)).is_valid(recipe)


def test_help_has_every_key_with_its_type_default_and_documentation() -> None:
    text = " ".join(help_text(FinetuneRecipe, "all").split())
    for key in describe(FinetuneRecipe):
        assert f"--{key.name} ({key.type}; default {json.dumps(key.default)})" in text
        assert key.doc, f"{key.name} has no docstring"
        assert key.doc in text


def test_help_lists_the_sections_and_explains_one_of_them() -> None:
    overview = help_text(FinetuneRecipe, "").splitlines()
    start = overview.index("sections (--help SECTION):")
    usage, overview = overview[:start], overview[start:]
    names = [line.split()[0] for line in overview[1:]]
    assert usage[0].startswith("usage: ") and usage[-1] == ""
    assert names == list(dict.fromkeys(key.name.partition(".")[0] for key in describe(FinetuneRecipe)))
    assert len(overview) < 30 and all(len(line) <= 120 for line in overview)
    assert next(line for line in overview if " schedule " in line).split()[1:3] == ["4", "keys"]
    for topic in ("schedule", "[schedule]"):
        found = help_text(FinetuneRecipe, topic)
        assert re.findall(r"^  --(\S+)", found, flags=re.MULTILINE) == [
            key.name for key in describe(FinetuneRecipe) if key.name.startswith("schedule.")
        ]
    assert re.findall(r"^  --(\S+)", help_text(FinetuneRecipe, "training.steps"), flags=re.MULTILINE) == [
        "training.steps"
    ]
    with pytest.raises(UserError, match=r"^--help trainin: no such section or key; did you mean --help training\?$"):
        help_text(FinetuneRecipe, "trainin")


def test_titanlike_schema_prints_both_forms(cli: Cli) -> None:
    assert json.loads(cli("schema").out) == editor_schema(PROGRAMS)
    assert cli("schema", "--markdown").out == markdown(PROGRAMS)
