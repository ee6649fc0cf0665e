"""What a GPU has measured, beside plans and beside the null GPU."""

import json

import pytest

from benchmarks import gpu_plans
from benchmarks.null_gpu import record

COMPARED = list(gpu_plans.compared(sorted(gpu_plans.FOLDER.glob("*.json"))))


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_what_a_gpu_has_measured_is_near_its_plan(row: gpu_plans.Compared) -> None:
    assert abs(row.memory_error) < 0.03
    found = row.plan.range
    assert found.low < row.measured["tokens_per_second"] / row.plan.tokens_per_second < found.high


def test_the_table_of_what_a_gpu_has_measured_is_in_the_documentation() -> None:
    assert len(COMPARED) == 10
    text = (record.ROOT / "docs/planner_validation.md").read_text()
    assert f"\n\n{gpu_plans.table(COMPARED)}\n\n" in text


@pytest.mark.parametrize("name", ["1b_bfloat16", "8b_float8"])
def test_the_memory_of_a_gpu_and_of_a_null_gpu_is_the_same_to_the_byte(name: str) -> None:
    """As recorded, and as the documentation says."""
    rows = [
        json.loads(path.read_text())["rows"]
        for path in (gpu_plans.FOLDER / f"{name}.json", gpu_plans.FOLDER.parent / f"null_gpu_{name}.json")
    ]
    peaks = [{row: measured["peak_memory_gib"] for row, measured in found.items()} for found in rows]
    assert peaks[0] == peaks[1]
    text = (record.ROOT / "docs/null_gpu.md").read_text()
    assert all(f"| {peak} | {peak} |\n" in text for peak in peaks[0].values())
