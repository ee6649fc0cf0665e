"""Parity of every layout with one process: losses, gradient norms, validation loss and all weights, for both models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import CASES, Case
from tests.pool import Ranks
from tests.training import MODELS, assert_same, model_of, tiny, train
from titanlike.config.sections import Parallelism
from titanlike.tools.verify.recipe import Result, differences

Baseline = Callable[[str, float], Result]

STEPS = 2  # the loss of the second step depends on the gradients and the update of the first


@pytest.fixture(scope="module")
def baseline(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Results of one process that takes the global batch as one micro-batch, by model and dropout."""
    results: dict[tuple[str, float], Result] = {}

    def get(model: str, dropout: float) -> Result:
        if (model, dropout) not in results:
            recipe = tiny(
                tmp_path_factory.mktemp("baseline"),
                "run",
                model=model_of(model, dropout),
                training=dict(steps=STEPS, local_batch_size=8),
            )
            results[model, dropout] = train(ranks(1), recipe)
        return results[model, dropout]

    return get


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, Any]]]:
    """Collects measurements, and writes them to the path of `--record`."""
    measured: dict[str, dict[str, Any]] = {}
    yield measured
    path = request.config.getoption("--record")
    if path:
        cases = {case.name: {"processes": case.processes, **measured[case.name]} for case in CASES}
        Path(path).write_text(json.dumps({"torch": torch.__version__, "cases": cases}, indent=1) + "\n")


def tier(case: Case, model: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a case. Cases that run with one model alternate between the models."""
    same_tier = [other for other in CASES if other.tier == case.tier]
    is_turn = len(case.models) == 1 or same_tier.index(case) % 2 == list(MODELS).index(model)
    if case.tier == "both" or (case.tier == "one" and is_turn):
        return []
    return [pytest.mark.slow if case.tier == "slow" and is_turn else pytest.mark.every]


@pytest.mark.parametrize(
    ("case", "model"),
    [
        pytest.param(case, model, id=f"{case.name}-{model}", marks=tier(case, model))
        for case in CASES
        for model in case.models
    ],
)
def test_layout_matches_one_process(
    ranks: Ranks, baseline: Baseline, record: dict[str, dict[str, Any]], tmp_path: Path, case: Case, model: str
) -> None:
    sections = {
        "model": model_of(model, case.dropout),
        "parallelism": Parallelism(**case.layout),
        "training": dict(steps=STEPS, local_batch_size=case.local_batch_size),
    }
    found, expected = (
        train(ranks(case.processes), tiny(tmp_path, "run", **sections, **case.sections)),
        baseline(model, case.dropout),
    )
    measured = {metric: worst for metric, (worst, _) in differences(found, expected).items()}
    record.setdefault(case.name, {})[model] = measured
    assert_same(found, expected)
