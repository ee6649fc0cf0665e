"""Keys without effect: what the fields state about themselves is true of every field that states something."""

import ast
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.launching import nested
from titanlike.config import UserError, effect
from titanlike.config.base import OnlyWith, section
from titanlike.config.layout import DIMENSIONS
from titanlike.config.sections import Data
from titanlike.config.shipped import PROGRAMS, recipe_path
from titanlike.models.families import all_configs
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.load import dump
from titanlike.run.checks import check_recipe
from titanlike.tools.programs import effective_overrides, load_known, recipe_types
from titanlike.tools.verify.small_recipe import shrink

PACKAGE = PROGRAMS.parent / "titanlike"
# Values to try for a field; those that its type refuses are left out.
VALUES: tuple[Any, ...] = (
    False, True, 0, 1, 2, 64, 0.25, 0.5, 32.0, "", "x", [], ["x"], [1], [64], ["mlflow"], [{"optimizer": "muon"}],
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A field that states a condition, in a recipe of a program."""

    recipe_type: type[PretrainRecipe]
    section: str
    name: str
    condition: OnlyWith
    fixed: tuple[tuple[str, Any], ...] = ()  # keys that select the type of the section

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def keys(self) -> list[str]:
        return [key if "." in key else f"{self.section}.{key}" for key in self.condition.keys]

    def class_of(self, name: str) -> Any:
        """Returns the class of a section; None if the program does not have it."""
        if name == self.section and self.fixed:
            return next(config for config in all_configs() if config.name == self.fixed[0][1])
        return type(getattr(self.recipe_type, name)) if hasattr(self.recipe_type, name) else None

    def table(self, values: dict[str, Any]) -> str:
        """Returns the text of a recipe with these keys."""
        return dump(nested(dict(self.fixed) | values))

    @property
    def default(self) -> Any:
        return self.class_of(self.section).__dataclass_fields__[self.name].default

    def assignment(self, *, holds: bool) -> dict[str, Any]:
        """Returns values of the field and of what its condition depends on, with which the condition holds or does not. It is empty
        if the program has none."""
        keys = list(dict.fromkeys([*self.keys, self.key]))
        for chosen in itertools.product(*(values_of(self, key) for key in keys)):
            values = dict(zip(keys, chosen, strict=True))
            found = bool(self.condition.holds(*(values[key][1] for key in self.keys)))
            if values[self.key][1] != self.default and found == holds:
                return {key: raw for key, (raw, _) in values.items() if raw is not None}
        return {}

    def problems(self, recipe: Any) -> list[str]:
        """Returns the errors that name the field as one without effect."""
        return [text for text in effect.problems(recipe) if f"{self.key} = " in text.split(" no effect ")[0]]


@cache
def values_of(case: Case, key: str) -> list[tuple[Any, Any]]:
    """Returns values that a key may have, as TOML has them, where the default is None, and as the recipe has them."""
    name, _, field = key.partition(".")
    cls = case.class_of(name)
    if cls is None or field not in cls.__pydantic_fields__:
        return [(None, None)]
    info, found = cls.__pydantic_fields__[field], [(None, cls.__dataclass_fields__[field].default)]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    adapter = TypeAdapter(cls)
    for raw in (*choices, *VALUES):
        try:
            parsed = getattr(adapter.validate_json(json.dumps({field: raw})), field)
        except ValidationError:
            continue
        if parsed not in [other for _, other in found]:
            found.append((raw, parsed))
    return found


def cases() -> Iterator[Case]:
    for recipe_type in recipe_types().values():
        for field in dataclasses.fields(recipe_type):
            if field.name in ("model", "teacher"):
                continue
            for name, info in getattr(type(field.default), "__pydantic_fields__", {}).items():
                for condition in (each for each in info.metadata if isinstance(each, OnlyWith)):
                    yield Case(recipe_type, field.name, name, condition)
    for config in all_configs():
        for name, info in config.__pydantic_fields__.items():
            for condition in (each for each in info.metadata if isinstance(each, OnlyWith)):
                yield Case(PretrainRecipe, "model", name, condition, (("model.name", config.name),))


CASES = {f"{case.recipe_type.__name__}-{dict(case.fixed).get('model.name', '')}-{case.key}": case for case in cases()}


def loaded(case: Case, file: Path, **overrides: str) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return load(case.recipe_type, file, overrides, on_ignored=lines.append), lines


def value(recipe: Any, key: str) -> Any:
    name, _, field = key.partition(".")
    return getattr(getattr(recipe, name), field)


def test_a_key_without_effect_is_an_error_or_said(tmp_path: Path) -> None:
    assert len(CASES) > 150
    failed, tried = [], {True: set(), False: set()}  # type: ignore[var-annotated]
    for number, (label, case) in enumerate(CASES.items()):
        own, base, top = (tmp_path / f"{number}-{name}.toml" for name in ("own", "base", "top"))
        if effective := case.assignment(holds=True):
            tried[True].add(case.key)
            own.write_text(case.table(effective))
            recipe, lines = loaded(case, own)
            if case.problems(recipe) or any(f"{case.key} = " in line for line in lines):
                failed.append(f"{label}, with an effect: {case.problems(recipe)} {lines}")
        if not (idle := case.assignment(holds=False)):
            continue
        tried[False].add(case.key)
        own.write_text(case.table(idle))
        recipe, lines = loaded(case, own)
        if len(case.problems(recipe)) != 1 or any(f"{case.key} = " in line for line in lines):
            failed.append(f"{label}: {case.problems(recipe)} {lines}")

        # The file extends one that sets the field, and disables it.
        base.write_text(case.table({case.key: idle[case.key]}))
        top.write_text(f'extends = "{base.name}"\n' + case.table({key: idle[key] for key in idle if key != case.key}))
        recipe, lines = loaded(case, top)
        said = [line for line in lines if f"{case.key} = " in line and line.endswith(": ignored")]
        if value(recipe, case.key) != case.default or len(said) != 1 or case.problems(recipe):
            failed.append(f"{label}, extended: {value(recipe, case.key)} {lines}")
    assert failed == []
    # Each field has an effect in some program, and none in some program.
    assert tried[True] == tried[False] == {case.key for case in CASES.values()}


def test_a_remedy_names_each_value_with_an_effect() -> None:
    """But no generated data, and for `best_fit` no stream, whose documents are not known."""
    for label, case in CASES.items():
        first, *others = case.keys
        values = [parsed for _, parsed in values_of(case, first)]
        defaults = [values_of(case, key)[0][1] for key in others]
        effective = [value for value in values if case.condition.holds(value, *defaults)]
        left_out = ("python_stdlib", "synthetic", "synthetic_chat", "synthetic_preference")
        left_out += ("stream",) if case.key == "data.packing" else ()
        if not case.condition.remedy and len(effective) < len(values):
            expected = {value for value in effective if value not in left_out}
            assert set(case.condition.values) & set(values) == expected, label


def test_the_command_line_disables_what_the_file_sets_and_is_itself_checked(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[lora]\nrank = 4\nalpha = 8.0\nlayers = ["wq"]\n')
    lines: list[str] = []
    recipe = load(FinetuneRecipe, file, {"lora.rank": "0"}, on_ignored=lines.append)
    assert (recipe.lora.alpha, recipe.lora.layers) == (16.0, ())
    assert lines == ['lora.alpha = 8.0 and lora.layers = ["wq"] have no effect with lora.rank = 0: ignored']

    file.write_text("")
    with pytest.raises(UserError) as error:
        check_recipe(load(FinetuneRecipe, file, {"lora.alpha": "8.0", "data.source": "python_stdlib"}), 1)
    assert str(error.value) == (
        "lora.alpha = 8.0 has no effect with lora.rank = 0; set lora.rank to 1 or more, or remove it"
    )


def test_options_further_right_disable_those_before_them(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("")
    keys = {"checkpoint.interval": "5", "checkpoint.enabled": "false"}
    lines: list[str] = []
    recipe = load(PretrainRecipe, file, keys, on_ignored=lines.append)
    check_recipe(recipe, 1)
    assert recipe.checkpoint.interval == 500 and lines == [
        "checkpoint.interval = 5 has no effect with checkpoint.enabled = false: ignored"
    ]
    with pytest.raises(UserError, match=r"^checkpoint\.interval = 5 has no effect with checkpoint\.enabled = false"):
        check_recipe(load(PretrainRecipe, file, dict(reversed(keys.items()))), 1)


def test_a_trial_of_a_sweep_has_no_keys_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("")
    keys = {"schedule.decay": "none", "schedule.min_ratio": "0.2", "optimizer.lr": "1e-3"}
    assert effective_overrides(file, keys) == {"schedule.decay": "none", "optimizer.lr": "1e-3"}
    assert effective_overrides(file, keys | {"schedule.decay": "linear"}) == keys | {"schedule.decay": "linear"}


def test_a_source_of_a_program_may_read_what_it_likes() -> None:
    @section
    class OwnData(Data):
        source: Literal["mine", "text"] = "mine"  # type: ignore[assignment]
        """Where the tokens come from."""

    @section
    class OwnRecipe(PretrainRecipe):
        data: OwnData = OwnData()

    data = OwnData(path="x", text_field="body", holdout_every=20, workers=2, packing="best_fit", bad_records="skip")
    assert list(effect.problems(OwnRecipe(data=data))) == []


@pytest.mark.parametrize(
    "name",
    [
        "debug", "gpt2_124m_speedrun", "qwen3_30b_a3b", "deepseek_v3_671b", "gpt_oss_20b", "gemma3_4b", "llama3_8b_float8",
        "llama3_8b_128k", "finetune_llama3_8b", "dpo_debug", "distill_llama3_1b", "mlm_debug", "seq2seq_debug",
    ],
)  # fmt: skip
def test_the_small_version_of_a_shipped_recipe_sets_no_key_without_effect(name: str) -> None:
    path = recipe_path(name)
    recipe = load_known(path, {})
    values = json.loads(json.dumps(dataclasses.asdict(recipe)))
    for sizes in ({}, {"pipeline": 2, "pipeline_schedule": "gpipe"}):
        values["parallelism"] |= {"shard": 1, "expert": 1} | sizes
        processes = math.prod(values["parallelism"][each] for each in DIMENSIONS)
        changes = shrink(values, processes, 2)
        overrides = {key: each if isinstance(each, str) else json.dumps(each) for key, each in changes.items()}
        assert list(effect.problems(load_known(path, overrides))) == []


def test_every_field_is_read_by_code_that_trains() -> None:
    """A key that no code reads has no effect, whatever the recipe says."""
    read = set()
    for path in (*PACKAGE.rglob("*.py"), *PROGRAMS.glob("*.py")):
        if "tools" in path.parts or path.name in ("effect.py", "schema.py", "help.py"):
            continue
        tree = ast.parse(path.read_text())
        # What only the checks of a section read has no effect on training.
        checks = {
            id(node)
            for function in ast.walk(tree)
            if getattr(function, "name", "") == "problems"
            for node in ast.walk(function)
        }
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in checks}
    unread = {
        f"{field.name}.{name}"
        for recipe_type in recipe_types().values()
        for field in dataclasses.fields(recipe_type)
        for name in getattr(type(field.default), "__pydantic_fields__", {})
        if name not in read
    }
    assert unread == set()
