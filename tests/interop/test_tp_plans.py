"""The tensor-parallel plans of transformers, verified: what docs/results.md says of them."""

from typing import Any

import pytest

from benchmarks.results_page import PLANS
from tests.launching import ROOT
from tests.pool import Ranks
from titanlike.tools.verify.comparison import ProcessRecord

NAMES = {"Llama": "llama", "Qwen3": "qwen3", "Mixtral": "mixtral", "gpt-oss": "gpt_oss"}


def functions(file: str, name: str) -> Any:
    from titanlike.tools.verify.module import load

    return load(f"{ROOT}/tests/interop/{file}.py:{name}")


def rank_record(file: str, name: str) -> ProcessRecord:
    from benchmarks.silent_bugs import mesh_of
    from titanlike.tools.verify.record import record

    return record(functions(file, name), mesh_of("tensor=2"), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.values(), "qwen3_tied"])
def test_the_plan_of_a_model_is_as_documented(ranks: Ranks, name: str) -> None:
    from titanlike.tools.verify.module import compare_records
    from titanlike.tools.verify.record import record

    documented = {NAMES[model]: results for model, results in PLANS.items()} | {"qwen3_tied": ("equal", "**wrong**")}
    for file, expected in zip(("tp_plans", "tp_plans_accumulated"), documented[name], strict=True):
        one = record(functions(file, name), steps=2)
        found = compare_records(one, ranks(2).run(rank_record, file, name), {"tensor": 2}, [])
        assert (found.finding is None) == (expected == "equal"), str(found)
