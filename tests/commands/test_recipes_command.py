"""`titanlike recipes`, names of shipped recipes, and the command that messages name."""

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.launching import Cli
from titanlike.config.shipped import REPOSITORY, recipe_path, shipped_recipes, train_command
from titanlike.recipe import load
from titanlike.run.start import program_of
from titanlike.tools.programs import SHIPPED


@pytest.mark.parametrize("name", ["debug", "finetune_debug", "llama3_8b_float8", "study/float8"])
def test_a_copy_is_the_same_recipe_with_a_program_of_its_own(name: str, tmp_path: Path, cli: Cli) -> None:
    cli("recipes", "copy", name, tmp_path / "my")
    shipped = recipe_path(name)
    copied = tmp_path / "my" / shipped.name
    assert program_of(copied) == copied.with_suffix(".py")
    assert program_of(copied).read_text() == program_of(shipped).read_text()
    recipe_type = SHIPPED[program_of(shipped)]
    expected = dataclasses.replace(load(recipe_type, shipped), program=copied.stem)
    assert load(recipe_type, copied) == expected
    assert copied.read_text().startswith("# ")  # the comment, without the path of the schema


def test_a_copy_replaces_no_file(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "mine.py").write_text("mine")
    for name, path, message in (
        ("debug", "mine.toml", f"{tmp_path}/mine.py exists; choose another name"),
        ("debug", "mine.txt", "mine.txt: give a folder, or the file of a recipe, which ends in .toml"),
        ("debgu", ".", "debgu is not a shipped recipe; did you mean debug?"),
    ):
        assert message in cli("recipes", "copy", name, tmp_path / path, code=2).err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_a_misspelled_command_is_compared_with_the_commands(cli: Cli) -> None:
    assert "error: trian is not a command; did you mean titanlike train?" in cli("trian", code=2).err
    assert "choose from" in cli("xxxx", code=2).err


def test_the_list_has_a_line_for_each_recipe(cli: Cli) -> None:
    lines = cli("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    programs = ("pretrain", "mlm", "seq2seq", "finetune", "dpo", "distill")
    assert all(line.split()[1] in programs and line.endswith(".") for line in lines)


def test_messages_name_the_command_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert train_command() == "./run_train.sh"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_train.sh").write_text("")  # another program
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert train_command() == f"{REPOSITORY}/run_train.sh"  # a clone that is not installed
    (tmp_path / "titanlike").write_text("")
    assert train_command() == "titanlike train"
