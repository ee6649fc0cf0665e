"""`search`: only what is valid and fits, the fastest first, and a recipe that keeps the result of training."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.launching import Cli
from titanlike.config import PretrainRecipe, UserError, load
from titanlike.models.moe_config import MixtralConfig
from titanlike.run.preflight import check_recipe
from titanlike.tools.planning.advice import may_fit, smallest_peak
from titanlike.tools.planning.changes import expert_sizes, single_changes
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.plan import least_seconds, make_plan
from titanlike.tools.planning.report import layout_text
from titanlike.tools.planning.search import SearchResult, search, simulate_best, write_recipe

RECIPES = Path(__file__).parents[2] / "train_configs"
H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def result() -> SearchResult:
    recipe = load(PretrainRecipe, RECIPES / "llama3_8b.toml", {})
    return search(recipe, 16, H100, check_recipe)


def test_search_ranks_only_what_is_valid_and_fits(result: SearchResult) -> None:
    assert result.candidates >= 1000 and len(result.best) == 10
    recipe = load(PretrainRecipe, RECIPES / "llama3_8b.toml", {})
    for candidate in result.best:
        planned = candidate.plan.job.recipe
        check_recipe(planned, 16)
        assert candidate.plan.fits
        assert planned.training.global_batch_size == recipe.training.global_batch_size
        assert planned.training.seq_len == recipe.training.seq_len and planned.optimizer == recipe.optimizer
    speeds = [candidate.plan.tokens_per_second for candidate in result.best]
    least = [candidate.plan.tokens_per_second * candidate.plan.range.low for candidate in result.best]
    assert least == sorted(least, reverse=True)
    assert speeds[0] >= make_plan(Job(recipe, 16), H100).tokens_per_second


def test_the_bound_of_the_step_time_holds(result: SearchResult) -> None:
    for candidate in result.best:
        assert least_seconds(candidate.plan.job, H100) <= candidate.plan.time.seconds * (1 + 1e-9)
    for schedule in ("1f1b", "interleaved_1f1b", "zbv"):
        for pipeline in ("2", "8"):
            overrides = {"parallelism.pipeline_schedule": schedule, "parallelism.pipeline": pipeline}
            job = Job(
                load(PretrainRecipe, RECIPES / "llama3_70b.toml", overrides | {"training.local_batch_size": "2"}), 128
            )
            assert least_seconds(job, H100) <= make_plan(job, H100).time.seconds


def test_sizes_of_expert_parallelism_are_searched() -> None:
    model = MixtralConfig(**{"size": "8x7B", **MixtralConfig.sizes["8x7B"]})
    recipe = replace(load(PretrainRecipe, RECIPES / "llama3_8b.toml", {}), model=model)
    assert expert_sizes(recipe, 64) == [1, 2, 4, 8] and expert_sizes(recipe, 6) == [1, 2]
    fixed = {"parallelism.tensor", "parallelism.pipeline", "parallelism.context", "float8.scaling"}
    found = search(recipe, 32, H100, check_recipe, fixed=fixed)
    assert max(candidate.plan.job.layout.expert for candidate in found.best) > 1
    assert any("EP " in layout_text(candidate.plan) for candidate in found.best)
    assert {"parallelism.expert": 8} in list(single_changes(Job(recipe, 32), H100))
    dense = load(PretrainRecipe, RECIPES / "llama3_8b.toml", {})
    assert expert_sizes(dense, 64) == [1]
    assert not any("parallelism.expert" in changes for changes in single_changes(Job(dense, 32), H100))


def test_overridden_keys_are_not_searched() -> None:
    recipe = load(PretrainRecipe, RECIPES / "llama3_8b.toml", {"parallelism.tensor": "2"})
    found = search(recipe, 8, H100, check_recipe, fixed={"parallelism.tensor", "float8.scaling"})
    assert {candidate.plan.job.layout.tensor for candidate in found.best} == {2}
    assert {candidate.plan.job.recipe.float8.scaling for candidate in found.best} == {"none"}


def test_progress_and_a_model_that_does_not_fit() -> None:
    recipe = load(PretrainRecipe, RECIPES / "llama3_405b.toml", {})
    calls: list[tuple[int, int]] = []
    found = search(recipe, 8, H100, check_recipe, on_progress=lambda done, total: calls.append((done, total)))
    assert found.best == [] and found.too_large > 0
    assert calls == [(done + 1, len(calls)) for done in range(len(calls))] and calls


def test_the_written_recipe_extends_the_original(result: SearchResult, tmp_path: Path) -> None:
    original = RECIPES / "llama3_8b.toml"
    best = tmp_path / "folder" / "best.toml"
    best.parent.mkdir()
    write_recipe(best, original, {"training.steps": "20"}, result.best[0])
    assert "extends = " in best.read_text()
    loaded = load(PretrainRecipe, best, {})
    check_recipe(loaded, 16)
    planned = result.best[0].plan.job.recipe
    for section in ("model", "parallelism", "float8", "activation_checkpoint", "optimizer", "data", "training"):
        if section != "training":
            assert getattr(loaded, section) == getattr(planned, section), section
    assert loaded.training.local_batch_size == planned.training.local_batch_size
    written = len([line for line in best.read_text().splitlines() if " = " in line])
    assert written == 1 + 1 + len(result.best[0].changes)  # extends, the override and the changes: nothing else
    write_recipe(best, original, {}, result.best[1])  # replaces what a search has written
    write_recipe(best, original, {"recipe": "finetune"}, result.best[0])
    assert 'recipe = "finetune"\n' in best.read_text()
    write_recipe(best, original, {"recipe": str(tmp_path / "own.py")}, result.best[0])
    assert 'recipe = "../own.py"\n' in best.read_text()
    best.write_text("[training]\nsteps = 3\n")
    with pytest.raises(UserError, match="was not written by --search; choose another name"):
        write_recipe(best, original, {}, result.best[0])


def test_a_search_of_a_wrong_recipe_says_what_is_wrong(cli: Cli) -> None:
    words = [RECIPES / "llama3_8b.toml", "--gpus=8", "--search", "--quick", "--training.steps=9"]
    assert "error: schedule.warmup_steps = 500 is more than training.steps = 9" in cli("plan", *words, code=2).err


def test_candidates_that_do_not_fit_in_simulated_memory_are_dropped(result: SearchResult) -> None:
    large = make_plan(Job(load(PretrainRecipe, RECIPES / "llama3_405b.toml", {}), 64), H100)
    first = result.best[0].plan
    found = simulate_best(result, lambda plan: large if plan is first else plan)
    assert len(found.best) == 9 and found.best[0].plan is result.best[1].plan


def test_the_fast_check_of_memory_looks_at_the_first_and_the_last_rank() -> None:
    job = Job(load(PretrainRecipe, RECIPES / "llama3_405b.toml", {}), 512)
    needed = max(memory(job, rank).reserved for rank in (0, 7))
    assert smallest_peak(job) == needed and may_fit(job, needed) and not may_fit(job, needed - 1)
