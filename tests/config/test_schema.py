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
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.tools.programs import recipe_types
from titanlike.tools.schema import editor_schema, markdown

ROOT = Path(__file__).parents[2]
PROGRAMS = recipe_types()


def test_the_committed_schema_is_up_to_date() -> None:
    committed = json.loads((ROOT / "recipe.schema.json").read_text())
    assert committed == editor_schema(PROGRAMS), "run: titanlike schema > recipe.schema.json"


def test_the_committed_configuration_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs/config.md").read_text()
    assert committed == markdown(PROGRAMS), "run: titanlike schema --markdown > docs/config.md"


def test_the_schema_is_valid_draft_4() -> None:
    jsonschema.Draft4Validator.check_schema(editor_schema(PROGRAMS))


def test_shipped_recipes_match_the_schema() -> None:
    validator = jsonschema.Draft4Validator(editor_schema(PROGRAMS))
    for path in (ROOT / "train_configs").glob("*.toml"):
        validator.validate(tomli.loads(path.read_text()))


def test_the_schema_rejects_what_the_loader_rejects() -> None:
    validator = jsonschema.Draft4Validator(editor_schema(PROGRAMS))
    for recipe in (
        {"training": {"stepz": 3}},
        {"training": {"steps": 0}},
        {"model": {"name": "gpt", "num_kv_heads": 2}},
        {"model": {"name": "lama"}},
        {"extends": 3},
        {"preference": {"loss": "ppo"}},
        {"teacher": {"name": "lama"}},
    ):
        assert not validator.is_valid(recipe), recipe


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
