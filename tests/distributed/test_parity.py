"""Parity of every layout with one process: losses, gradient norms, validation loss and all weights, for both models."""

from pathlib import Path

import pytest

from tests.parity import CASES, Case, Parity
from tests.training import MODELS, model_of, tiny

STEPS = 2  # the loss of the second step depends on the gradients and the update of the first


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
def test_layout_matches_one_process(parity: Parity, tmp_path: Path, case: Case, model: str) -> None:
    sections = {
        "model": model_of(model, case.dropout),
        "parallelism": case.parallelism,
        "training": dict(steps=STEPS, local_batch_size=case.local_batch_size),
    }
    parity(tiny(tmp_path, "run", **sections, **case.sections), case.name, model)
