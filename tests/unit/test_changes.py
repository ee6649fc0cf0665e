"""Changes of a recipe that a resume refuses, and those that make it inexact."""

from dataclasses import replace
from typing import Any

import pytest

from titanlike.checkpoint import CheckpointMetadata
from titanlike.config import PretrainRecipe, UserError
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


@pytest.mark.parametrize(("key", "value"), [("expert", 2), ("gradient_sync", "last_microbatch"), ("cpu_offload", True)])
def test_what_changes_the_order_of_sums_is_reported(key: str, value: Any) -> None:
    [reason] = changed("parallelism", {}, {key: value})
    assert reason.startswith(f"parallelism.{key} was ")
