"""Changes of a recipe that a resume refuses, and those that make it inexact."""

from dataclasses import replace
from typing import Any

import pytest

from titanlike.checkpoint import CheckpointMetadata
from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.changes import check_resume
from titanlike.run.run_dir import recipe_as_json


def changed(section: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Resumes a run at step 10 after a change of a section. Returns why that is not bit-exact."""
    recipes = [
        replace(recipe := PretrainRecipe(), **{section: replace(getattr(recipe, section), **values)})
        for values in (before, after)
    ]
    saved, now = (CheckpointMetadata(10, recipe_as_json(recipe)) for recipe in recipes)
    return check_resume(saved, now, recipes[1])


def test_other_data_to_validate_on_may_return_held_out_sequences_to_training() -> None:
    with pytest.raises(UserError, match=r"data.validation_path was \"\", now \"val\". Restore these values to resume"):
        changed("data", {}, {"validation_path": "val"})
    with pytest.raises(UserError, match=r"data.validation_path was \"val\", now \"\""):
        changed("data", {"validation_path": "val"}, {})
    assert changed("data", {"validation_path": "val"}, {"validation_path": "moved/val"}) == []
    nothing = {"holdout_every": 0}
    assert changed("data", nothing, nothing | {"validation_path": "val"}) == []
    stream = {"source": "stream", "path": "x"}
    assert changed("data", stream, stream | {"validation_path": "val"}) == []


def test_keys_without_effect_may_differ() -> None:
    # A run of an earlier version, which accepted them.
    assert changed("optimizer", {"muon_momentum": 0.9}, {}) == []
    with pytest.raises(UserError, match=r"optimizer\.beta1 was 0\.8, now 0\.9"):
        changed("optimizer", {"muon_momentum": 0.9, "beta1": 0.8}, {})
    # The fields of records name nothing in shards, whose fingerprint is that of the text.
    assert (
        changed("data", {"source": "text", "path": "a", "text_field": "body"}, {"source": "shards", "path": "b"}) == []
    )
    with pytest.raises(UserError, match=r'data\.text_field was "body", now "text"'):
        changed("data", {"source": "text", "path": "a", "text_field": "body"}, {"source": "text", "path": "a"})


def test_a_change_of_the_model_is_not_to_be_allowed_if_the_checkpoint_cannot_have_it() -> None:
    for values, is_allowed in (({"norm_eps": 1e-3}, True), ({"num_layers": 3}, False)):
        with pytest.raises(UserError, match="Restore these values to resume") as error:
            changed("model", {}, values)
        assert ("allow_changed" in str(error.value)) == is_allowed


@pytest.mark.parametrize("recipe", [DpoRecipe(), DistillRecipe()])
def test_a_frozen_model_with_other_weights_is_refused_and_may_be_moved(recipe: DpoRecipe | DistillRecipe) -> None:
    (key,) = recipe.frozen_weights
    section, name = key.split(".")

    def resumed(path: str, weights: str, allow_changed: tuple[str, ...] = ()) -> list[str]:
        recipes = [
            replace(recipe, **{section: replace(getattr(recipe, section), **{name: each})}) for each in ("a", path)
        ]
        allowed = replace(recipes[1].checkpoint, allow_changed=allow_changed)
        recipes[1] = replace(recipes[1], checkpoint=allowed)
        versions = ({key: each} for each in ("one", weights))
        saved, now = (
            CheckpointMetadata(10, recipe_as_json(each), weights=version)
            for each, version in zip(recipes, versions, strict=True)
        )
        return check_resume(saved, now, recipes[1])

    assert resumed("a", "one") == resumed("moved/a", "one") == []
    with pytest.raises(UserError, match=f'{key} = "a" had the weights one, now other'):
        resumed("a", "other")
    with pytest.raises(UserError, match=f'{key} was "a", now "b"'):
        resumed("b", "other")
    assert resumed("a", "other", (key,)) == [
        f'{key} = "a" had the weights one, now other (of a run that went on, name the checkpoint)'
    ]


def test_a_change_of_the_program_is_reported() -> None:
    recipe = PretrainRecipe()
    saved, now = (CheckpointMetadata(10, recipe_as_json(recipe), program=each) for each in ("one", "other"))
    assert check_resume(saved, now, recipe) == ["the program pretrain.py has changed"]
    assert check_resume(replace(saved, program=""), now, recipe) == []  # of an earlier version
