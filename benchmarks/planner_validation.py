"""Predictions of the planner beside published measurements of Llama pre-training.

    python -m benchmarks.planner_validation --out benchmarks/results/planner_validation.json
    python -m benchmarks.planner_validation --markdown

Each row of `benchmarks/published.py` is predicted with the recipe that computes the same, and with a record of how the measured
program differs from this toolkit. One efficiency is fitted for each hardware and precision, to every other row of such a group in
the order of the file, and judged on the rest. Rows that are marked as not listed are judged only, those of other hardware with the
efficiency in its file. All rows stay, with the reason where the error is large.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.published import ROWS, Row
from titanlike.tools.planning.collectives import Collective
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.step_time import step_time
from titanlike.tools.planning.traffic import traffic

GOALS = {"tokens per second": 0.15, "ratio": 0.05, "memory": 0.10}
GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a row."""

    row: Row
    use: str  # fit or judge
    tokens_per_second: float  # of a GPU
    memory_gib: float

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput."""
        return self.tokens_per_second / self.row.tokens_per_second - 1.0

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory."""
        if self.row.memory_gib is None:
            return None
        return self.memory_gib / self.row.memory_gib - 1.0


def shipped(row: Row) -> float:
    """Returns the efficiency in the file of a row's hardware."""
    hardware = load_hardware(row.hardware)
    return hardware.efficiency if row.float8 == "none" else hardware.float8_efficiency


def tokens_per_second(row: Row, efficiency: float) -> float:
    """Returns the predicted throughput of a GPU with this efficiency of the hardware."""
    job = Job(row.recipe(), row.gpus)
    hardware = replace(load_hardware(row.hardware), efficiency=efficiency, float8_efficiency=efficiency)
    collectives = [traffic(job, rank) for rank in range(job.layout.pipeline)]
    if row.program.gathers_once and job.layout.pipeline > 1:
        collectives = [_gathered_once(of_rank) for of_rank in collectives]
    time = step_time(job, hardware, collectives, row.program)
    return job.recipe.training.tokens_per_step / time.seconds / row.gpus


def _gathered_once(collectives: Sequence[Collective]) -> list[Collective]:
    """Returns collectives that gather the weights as often as they reduce the gradients, which are as large."""
    others = [each for each in collectives if each.purpose != "weights"]
    gradients = [each for each in others if each.purpose == "gradients" and each.kind == "reduce-scatter"]
    return [*others, *(replace(each, kind="all-gather", purpose="weights") for each in gradients)]


def memory_gib(row: Row) -> float:
    """Returns the largest reserved memory of the pipeline ranks."""
    job = Job(row.recipe(), row.gpus)
    # The planner counts a float32 copy of the logits in eager code.
    extra = row.program.logit_bytes - (0 if row.compiled else 4)
    extra = max(0, round(extra * job.tokens * job.recipe.model.vocab_size / job.layout.tensor))
    found = []
    for rank in range(job.layout.pipeline):
        planned = memory(job, rank)
        moments = tuple(
            replace(moment, usage=replace(moment.usage, loss=moment.usage.loss + extra))
            if moment.usage.loss
            else moment
            for moment in planned.moments
        )
        found.append(replace(planned, moments=moments).reserved)
    return max(found) / GIB


def uses(rows: Iterable[Row]) -> list[str]:
    """Returns for each row whether it is fitted or judged: every other row of a hardware and precision is fitted."""
    seen: dict[tuple[str, str], int] = defaultdict(int)
    found = []
    for row in rows:
        found.append("judge" if not row.listed or seen[row.group] % 2 else "fit")
        seen[row.group] += row.listed
    return found


def fit(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Returns the efficiency of each hardware and precision: the median of those at which the prediction is the measurement."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        efficiency = 1.0
        for _ in range(
            6
        ):  # of the computation; communication that is not hidden takes its time, so this converges in steps
            efficiency *= row.tokens_per_second / tokens_per_second(row, efficiency)
            efficiency = min(2.0, max(0.1, efficiency))
        found[row.group].append(efficiency)
    return {group: statistics.median(values) for group, values in found.items()}


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


def validate(rows: Sequence[Row] = ROWS) -> dict[str, Any]:
    """Returns all predictions, the fitted efficiencies and the distributions of the errors."""
    used = uses(rows)
    efficiencies = fit(row for row, use in zip(rows, used, strict=True) if use == "fit")
    predictions = [
        Prediction(row, use, tokens_per_second(row, efficiencies.get(row.group) or shipped(row)), memory_gib(row))
        for row, use in zip(rows, used, strict=True)
    ]
    judged = [each for each in predictions if each.use == "judge"]
    listed = [each for each in judged if each.row.listed]
    ratios = ratio_errors(predictions)
    listed_ratios = ratio_errors([each for each in predictions if each.row.listed])
    memory_errors = [each.memory_error for each in predictions if each.memory_error is not None]
    speed, ratio = GOALS["tokens per second"], GOALS["ratio"]
    return {
        "command": "python -m benchmarks.planner_validation --out benchmarks/results/planner_validation.json",
        "split": "of the listed rows of each hardware and precision, the first, third, ... are fitted, the others judged",
        "efficiencies": {" ".join(group): round(value, 3) for group, value in efficiencies.items()},
        "errors": {
            "tokens per second, fitted rows": distribution((e.error for e in predictions if e.use == "fit"), speed),
            "tokens per second, judged rows": distribution((e.error for e in listed), speed),
            "tokens per second, further rows": distribution((e.error for e in judged if not e.row.listed), speed),
            "ratios within tables": distribution((error for *_, error in listed_ratios), ratio),
            "ratios within tables, with further rows": distribution((error for *_, error in ratios), ratio),
            "memory": distribution(memory_errors, GOALS["memory"]),
        },
        "rows": [_record(each) for each in predictions],
    }


def _record(prediction: Prediction) -> dict[str, Any]:
    row, memory_error = prediction.row, prediction.memory_error
    values = {key: value for key, value in asdict(row).items() if key not in ("program", "note")}
    return {
        "name": row.name, **values, "use": prediction.use, "predicted": round(prediction.tokens_per_second, 1),
        "error": round(prediction.error, 4),
        "predicted_memory_gib": round(prediction.memory_gib, 2),
        "memory_error": None if memory_error is None else round(memory_error, 4),
        "reason": row.note,
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """Returns the results as the tables of the documentation."""
    lines = ["| Errors | Number | Within goal | Median | 90th percentile | Largest |", "|---|---|---|---|---|---|"]
    for name, found in results["errors"].items():
        if found["number"]:
            figures = " | ".join(f"{found[key]:.1%}" for key in ("median", "percentile_90", "largest"))
            within = f"{found['within_goal']} (of {found['goal']:.0%})"
            lines.append(f"| {name} | {found['number']} | {within} | {figures} |")
    lines += ["", "| Measurement | Use | Published | Predicted | Error | GiB | Predicted | Error | Note |"]
    lines.append("|" + "---|" * 9)
    for row in results["rows"]:
        gib, predicted, error = (row[key] for key in ("memory_gib", "predicted_memory_gib", "memory_error"))
        memory_cells = [
            f"{gib:.1f}" if gib else "-", f"{predicted:.1f}" if gib and predicted else "-",
            "-" if error is None else f"{error:+.1%}",
        ]  # fmt: skip
        speeds = [f"{row['tokens_per_second']:,.0f}", f"{row['predicted']:,.0f}", f"{row['error']:+.1%}"]
        cells = [row["name"], row["use"], *speeds, *memory_cells, row["reason"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the documentation")
    arguments = parser.parse_args()
    results = validate()
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if arguments.markdown:
        print(markdown(results))
        return
    for row in results["rows"]:
        print(
            f"{row['error']:+7.1%}  {row['predicted']:8.0f} of {row['tokens_per_second']:8.0f}  {row['use']:5}  {row['name']}"
        )
    for name, found in results["errors"].items():
        print(name, found)
    print("efficiencies", results["efficiencies"])


if __name__ == "__main__":
    main()
