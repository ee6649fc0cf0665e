"""`titanlike verify`: compares a layout with one process, numerically, by running the recipe's own program on a small model."""

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tomli

from titanlike.config import UserError
from titanlike.config.layout import DIMENSIONS, LAYOUT_KEYS
from titanlike.config.optimizer import Optimizer
from titanlike.config.shipped import REPOSITORY
from titanlike.distributed import environment, launch_config
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.tools.metrics_file import read_records
from titanlike.tools.programs import options_of
from titanlike.tools.verify.batches import Batches, first_difference, read_batches
from titanlike.tools.verify.options import parse_layout, parse_tolerance
from titanlike.tools.verify.small_recipe import fitting_batch, float8_off, print_changes, shrink

# Relative tolerances for float32 sums in a different order, which Adam amplifies.
TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-4}


@dataclass(frozen=True)
class Result:
    """The records and the last checkpoint of a run."""

    losses: list[float]
    gradient_norms: list[float]
    validation: list[float]
    state: dict[str, Any]  # "model" and "optimizer": full tensors by name

    @classmethod
    def of(cls, folder: Path) -> "Result":
        """Reads a run directory."""
        from titanlike.checkpoint.loader import read_whole  # imports torch

        records = read_records(folder / "metrics.jsonl")
        steps = [record for record in records if "loss" in record]
        return cls(
            losses=[record["loss"] for record in steps],
            gradient_norms=[record["grad_norm"] for record in steps],
            validation=[record["validation_loss"] for record in records if "validation_loss" in record],
            state=read_whole(sorted((folder / "checkpoints").glob("step-*[0-9]"))[-1]),
        )


def differences(found: Result, expected: Result, *, smallest: float = 1e-2) -> dict[str, tuple[float, str]]:
    """Returns the largest relative difference of losses (including validation), gradient norms and weights, and where it is: a
    step, "validation" or the name of a weight.

    A weight is compared relative to the largest element of its tensor, or to `smallest` if that is larger.
    """

    def relative(difference: float, size: float) -> float:
        return difference / size if math.isfinite(difference) and size else math.inf  # NaN never agrees

    def worst(one: Sequence[float], other: Sequence[float]) -> tuple[float, str]:
        each = [relative(abs(a - b), abs(b)) for a, b in zip(one, other, strict=True)]
        return max(each, default=0.0), f"step {each.index(max(each)) + 1}" if each else ""

    weights_found, weights_expected = found.state["model"], expected.state["model"]
    weights = dict.fromkeys(
        weights_found.keys() ^ weights_expected.keys(), math.inf
    )  # saved under one of the layouts only
    for name in weights_found.keys() & weights_expected.keys():
        difference, size = weights_found[name] - weights_expected[name], weights_expected[name].abs().max().item()
        weights[name] = relative(difference.abs().max().item(), max(size, smallest))
    name = max(weights, key=lambda name: weights[name])
    validation = worst(found.validation, expected.validation)[0], "validation"
    return {
        "loss": max(worst(found.losses, expected.losses), validation, key=lambda difference: difference[0]),
        "gradient norm": worst(found.gradient_norms, expected.gradient_norms),
        "weights": (weights[name], name),
    }


def verify(recipe: Path, layout: str, steps: int, tolerance: str = "", overrides: Sequence[str] = ()) -> NoReturn:
    """Runs the recipe in one process and under the layout, and prints both. Exits with 0 if they agree, 1 if not."""
    try:
        chosen, tolerances = parse_layout(layout), parse_tolerance(tolerance, TOLERANCES)
        processes = math.prod(int(chosen[name]) for name in DIMENSIONS)
        arguments = [str(recipe), *overrides, *(f"--parallelism.{key}={value}" for key, value in chosen.items())]
        values = tomli.loads(_checked(_run([*arguments, "--resolved"], 1)))
        # Check the layout at the real size first: the small model would hide what does not divide.
        checked = _run([*arguments, "--check", str(processes)], 1)
        if checked.returncode:  # the batch is replaced by one that fits, and float8 is disabled
            small = fitting_batch(values["parallelism"], processes) | float8_off(values)
            _checked(_run([*arguments, *options_of(small), "--check", str(processes)], 1))
    except UserError as error:
        environment.fail(error)
    title = " x ".join(f"{name} {chosen[name]}" for name in LAYOUT_KEYS if chosen[name] != "1") or "one process"
    print(f"{recipe} under {title} ({processes} processes) against one process, {steps} steps on the CPU\n")
    if checked.returncode:
        print(f"with the batch of the recipe, this layout is refused: {_message(checked)}\n")
    overridden = [word.removeprefix("--").partition("=")[0] for word in overrides]
    smaller = shrink(values, processes, steps)
    smaller = {key: value for key, value in smaller.items() if not (key.startswith("optimizer.") and key in overridden)}
    print_changes(values, smaller)
    if missing := [f"optimizer.{key}" for key in ("lr", "eps") if key not in values.get("optimizer", {})]:
        print(
            f"  {' and '.join(missing)}: not in this recipe; an optimizer that amplifies rounding may require --tolerance"
        )
    changed = {key.partition(".")[0] for key in smaller}
    own = [f"[{name}]" for name in values if name not in FinetuneRecipe.__dataclass_fields__ and name not in changed]
    own += [f"optimizer.{key}" for key in values.get("optimizer", {}) if key not in Optimizer.__dataclass_fields__]
    if own:
        print(f"not changed, because only this program has them: {', '.join(own)}")
    print(flush=True)
    alone: dict[str, Any] = {f"parallelism.{name}": 1 for name in LAYOUT_KEYS}
    alone |= {"parallelism.pipeline_split": [], "parallelism.pipeline_stages": 0}
    alone |= {"training.local_batch_size": smaller["training.global_batch_size"]}
    with tempfile.TemporaryDirectory() as folder:
        results: list[Result] = []
        batches: list[Batches] = []
        for name, number, changes in (("one", 1, smaller | alone), ("layout", processes, smaller)):
            record = Path(folder, f"batches-{name}")
            record.mkdir()
            done = _run([*arguments, *options_of(changes | {"run.dir": folder, "run.name": name})], number, record)
            if done.returncode == 2:  # a mistake in the recipe, not a difference
                raise UserError(f"the small version of the recipe is refused: {_message(done)}")
            if done.returncode:
                text = done.stderr.strip()  # a crash is named first, and what it does to other ranks last
                print(text if len(text) < 8000 else f"{text[:4000]}\n...\n{text[-4000:]}", file=sys.stderr)
                print(f"NOT equal: {'one process' if number == 1 else title} ended with exit code {done.returncode}")
                sys.exit(1)
            results.append(Result.of(Path(folder, name)))
            batches.append(read_batches(record))
        if difference := first_difference(*batches):
            print(_batches_differ(title, *difference))
            sys.exit(1)
    note = " (float8 off: its rounding hides the effect of layouts)" if float8_off(values) else ""
    sys.exit(_report(results[0], results[1], title, note, tolerances))


def _batches_differ(title: str, where: str, size: int, missing: int) -> str:
    return (
        f"NOT equal: the batches differ, first in {where}: one process does not read {missing} of the {size} sequences that "
        f"{title} reads. Losses and weights are therefore not compared.\n"
        "The usual cause is a dataset whose order depends on the number of data-parallel ranks, because each rank shuffles a share "
        "of its own. Compare a layout with one data-parallel rank, such as tensor=2, or read rows by their index in the global "
        "batch (BatchSource in docs/data.md)."
    )


def _report(one: Result, other: Result, title: str, note: str, tolerances: dict[str, float]) -> int:
    width = max(len(title), 12)
    print(f"{'step':>10}  {'loss: one':>12} {title:>{width}}   {'norm: one':>12} {title:>{width}}")
    rows = zip(one.losses, other.losses, one.gradient_norms, other.gradient_norms, strict=True)
    for step, (a, b, c, d) in enumerate(rows, start=1):
        print(f"{step:>10}  {a:>12.6f} {b:>{width}.6f}   {c:>12.6f} {d:>{width}.6f}")
    for a, b in zip(one.validation, other.validation, strict=True):
        print(f"{'validation':>10}  {a:>12.6f} {b:>{width}.6f}")
    print()
    found = differences(other, one)
    for what, (value, where) in found.items():
        print(f"  {what:<14} maximum relative difference {value:.1e} ({where}); tolerance {tolerances[what]:.0e}")
    wrong = [what for what, (value, _) in found.items() if not value <= tolerances[what]]
    print(f"\nNOT equal: {', '.join(wrong)}" if wrong else f"\nequal within tolerance{note}")
    return 1 if wrong else 0


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the output of a command. Raises `UserError` with its error message if it failed."""
    if done.returncode:
        raise UserError(_message(done))
    return done.stdout


def _run(words: Sequence[str], processes: int, record: Path | None = None) -> subprocess.CompletedProcess[str]:
    launch = REPOSITORY / "titanlike/run/launch.py"
    return subprocess.run(
        [sys.executable, str(launch), *words],
        env=launch_config.child_environment(
            {"NPROC": str(processes), "NNODES": "1", "PYTHONPATH": str(REPOSITORY)}
            | ({environment.BATCH_RECORD: str(record)} if record else {})
        ),
        capture_output=True,
        text=True,
        check=False,
    )


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the lines of a command that failed, without the prefix that the caller adds again."""
    return re.sub(r"^error: ", "", done.stderr.strip(), flags=re.MULTILINE)
