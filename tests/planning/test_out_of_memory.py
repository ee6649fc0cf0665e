"""The message of a run that is out of memory: the changes that save most by the plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titanlike.recipe import PretrainRecipe, load
from titanlike.run.run import Run
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.out_of_memory import advice, savings

LLAMA_8B = Path(__file__).parents[2] / "train_configs" / "llama3_8b.toml"


def allocated(recipe: PretrainRecipe, num_ranks: int) -> int:
    return memory(Job(recipe, num_ranks)).allocated


def test_the_changes_save_what_the_planner_says_and_have_different_keys() -> None:
    recipe = load(PretrainRecipe, LLAMA_8B, {})
    found = savings(recipe, 8)
    assert len(found) == 3
    assert [saved for saved, _ in found] == sorted((saved for saved, _ in found), reverse=True)
    keys = [key for _, changes in found for key in changes]
    assert len(keys) == len(set(keys))
    by_key = {next(iter(changes)): saved for saved, changes in found}
    full = replace(recipe, activation_checkpoint=replace(recipe.activation_checkpoint, mode="full"))
    assert by_key["activation_checkpoint.mode"] == allocated(recipe, 8) - allocated(full, 8)


def test_the_advice_names_the_planned_peak_and_the_changes() -> None:
    recipe = load(PretrainRecipe, LLAMA_8B, {})
    lines = advice(recipe, 8).split("\n")
    assert lines[0].startswith(f"the plan expects a peak of {allocated(recipe, 8) / 2**30:,.2f} GiB per GPU")
    assert len(lines) == 4
    offloading = replace(recipe.activation_checkpoint, mode="full", offload=True)
    assert "changes rounding" in advice(replace(recipe, activation_checkpoint=offloading), 8)


def test_a_run_ends_with_this_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = PretrainRecipe()
    recipe = replace(recipe, run=replace(recipe.run, dir=str(tmp_path), name="run", device="cpu"))
    with pytest.raises(SystemExit) as exit_code, Run(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore.")
    assert exit_code.value.code == 2  # not restarted: it would meet the same error
    errors = capsys.readouterr().err
    assert "error: rank 0 is out of memory: CUDA out of memory. Tried to allocate 1 GiB; the plan" in errors
    assert "saves" in errors
