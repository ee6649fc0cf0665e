"""The plan of a run: consistency of its numbers, what limits it, advice that really helps, and `search`, the fastest first."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from titanlike.config import UserError
from titanlike.models.moe.config import MixtralConfig
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.checks import check_recipe
from titanlike.tools.planning.advice import advice, checkpointing_modes, limits, may_fit, smallest_peak
from titanlike.tools.planning.changes import apply, changes_rounding, expert_sizes, single_changes, text_of
from titanlike.tools.planning.hardware import Hardware, load_hardware
from titanlike.tools.planning.hooks import anchor_line, compare, comparison_line
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import Memory, Moment, Usage, memory
from titanlike.tools.planning.plan import GIB, Plan, deciding_ranks, least_seconds, make_plan
from titanlike.tools.planning.report import as_json, layout_text
from titanlike.tools.planning.scaling import scaling
from titanlike.tools.planning.search import SearchResult, search, write_recipe

RECIPES = Path(__file__).parents[2] / "train_configs"
H100 = load_hardware("h100")


def recipe_of(name: str, **overrides: str) -> PretrainRecipe:
    return load(PretrainRecipe, RECIPES / f"{name}.toml", {key.replace("__", "."): v for key, v in overrides.items()})


def plan_of(name: str, num_gpus: int, hardware: Hardware = H100, **overrides: str) -> Plan:
    return make_plan(Job(recipe_of(name, **overrides), num_gpus), hardware)


def test_the_pipeline_rank_with_most_memory_decides() -> None:
    plan = plan_of("llama3_405b", 512)
    assert len(plan.memory) == len(plan.traffic) == 8
    assert plan.reserved == max(memory.reserved for memory in plan.memory)
    assert {7, plan.worst_rank} == set(deciding_ranks(plan))
    large = Memory((Moment("forward", Usage(activations=90 * GIB)),), 1.0)
    changed = replace(plan, memory=(*plan.memory[:3], large, *plan.memory[4:]))
    assert changed.worst_rank == 3 and not changed.fits
    assert limits(changed).startswith("Memory limits this layout") and "activations are 90.0 GiB" in limits(changed)


def test_advice_for_a_layout_that_fits_is_really_faster() -> None:
    plan = plan_of("llama3_8b", 8)
    found = advice(plan, check_recipe)
    assert found.plan is not None and text_of(found.changes) in found.text
    again = make_plan(Job(apply(plan.job.recipe, found.changes), 8), H100)
    assert again.fits and again.tokens_per_second > 1.02 * plan.tokens_per_second
    assert f"{again.tokens_per_second / plan.tokens_per_second - 1:+.0%} tokens/s" in found.text
    # No other mode of checkpointing is better than the advice.
    modes = checkpointing_modes(plan, check_recipe)
    assert modes["selective"] is plan
    memory = [mode.allocated for mode in modes.values() if mode]
    assert memory == sorted(memory, reverse=True) and len(memory) == 3
    assert all(mode.tokens_per_second <= again.tokens_per_second for mode in modes.values() if mode and mode.fits)


def test_advice_is_the_best_of_all_single_changes() -> None:
    num_gpus = 128
    plan = plan_of("llama3_70b", num_gpus, parallelism__pipeline="2")
    assert plan.fits
    speeds = {}
    keeping = set()
    for changes in single_changes(plan.job, H100):
        with suppress(UserError):
            changed = apply(plan.job.recipe, changes)
            check_recipe(changed, num_gpus)
            found = make_plan(Job(changed, num_gpus), H100)
            if found.fits:
                speeds[text_of(changes)] = found.tokens_per_second
                keeping |= set() if changes_rounding(changes) else {text_of(changes)}
    assert len(speeds) > 10
    text = advice(plan, check_recipe).text
    # First the best one that keeps the rounding of the result, then the best one.
    assert text.startswith(max(keeping, key=lambda text: speeds[text]))
    first, _, second = text.partition(" Or ")
    assert second.startswith(max(speeds, key=lambda text: speeds[text]))
    assert "rounding" not in first and second.endswith("; the rounding of the result changes.")


@pytest.mark.parametrize("changes", [
    {}, dict(parallelism__reshard_after_forward="never"), dict(activation_checkpoint__mode="full"),
    dict(activation_checkpoint__mode="none"), dict(parallelism__gradient_sync="last_microbatch"), dict(model__num_layers="1"),
    dict(model__num_layers="3"), dict(training__loss_chunk="0"),
])  # fmt: skip
def test_the_first_and_last_blocks_have_the_peak(changes: dict[str, str]) -> None:
    job = Job(recipe_of("llama3_8b", **changes), 16)
    ends, every = (memory(job, every_block=every_block) for every_block in (False, True))
    assert ends.peak == every.peak and ends.reserved == every.reserved
    assert len(ends.moments) <= 11


def test_advice_for_a_recipe_that_does_not_fit_makes_it_fit() -> None:
    num_gpus = 8
    plan = plan_of("llama3_8b", num_gpus, training__local_batch_size="16", activation_checkpoint__mode="none")
    assert not plan.fits
    found = advice(plan, check_recipe)
    missing = (plan.reserved - plan.available) / GIB
    assert found.text.startswith(f"It does not fit by {missing:,.1f} GiB per GPU; {text_of(found.changes)} make")
    changed = apply(plan.job.recipe, found.changes)
    check_recipe(changed, num_gpus)
    assert make_plan(Job(changed, num_gpus), H100).fits
    assert changed.training.global_batch_size == plan.job.recipe.training.global_batch_size
    assert "the rounding of the result changes" not in found.text


def test_json_has_si_units_and_parts_that_add_up() -> None:
    plan = plan_of("llama3_405b", 512)
    values = json.loads(json.dumps(as_json(plan, None, checkpointing_modes(plan, check_recipe))))
    assert values["step_seconds"] == pytest.approx(sum(values["step_parts_seconds"].values()))
    assert values["run_seconds"] == pytest.approx(values["step_seconds"] * 10_000)
    assert values["run_dollars"] == pytest.approx(values["run_seconds"] / 3600 * 512 * H100.dollars_per_gpu_hour)
    flops = values["flops_per_token"] * values["tokens_per_second_per_gpu"]
    assert values["mfu"] == pytest.approx(flops / (H100.bf16_tflops * 1e12))
    for rank in values["pipeline_ranks"]:
        assert rank["peak_allocated_bytes"] == sum(rank["peak_bytes"].values())
        assert rank["peak_allocated_bytes"] == max(sum(moment["bytes"].values()) for moment in rank["moments"])
        assert all(item["bytes"] > 0 for item in rank["collectives"])
    assert values["peak_reserved_bytes"] == max(rank["peak_reserved_bytes"] for rank in values["pipeline_ranks"])
    modes = values["activation_checkpoint_modes"]
    assert modes["none"]["peak_allocated_bytes"] > modes["full"]["peak_allocated_bytes"]


def test_strong_scaling_keeps_the_batch_and_weak_scaling_the_tokens() -> None:
    recipe = recipe_of("llama3_8b")
    strong = scaling(recipe, [8, 64, 100], H100, check_recipe, "strong")
    assert [point.plan is not None for point in strong] == [True, True, False]
    assert strong[2].problem.startswith("training.global_batch_size = 128 does not divide over 100 data-parallel ranks")
    weak = scaling(recipe, [8, 64, 1024], H100, check_recipe, "weak")
    recipes = [point.plan.job.recipe for point in weak if point.plan]
    assert [each.training.global_batch_size for each in recipes] == [128, 1024, 16384]
    tokens = [each.training.steps * each.training.tokens_per_step for each in recipes]
    assert tokens == pytest.approx([tokens[0]] * 3, rel=0.01)
    assert all(each.schedule.warmup_steps <= each.training.steps for each in recipes)


def test_a_finished_run_is_compared_with_its_plan() -> None:
    recipe = recipe_of("llama3_8b")
    plan = make_plan(Job(recipe, 8), H100)
    measured = {"memory_gib": 1.1 * plan.allocated / GIB, "tokens_per_second": 0.5 * plan.tokens_per_second}
    values = compare(recipe, 8, 8, H100, **measured)
    assert comparison_line(values).startswith("plan    ") and "(+10.0%)" in comparison_line(values)
    assert "(-50.0%)" in comparison_line(values)
    assert anchor_line(Path("runs/a b"), 8, "a100", 8e4).endswith(
        "titanlike plan 'runs/a b/recipe.toml' --gpus 8 --hardware a100 --measured 10000 --search"
    )
    small = compare(recipe_of("debug"), 1, 1, H100, memory_gib=0.2, tokens_per_second=5e4)
    assert "50,000 tokens/s, limited by how fast this host launches kernels" in comparison_line(small)
    unknown = compare(recipe, 8, 8, None, **measured)
    assert unknown.keys() == {"run_memory_gib", "planned_memory_gib"} and "tokens/s" not in comparison_line(unknown)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    fixed = {"parallelism.pipeline", "parallelism.context"}
    return search(recipe_of("llama3_8b"), 16, H100, check_recipe, fixed=fixed)


def test_search_ranks_only_what_is_valid_and_fits(result: SearchResult) -> None:
    assert result.candidates >= 100 and len(result.best) == 10
    recipe = recipe_of("llama3_8b")
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
            layout = dict(parallelism__pipeline_schedule=schedule, parallelism__pipeline=pipeline)
            job = Job(recipe_of("llama3_70b", training__local_batch_size="2", **layout), 128)
            assert least_seconds(job, H100) <= make_plan(job, H100).time.seconds


def test_sizes_of_expert_parallelism_are_searched() -> None:
    model = MixtralConfig(**{"size": "8x7B", **MixtralConfig.sizes["8x7B"]})
    recipe = replace(recipe_of("llama3_8b"), model=model)
    assert expert_sizes(recipe, 64) == [1, 2, 4, 8] and expert_sizes(recipe, 6) == [1, 2]
    fixed = {"parallelism.tensor", "parallelism.pipeline", "parallelism.context", "float8.scaling"}
    found = search(recipe, 32, H100, check_recipe, fixed=fixed)
    assert max(candidate.plan.job.layout.expert for candidate in found.best) > 1
    assert any("EP " in layout_text(candidate.plan) for candidate in found.best)
    assert {"parallelism.expert": 8} in list(single_changes(Job(recipe, 32), H100))
    dense = recipe_of("llama3_8b")
    assert expert_sizes(dense, 64) == [1]
    assert not any("parallelism.expert" in changes for changes in single_changes(Job(dense, 32), H100))


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
    write_recipe(best, original, {"program": "finetune"}, result.best[0])
    assert 'program = "finetune"\n' in best.read_text()
    write_recipe(best, original, {"program": str(tmp_path / "own.py")}, result.best[0])
    assert 'program = "../own.py"\n' in best.read_text()
    best.write_text("[training]\nsteps = 3\n")
    with pytest.raises(UserError, match="was not written by --search; choose another name"):
        write_recipe(best, original, {}, result.best[0])


def test_the_fast_check_of_memory_looks_at_the_first_and_the_last_rank() -> None:
    job = Job(recipe_of("llama3_405b"), 512)
    needed = max(memory(job, rank).reserved for rank in (0, 7))
    assert smallest_peak(job) == needed and may_fit(job, needed) and not may_fit(job, needed - 1)
