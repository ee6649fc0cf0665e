"""Plans beside what PyTorch's allocator has counted on null GPUs, for every shipped recipe, and beside what a GPU has measured."""

import json
from typing import Any

import pytest

from benchmarks import gpu_plans
from tests.launching import ROOT
from titanlike.config.shipped import shipped_recipes
from titanlike.tools.null_gpu import recipes
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.step_time import Rank
from titanlike.tools.planning.traffic import traffic

# Reserved memory that is further off: gaps that float8's gathers leave between tensor-parallel blocks, and a large tied head in a
# small model; gaps between what a second model has freed and what is kept; and gaps beside a large LM head.
RESERVED = {
    "llama3_70b_float8": 0.065, "gemma3_4b": 0.07, "dpo_llama3_8b": 0.055, "dpo_debug": 0.16, "mlm_debug": 0.07,
    "distill_debug": 0.09, "distill_llama3_1b": 0.055, "deepseek_v3_671b": 0.05, "gpt_oss_20b": 0.05, "gpt_oss_120b": 0.08,
    "gemma3_270m": 0.055,
}  # fmt: skip
# Launches that are further off: of the optimizer, and of collectives and their copies beside short blocks.
LAUNCHES = {
    "debug", "distill_debug", "distill_llama3_1b", "dpo_debug", "finetune_debug", "gpt2_124m", "gpt2_124m_c4",
    "gpt2_124m_speedrun", "llama3_70b_float8", "llama3_8b_128k", "llama3_8b_128k_float8",
    "mlm_debug", "modernbert_base", "seq2seq_debug", "stages/decay", "stages/pretrain", "t5_base",
}  # fmt: skip
H100 = load_hardware("h100")
ROWS, ON_ONE_GPU = (
    json.loads((ROOT / f"benchmarks/results/null_gpu_{name}.json").read_text())["rows"] for name in ("recipes", "lora")
)


@pytest.mark.parametrize("row", [*ROWS, *ON_ONE_GPU], ids=lambda row: f"{row['recipe']}, {row['GPUs']}")
def test_the_plan_is_within_2_percent_of_allocated_and_4_of_reserved_memory(row: dict[str, Any]) -> None:
    planned = recipes.plan(row["recipe"], row["GPUs"], row["options"])
    assert planned.allocated == pytest.approx(row["allocated"], rel=0.02)
    assert planned.reserved == pytest.approx(row["reserved"], rel=RESERVED.get(row["recipe"], 0.04))


@pytest.mark.parametrize("row", [row for row in ROWS if row["recipe"] not in LAUNCHES], ids=lambda row: row["recipe"])
def test_the_plan_is_within_17_percent_of_the_launches(row: dict[str, Any]) -> None:
    job = recipes.job_of(row["recipe"], row["GPUs"], row["options"])
    assert Rank(job, H100, traffic(job), 0).launches == pytest.approx(row["launches"], rel=0.17)


def test_the_plan_of_offload_is_near_its_measurement() -> None:
    for row in json.loads((ROOT / "benchmarks/results/null_gpu_offload.json").read_text())["rows"]:
        planned = recipes.plan(row["recipe"], row["GPUs"], row["options"])
        assert planned.allocated == pytest.approx(row["allocated"], rel=0.02)
        assert planned.reserved == pytest.approx(row["reserved"], rel=0.04)


def test_every_shipped_recipe_is_measured_and_has_a_number_of_gpus() -> None:
    assert set(shipped_recipes()) == set(recipes.GPUS_OF) == {row["recipe"] for row in ROWS}


COMPARED = list(gpu_plans.compared(sorted(gpu_plans.FOLDER.glob("*.json"))))


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_what_a_gpu_has_measured_is_near_its_plan(row: gpu_plans.Compared) -> None:
    assert abs(row.memory_error) < 0.03
    found = row.plan.range
    assert found.low < row.measured["tokens_per_second"] / row.plan.tokens_per_second < found.high


def test_all_rows_of_a_gpu_are_compared() -> None:
    assert len(COMPARED) == 10
