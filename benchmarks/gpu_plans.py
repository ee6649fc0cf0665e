"""Rows of `benchmarks.run` that a GPU has measured, beside their plans.

    python -m benchmarks.gpu_plans

Prints a table, with the prediction from the kernels of a step. The plan of a torchtitan row is that of its program file, which was
written from these rows. No other figure of the planner is fitted to them; the two constants of the prediction from kernels are.
"""

import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import table as table_of
from benchmarks.models import MODELS
from benchmarks.run import parse_arguments
from benchmarks.subjects import titanlike
from titanlike.hardware.files import file_of_device
from titanlike.tools.null_gpu.kernels import Kernel
from titanlike.tools.null_gpu.rates import Rates
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import Plan, make_plan
from titanlike.tools.planning.program import load_program
from titanlike.tools.programs import load_known

FOLDER = Path(__file__).parent / "results/gpu"
STORED = FOLDER.parent / "ledger_h200.json"
PROGRAMS = {
    "titanlike": (),
    "torchtitan_0_2": ("torchtitan",),
}  # the planner's program file of a subject, where it has one


class Compared(NamedTuple):
    """A row."""

    name: str
    measured: Mapping[str, Any]
    plan: Plan
    of_ledger: float | None  # tokens per second

    @property
    def speed_error(self) -> float:
        """Relative error of the planned tokens per second."""
        return self.plan.tokens_per_second / self.measured["tokens_per_second"] - 1.0

    @property
    def memory_error(self) -> float:
        """Relative error of the planned peak of allocated memory."""
        return self.plan.allocated / 2**30 / self.measured["peak_memory_gib"] - 1.0


def ledger_seconds(job: Job) -> dict[tuple[str, str], float]:
    """Returns the predicted time of a step for each row whose kernels are stored, by file and row. They were recorded with the
    version of PyTorch and of this project that was measured."""
    rates, found = Rates(job, load_hardware("h200"), "h200"), {}
    for row in json.loads(STORED.read_text())["rows"]:
        kernels = [
            (calls, Kernel("operator", name, tuple((tuple(shape), dtype) for shape, dtype in tensors), 0))
            for calls, name, tensors in row["products"]
        ]
        # Sums of a class, of kernels that bytes or instructions bound.
        kernels += [(1, Kernel("operator", name, (), size, issued=issued)) for name, _, size, issued in row["others"]]
        found[row["file"], row["row"]] = sum(calls * rates.seconds(kernel) for calls, kernel in kernels)
    return found


def compared(paths: Iterable[Path]) -> Iterator[Compared]:
    """Yields the rows of these files that have a plan."""
    for path in paths:
        result = json.loads(path.read_text())
        if "rows" not in result:
            continue
        model, arguments = MODELS[result["model"]], parse_arguments(shlex.split(result["command"])[3:])
        for row, measured in result["rows"].items():
            subject, _, kind = row.partition(".")
            if subject not in PROGRAMS or "failed" in measured:
                continue
            task = model.task(
                micro_batch=arguments.micro_batch, subject=subject, row=kind, device="cuda", precision=result["precision"],
                warmup=result["warmup"], steps=result["steps"], block=result["block"], options=result["options"].get(row, {}),
            )  # fmt: skip
            with tempfile.NamedTemporaryFile(suffix=".toml") as file:
                recipe = load_known(
                    Path(file.name), {key: str(value) for key, value in titanlike.keys_of(task, "").items()}
                )
            job = Job(recipe, 1, *map(load_program, PROGRAMS[subject]))
            name = f"{result['model']}, {result['precision']}, {row}"
            name += "".join(f", {key} = {value}" for key, value in task.options.items())
            seconds = ledger_seconds(job).get((path.stem, row))
            yield Compared(
                name, measured, make_plan(job, load_hardware(file_of_device(measured["device"]))),
                result["tokens_per_step"] / seconds if seconds else None,
            )  # fmt: skip


def table(rows: Iterable[Compared]) -> str:
    """Returns the rows as a Markdown table."""
    cells = []
    for row in rows:
        plan, measured = row.plan, row.measured
        low, high = (plan.tokens_per_second * share for share in (plan.range.low, plan.range.high))
        speed = (f"{measured['tokens_per_second']:,.0f}", f"{plan.tokens_per_second:,.0f}", f"{row.speed_error:+.1%}")
        memory = (f"{measured['peak_memory_gib']:.2f}", f"{plan.allocated / 2**30:.2f}", f"{row.memory_error:+.1%}")
        error = row.of_ledger and row.of_ledger / measured["tokens_per_second"] - 1.0
        cells.append((row.name, *speed, f"{low:,.0f} to {high:,.0f}", f"{error:+.1%}" if error else "-", *memory))
    heads = (
        "row", "tokens/s", "planned", "difference", "range of the plan", "ledger", "allocated GiB", "planned GiB", "difference",
    )  # fmt: skip
    return table_of(heads, cells)


if __name__ == "__main__":
    print(table(compared(map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.json"))))))
