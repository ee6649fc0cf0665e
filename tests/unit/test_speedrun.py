"""The speedrun's figures are computed from the runs as its documentation says."""

import pytest

from benchmarks import speedrun


def run(seed: int, *curve: tuple[int, int, float, float]) -> dict[str, object]:
    return {"seed": seed, "curve": [list(point) for point in curve]}


def test_until_returns_the_first_validation_at_or_below_the_target() -> None:
    found = run(0, (10, 100, 1.0, 3.0), (20, 200, 2.0, 1.49), (30, 300, 3.0, 1.2))
    assert speedrun.until(found, 1.49) == (200, 2.0)
    assert speedrun.until(found, 1.0) is None


def test_the_target_of_a_seed_is_the_final_loss_of_adamw() -> None:
    adamw = [run(0, (10, 100, 5.0, 2.0), (20, 200, 10.0, 1.5)), run(1, (10, 100, 5.0, 3.0), (20, 200, 10.0, 2.5))]
    debug = [run(0, (10, 100, 4.0, 2.0), (20, 200, 8.0, 1.4)), run(1, (10, 100, 4.0, 2.4), (20, 200, 8.0, 2.0))]
    subjects = {name: {"label": name, "runs": runs} for name, runs in (("adamw", adamw), ("debug", debug))}
    rows = speedrun.table({"target": None, "subjects": subjects}).splitlines()[2:]
    assert rows == ["| adamw | 10.0 | 1 | 200 | 2.000 | 20 |", "| debug | 6.0 | 0.60 | 150 | 1.700 | 20 |"]


def test_ratios_are_those_of_runs_with_the_same_seed() -> None:
    def subject(*seconds: float) -> dict[str, object]:
        return {"label": "x", "runs": [run(n, (10, 100, value, 1.0)) for n, value in enumerate(seconds)]}

    found = {"target": 1.5, "subjects": {"adamw": subject(10.0, 20.0, 40.0), "debug": subject(5.0, 8.0, 4.0)}}
    _, _, adamw, debug = speedrun.table(found).splitlines()
    assert adamw == "| x | 20.0 | 1 | 100 | 1.000 | 10 |"
    assert debug == "| x | 5.0 | 0.40 | 100 | 1.000 | 10 |"  # 0.5, 0.4 and 0.1


def test_a_subject_that_misses_the_target_in_one_run_has_no_time() -> None:
    runs = [run(0, (10, 100, 5.0, 1.0)), run(1, (10, 100, 5.0, 2.0))]
    found = {"target": 1.5, "subjects": {"adamw": {"label": "x", "runs": runs}}}
    assert speedrun.table(found).splitlines()[2] == "| x | not reached |  |  | 1.500 | 10 |"


@pytest.mark.parametrize("model", speedrun.MODELS)
def test_each_subject_is_compared_with_adamw(model: str) -> None:
    assert next(iter(speedrun.MODELS[model].subjects)) == "adamw"
