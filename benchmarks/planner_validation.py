"""Predictions of the planner beside published measurements of training.

    python -m benchmarks.planner_validation --out benchmarks/results/planner_validation.json
    python -m benchmarks.planner_validation --markdown

Each row of `benchmarks/published.py` and `benchmarks/published_others.py` is predicted with the recipe that computes the same, and
with a record of how the measured program differs from this toolkit. One efficiency of each GPU and precision, and a few constants,
are fitted: to all rows, which is what is shipped, and for each source to the rows of the others, which judges it and gives the
ranges of plans. Rows that are not listed are never fitted. All rows stay, with the reason where the error is large.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from benchmarks import published, published_others
from benchmarks.common import parser_of, table, write
from benchmarks.published import Row
from titanlike.tools.planning.collectives import Collective
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory, with_program_loss
from titanlike.tools.planning.ranges import FEWEST, MIXTURES, OTHERS, kind_of
from titanlike.tools.planning.step_time import step_time
from titanlike.tools.planning.traffic import traffic

GOALS = {"tokens per second": 0.15, "ratio": 0.05, "memory": 0.10}
MIXTURE_GOAL = 0.3
GIB = 2**30

ROWS = [*published.ROWS, *published_others.ROWS]
BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a row."""

    row: Row
    kind: str  # class of runs, as in `titanlike.tools.planning.ranges`
    fitted: float  # tokens per second of a GPU, with the shipped figures, which are fitted to all rows
    tokens_per_second: float  # with the rows of all other sources fitted
    memory_gib: float

    @property
    def error(self) -> float:
        """Relative error of the throughput, with the row's source not fitted."""
        return self.tokens_per_second / self.row.tokens_per_second - 1.0

    @property
    def fitted_error(self) -> float:
        """Relative error of the throughput, with all rows fitted."""
        return self.fitted / self.row.tokens_per_second - 1.0

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory."""
        if self.row.memory_gib is None:
            return None
        return self.memory_gib / self.row.memory_gib - 1.0


def tokens_per_second(row: Row, **changes: float) -> float:
    """Returns the predicted throughput of a GPU, with these changes of its hardware file."""
    job, collectives = _job(row)
    hardware = replace(load_hardware(row.hardware), **row.hardware_changes | changes)
    time = step_time(job, hardware, collectives)
    return job.recipe.training.tokens_per_step / time.seconds / row.gpus


_JOBS: dict[str, tuple[Job, list[list[Collective]]]] = {}


def _job(row: Row) -> tuple[Job, list[list[Collective]]]:
    """Returns the job of a row and the collectives of its pipeline ranks, which do not depend on what is fitted."""
    if row.name not in _JOBS:
        job = Job(row.recipe(), row.gpus, row.program)
        _JOBS[row.name] = job, [traffic(job, rank) for rank in range(job.layout.pipeline)]
    return _JOBS[row.name]


def memory_gib(row: Row) -> float:
    """Returns the largest reserved memory of the pipeline ranks."""
    job, _ = _job(row)
    return max(with_program_loss(job, memory(job, rank)).reserved for rank in range(job.layout.pipeline)) / GIB


# What is fitted beside the efficiency of each GPU and precision, with the values that are tried.
SEARCHED = {
    "single_fraction": (0.45, 0.5, 0.55, 0.6, 0.7, 0.85),
    "exchange_fraction": (0.3, 0.4, 0.5, 0.6, 0.8),
    "grouped_half_rows": (256.0, 512.0, 1024.0, 2048.0, 4096.0),
}
# Where no fitted row depends on it: all-to-alls of nccl-tests reach about 0.8 of its all-gathers. The shipped figure is fitted to
# all rows, and would have seen the source that it judges.
UNFITTED = {"exchange_fraction": 0.8}


@dataclass(frozen=True)
class Fit:
    """Figures that were fitted to some rows."""

    efficiencies: dict[tuple[str, str], float]  # by GPU and precision
    constants: dict[str, float]

    def efficiency(self, group: tuple[str, str]) -> float:
        """Returns that of a GPU and a precision; without rows of it, the median of those of this precision."""
        alike = [value for (_, precision), value in self.efficiencies.items() if precision == group[1]]
        return self.efficiencies.get(group) or statistics.median(alike)

    def predict(self, row: Row) -> float:
        """Returns the throughput of a row."""
        value = self.efficiency(row.group)
        return tokens_per_second(row, efficiency=value, float8_efficiency=value, **self.constants)


@cache
def _efficiency(row_name: str, constants: tuple[tuple[str, float], ...]) -> float:
    """Returns the efficiency at which the prediction of a row is the measurement, in steps: it does not change communication that
    is not hidden."""
    row, efficiency = BY_NAME[row_name], 1.0
    for _ in range(5):
        predicted = tokens_per_second(row, efficiency=efficiency, float8_efficiency=efficiency, **dict(constants))
        efficiency = min(2.0, max(0.1, efficiency * row.tokens_per_second / predicted))
    return efficiency


def fit(rows: Iterable[Row]) -> Fit:
    """Fits to the listed ones of some rows: constants one after the other, and the median efficiency of each GPU and precision."""
    rows = [row for row in rows if row.listed]
    constants = dict(UNFITTED)
    for name, values in SEARCHED.items():
        affected = [row for row in rows if row.name in _affected(name)]
        if affected:

            def loss(value: float, name: str = name, affected: Sequence[Row] = affected) -> float:
                trial = Fit(_efficiencies(rows, constants), constants | {name: value})
                return sum(abs(math.log(trial.predict(row) / row.tokens_per_second)) for row in affected)

            constants[name] = min(values, key=loss)
    return Fit(_efficiencies(rows, constants), constants)


def _efficiencies(rows: Iterable[Row], constants: Mapping[str, float]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if kind(row) != MIXTURES:  # whose errors are not those of a GPU
            found[row.group].append(_efficiency(row.name, tuple(constants.items())))
    return {group: statistics.median(values) for group, values in found.items()}


@cache
def _affected(name: str) -> frozenset[str]:
    """Returns the names of the rows whose prediction depends on a constant."""
    first, *_, last = SEARCHED[name]
    return frozenset(
        row.name
        for row in ROWS
        if abs(tokens_per_second(row, **{name: first}) / tokens_per_second(row, **{name: last}) - 1) > 1e-3
    )


def distribution(errors: Iterable[float], goal: float) -> dict[str, Any]:
    """Returns quantiles of the absolute errors."""
    found = sorted(map(abs, errors))
    if not found:
        return {"number": 0}
    within = sum(error <= goal for error in found)
    quantile = found[min(len(found) - 1, int(0.9 * len(found)))]
    return {
        "number": len(found), "goal": goal, "within_goal": within, "median": round(statistics.median(found), 4),
        "percentile_90": round(quantile, 4), "largest": round(found[-1], 4),
    }  # fmt: skip


def ratio_errors(predictions: Sequence[Prediction]) -> list[tuple[str, str, float]]:
    """Returns the relative error of the ratio of throughputs of each two rows of a table."""
    found = []
    for first, second in combinations(predictions, 2):
        if first.row.table == second.row.table:
            error = (1 + first.error) / (1 + second.error) - 1
            found.append((first.row.name, second.row.name, error))
    return found


def validate(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns all predictions, what was fitted, and the distributions of the errors."""
    shipped = fit(rows)
    without = {
        source: fit(row for row in rows if row.source != source) for source in dict.fromkeys(row.source for row in rows)
    }
    predictions = [
        Prediction(row, kind(row), tokens_per_second(row), without[row.source].predict(row), memory_gib(row))
        for row in rows
    ]
    listed = [each for each in predictions if each.row.listed]
    unlisted = [each for each in predictions if not each.row.listed]
    dense = [each for each in listed if each.kind != MIXTURES]
    mixtures = [each for each in listed if each.kind == MIXTURES]
    speed, ratio = GOALS["tokens per second"], GOALS["ratio"]
    first = [each.row.first_error for each in dense if each.row.first_error is not None]
    first_mixtures = [each.row.first_error for each in mixtures if each.row.first_error is not None]
    memory_errors = [each.memory_error for each in predictions if each.memory_error is not None]
    return {
        "command": "python -m benchmarks.planner_validation --out benchmarks/results/planner_validation.json",
        "efficiencies": {" ".join(group): round(value, 3) for group, value in shipped.efficiencies.items()},
        "constants": shipped.constants,
        "errors": {
            "dense, source not fitted": distribution((each.error for each in dense), speed),
            "dense, all sources fitted": distribution((each.fitted_error for each in dense), speed),
            "dense, when first compared": distribution(first, speed),
            "mixtures, source not fitted": distribution((each.error for each in mixtures), MIXTURE_GOAL),
            "mixtures, all sources fitted": distribution((each.fitted_error for each in mixtures), MIXTURE_GOAL),
            "mixtures, when first compared": distribution(first_mixtures, MIXTURE_GOAL),
            "effects that no plan models": distribution(
                (e.error for e in unlisted if e.row.note != published.ADDED), speed
            ),
            "added after the fit": distribution((e.error for e in unlisted if e.row.note == published.ADDED), speed),
            "ratios within tables": distribution((error for *_, error in ratio_errors(listed)), ratio),
            "memory": distribution(memory_errors, GOALS["memory"]),
        },
        "order": order(listed),
        "sources": {
            source: distribution((e.error for e in listed if e.row.source == source), speed) for source in without
        },
        "ranges": ranges(listed),
        "ratio_range": _ratio_range(listed),
        "rows": [_record(each) for each in predictions],
    }


def kind(row: Row) -> str:
    """Returns the class of runs that a row belongs to."""
    return kind_of(_job(row)[0], load_hardware(row.hardware))


def order(predictions: Sequence[Prediction]) -> dict[str, int]:
    """Counts the pairs of rows of a table that differ by more than 5%, and those that are predicted in the right order."""
    pairs = [
        (first, second)
        for first, second in combinations(predictions, 2)
        if first.row.table == second.row.table
        and abs(math.log(first.row.tokens_per_second / second.row.tokens_per_second)) > math.log(1.05)
    ]
    right = sum(
        (first.tokens_per_second > second.tokens_per_second)
        == (first.row.tokens_per_second > second.row.tokens_per_second)
        for first, second in pairs
    )
    return {"pairs": len(pairs), "right": right}


def ranges(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns for each class with enough runs, and for all dense runs with more than FSDP, the range that contains 90% of
    measured over predicted speeds, the source not fitted."""
    found: dict[str, Any] = {}
    classes: dict[str, list[Prediction]] = defaultdict(list)
    for each in predictions:
        classes[each.kind].append(each)
    classes = {name: alike for name, alike in classes.items() if len(alike) >= FEWEST or name == MIXTURES}
    classes[OTHERS] = [each for each in predictions if each.kind != MIXTURES and "FSDP" not in each.kind]
    for name, alike in sorted(classes.items()):
        low, high = quantiles([1 / (1 + each.error) for each in alike])
        within = sum(low <= 1 / (1 + each.error) <= high for each in alike)
        errors = [abs(each.error) for each in alike]
        found[name] = {
            "runs": len(alike), "sources": len({each.row.source for each in alike}), "low": round(low, 2), "high": round(high, 2),
            "within": within, "median": round(statistics.median(errors), 3),
        }  # fmt: skip
    return found


def _ratio_range(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns the range of measured over predicted ratios of two rows of a table, in both directions."""
    found = sorted(abs(math.log1p(error)) for *_, error in ratio_errors(predictions))
    high = math.exp(found[math.ceil(0.9 * len(found)) - 1])
    return {"runs": len(found), "low": round(1 / high, 2), "high": round(high, 2)}


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the narrowest range, as a ratio, that contains 90% of some values."""
    found = sorted(values)
    number = math.ceil(0.9 * len(found))
    starts = range(len(found) - number + 1)
    best = min(starts, key=lambda start: found[start + number - 1] / found[start])
    return found[best], found[best + number - 1]


def _record(prediction: Prediction) -> dict[str, Any]:
    row, memory_error = prediction.row, prediction.memory_error
    values = {key: value for key, value in asdict(row).items() if key not in ("program", "note")}
    return {
        "name": row.name, **values, "source": row.source, "kind": prediction.kind,
        "fitted": round(prediction.fitted, 1), "fitted_error": round(prediction.fitted_error, 4),
        "predicted": round(prediction.tokens_per_second, 1), "error": round(prediction.error, 4),
        "predicted_memory_gib": round(prediction.memory_gib, 2),
        "memory_error": None if memory_error is None else round(memory_error, 4),
        "reason": row.note,
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """Returns the results as the tables of the documentation."""
    errors = []
    for name, found in results["errors"].items():
        if found["number"]:
            figures = (f"{found[key]:.1%}" for key in ("median", "percentile_90", "largest"))
            errors.append((name, found["number"], f"{found['within_goal']} (of {found['goal']:.0%})", *figures))
    classes = (
        (name, found["runs"], found["sources"], f"{found['median']:.1%}", f"{found['low']:.2f} to {found['high']:.2f}")
        for name, found in results["ranges"].items()
    )
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = defaultdict(list)
    for row in results["rows"]:
        groups[row["table"], row["hardware"], row["listed"]].append(row)
    sources = []
    for (source, hardware, listed), alike in groups.items():
        models = ", ".join(dict.fromkeys(row["model"] for row in alike))
        gpus = _span([row["gpus"] for row in alike], ",")
        memory_errors = [row["memory_error"] for row in alike if row["memory_error"] is not None]
        errors_of = (_span([row["error"] for row in alike], "+.0%"), _span(memory_errors, "+.0%"))
        sources.append((source, models, hardware, gpus, len(alike), *errors_of, "yes" if listed else "no"))
    tables = (
        table(("Errors", "Number", "Within goal", "Median", "90th percentile", "Largest"), errors),
        table(("Class", "Runs", "Sources", "Median error", "Measured over predicted, 90% of runs"), classes),
        table(
            ("Source", "Model", "GPU", "Number of GPUs", "Runs", "Error of speed", "Error of memory", "Fitted"), sources
        ),
    )
    return "\n\n".join(tables)


def _span(values: Sequence[float], form: str) -> str:
    """Returns the lowest and the highest value as text."""
    ends = dict.fromkeys(format(end(values), form) for end in (min, max)) if values else ()
    return " to ".join(ends)


def main() -> None:
    """Runs the comparison."""
    parser = parser_of(__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the tables of the documentation")
    arguments = parser.parse_args()
    results = validate(ROWS)
    write(arguments.out, results)
    if arguments.markdown:
        print(markdown(results))
        return
    for row in results["rows"]:
        print(f"{row['error']:+7.1%}  {row['fitted_error']:+7.1%}  {row['tokens_per_second']:8.0f}  {row['name']}")
    for name, found in results["errors"].items():
        print(name, found)
    for name in ("order", "ranges", "sources", "efficiencies", "constants"):
        print(name, json.dumps(results[name], indent=1))


if __name__ == "__main__":
    main()
