"""The schema that editors read, and the text of --help, follow the sections."""

import json
from pathlib import Path

import jsonschema
import pytest
import tomli

from titanlike.cli.main import main
from titanlike.config import PretrainRecipe
from titanlike.config.schema import describe, editor_schema, help_text

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))


def test_the_committed_schema_is_the_one_that_the_sections_give() -> None:
    committed = json.loads((ROOT / "recipe.schema.json").read_text())
    assert committed == editor_schema(PretrainRecipe), "run: titanlike schema > recipe.schema.json"


def test_the_schema_is_valid_draft_4() -> None:
    jsonschema.Draft4Validator.check_schema(editor_schema(PretrainRecipe))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_editor_finds_no_fault_in_a_shipped_recipe(path: Path) -> None:
    jsonschema.Draft4Validator(editor_schema(PretrainRecipe)).validate(tomli.loads(path.read_text()))


@pytest.mark.parametrize(
    "recipe",
    [
        {"training": {"stepz": 3}},
        {"training": {"steps": 0}},
        {"optimizer": {"lr": 0}},
        {"model": {"name": "gpt", "num_kv_heads": 2}},
        {"model": {"name": "lama"}},
        {"extends": 3},
    ],
)
def test_an_editor_marks_what_the_loader_refuses(recipe: dict[str, object]) -> None:
    assert not jsonschema.Draft4Validator(editor_schema(PretrainRecipe)).is_valid(recipe)


def test_help_has_every_key_with_its_kind_default_and_reason() -> None:
    text = help_text(PretrainRecipe, "usage")
    words = " ".join(text.split())
    for key in describe(PretrainRecipe):
        assert f"--{key.name} ({key.kind}; default {json.dumps(key.default)})" in words
        assert key.reason, f"{key.name} has no docstring below it"
        assert key.reason in words


def test_titanlike_schema_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["titanlike", "schema"])
    main()
    assert json.loads(capsys.readouterr().out) == editor_schema(PretrainRecipe)
