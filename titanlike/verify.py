"""`titanlike verify`: compares a layout with one process, numerically, by running the recipe's own program on a small model."""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import tomli

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.layout import DIMENSIONS, SCHEDULES
from titanlike.config.load import nearest
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Data, Float8, Parallelism, Tokenizer
from titanlike.distributed import environment
from titanlike.run.start import REPOSITORY
from titanlike.utils.arguments import parse_int

# Relative tolerances for float32 sums in a different order, which Adam amplifies.
TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-4}
MAX_PROCESSES = 32
LAYOUT = (*DIMENSIONS, "expert")  # keys of [parallelism] that one process has 1 of
# Sections whose changes are not printed.
NOT_SHOWN = ("run", "checkpoint", "validation", "evaluation", "sample", "metrics")


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
        from titanlike.checkpoint import read_whole  # imports torch

        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
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
        chosen, tolerances = _parse(layout), parse_tolerance(tolerance)
        processes = math.prod(int(chosen[name]) for name in DIMENSIONS)
        arguments = [str(recipe), *overrides, *(f"--parallelism.{key}={value}" for key, value in chosen.items())]
        values = tomli.loads(_checked(_run([*arguments, "--resolved"], 1)))
        # Check the layout at the real size first: the small model would hide what does not divide.
        checked = _run([*arguments, "--check", str(processes)], 1)
        if checked.returncode:  # the batch is replaced by one that fits, and float8 is disabled
            small = fitting_batch(values["parallelism"], processes) | _float8_off(values)
            _checked(_run([*arguments, *_as_options(small), "--check", str(processes)], 1))
    except UserError as error:
        environment.fail(error)
    title = " x ".join(f"{name} {chosen[name]}" for name in LAYOUT if chosen[name] != "1") or "one process"
    print(f"{recipe} under {title} ({processes} processes) against one process, {steps} steps on the CPU\n")
    if checked.returncode:
        print(
            f"with the batch of the recipe, this layout is refused: {checked.stderr.strip().removeprefix('error: ')}\n"
        )
    overridden = [word.removeprefix("--").partition("=")[0] for word in overrides]
    smaller = shrink(values, processes, steps)
    smaller = {key: value for key, value in smaller.items() if not (key.startswith("optimizer.") and key in overridden)}
    print("changed for the comparison, to run on this machine and to expose wrong gradients:")
    for key, value in smaller.items():
        before = values[key.partition(".")[0]].get(key.partition(".")[2])
        if before != value and key.partition(".")[0] not in NOT_SHOWN:
            print(f"  {key:<28} {_toml(before)} -> {_toml(value)}")
    if missing := [f"optimizer.{key}" for key in ("lr", "eps") if key not in values.get("optimizer", {})]:
        print(
            f"  {' and '.join(missing)}: not in this recipe; an optimizer that amplifies rounding may require --tolerance"
        )
    own = [f"[{name}]" for name in values if name not in PretrainRecipe.__dataclass_fields__]
    own += [f"optimizer.{key}" for key in values.get("optimizer", {}) if key not in Optimizer.__dataclass_fields__]
    if own:
        print(f"not changed, because only this program has them: {', '.join(own)}")
    print(flush=True)
    alone: dict[str, Any] = {f"parallelism.{name}": 1 for name in LAYOUT}
    alone |= {"parallelism.pipeline_split": [], "parallelism.pipeline_stages": 0}
    alone |= {"training.local_batch_size": smaller["training.global_batch_size"]}
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, number, changes in (("one", 1, smaller | alone), ("layout", processes, smaller)):
            done = _run([*arguments, *_as_options(changes | {"run.dir": folder, "run.name": name})], number)
            if done.returncode:
                print(done.stderr.strip()[-4000:], file=sys.stderr)
                print(f"NOT equal: {'one process' if number == 1 else title} ended with exit code {done.returncode}")
                sys.exit(1)
            results.append(Result.of(Path(folder, name)))
    note = " (float8 off: its rounding hides the effect of layouts)" if _float8_off(values) else ""
    sys.exit(_report(results[0], results[1], title, note, tolerances))


def fitting_batch(parallelism: dict[str, Any], processes: int) -> dict[str, Any]:
    """Returns the smallest batch of two or more micro-batches that the layout and its pipeline schedule support."""
    num_data_ranks = processes // math.prod(parallelism[name] for name in ("tensor", "context", "pipeline"))
    return {
        "training.batch_ramp": [],
        "training.global_batch_size": num_data_ranks * max(2, _num_stages(parallelism)),
        "training.local_batch_size": 1,
    }


def _num_stages(parallelism: dict[str, Any]) -> int:
    schedule = SCHEDULES[parallelism["pipeline_schedule"]]
    per_rank = parallelism["pipeline_stages"] or schedule.stages_per_rank
    split = parallelism.get("pipeline_split", [])
    return len(split) or (parallelism["pipeline"] * per_rank if parallelism["pipeline"] > 1 else 1)


def _float8_off(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the overrides that disable float8, if it is enabled. Float8 amplifies a rounding difference to 1/16 of a value:
    layouts cannot be compared through it."""
    return _changed_keys("float8", Float8(), values)


def shrink(values: dict[str, Any], processes: int, steps: int) -> dict[str, Any]:
    """Returns overrides that make a resolved recipe run within seconds on a CPU and keep it divisible by the layout."""
    model, parallelism, training = values["model"], values["parallelism"], values["training"]
    tensor, context, pipeline = (parallelism[name] for name in ("tensor", "context", "pipeline"))
    optimizer, split = values.get("optimizer", {}), parallelism.get("pipeline_split", [])
    stages = _num_stages(parallelism)
    heads = model["num_heads"]
    kv_heads = model.get("num_kv_heads", heads)
    small_kv = min(kv_heads, max(tensor, 2))  # one or two per rank
    small_heads = min(heads, small_kv * min(heads // kv_heads, 2))
    dim = min(model["dim"], 16 * small_heads)
    small: dict[str, Any] = {
        "num_layers": min(model["num_layers"], stages + 1),  # stages of unequal size
        "num_heads": small_heads,
        "num_kv_heads": small_kv,
        "dim": dim,
        "head_dim": min(model.get("head_dim", 0), 24),  # not dim / num_heads, if it is a field
        "ffn_dim": min(model.get("ffn_dim", 0), 3 * dim),
        "vocab_size": min(model["vocab_size"], math.lcm(64, tensor) * -(-320 // math.lcm(64, tensor))),
    }
    if "num_experts" in model:
        small["num_experts"] = min(model["num_experts"], parallelism["expert"] * -(-8 // parallelism["expert"]))
        small["experts_per_token"] = min(model["experts_per_token"], small["num_experts"] - 1)
    if "ffn_dim" in model and small["ffn_dim"] % tensor:
        small["ffn_dim"] = model["ffn_dim"]
    masked = values["data"].get("document_masks", False) or "chat" in values["data"].get("source", "")
    changes = {f"model.{key}": value for key, value in small.items() if key in model}
    pieces = tensor * (2 * context if context > 1 else 1)
    changes |= {
        **_changed_keys("tokenizer", Tokenizer(), values),
        **_changed_keys("data", Data(source="synthetic", document_masks=masked), values),
        "training.steps": steps,
        "training.seq_len": min(training["seq_len"], -(-32 // pieces) * pieces),
        **fitting_batch(parallelism, processes),
        "training.compute_dtype": "float32",
        "training.master_dtype": "float32",
        "training.reduce_dtype": "float32",
        "training.matmul_precision": "highest",
        "training.attention": "auto",
        "training.non_finite": "stop",
        # Adam normalizes gradients: with the usual eps, rounding noise around 0 becomes a full step.
        "optimizer.eps": max(optimizer.get("eps", 0.0), 1e-4),
        "optimizer.lr": max(optimizer.get("lr", 0.0), 1e-2),  # a wrong gradient must show within a few steps
        "compile.mode": "none",  # compilation would dominate the run time
        **_float8_off(values),
        "optimizer.state_dtype": "full",
        "optimizer.stochastic_rounding": False,
        "schedule.warmup_steps": min(values["schedule"].get("warmup_steps", 0), 2, steps),
        "schedule.decay_steps": 0,
        "schedule.decay_ratio": 0.0,
        "parallelism.cpu_offload": False,
        "parallelism.async_tensor_parallel": False,
        "run.device": "cpu",
        "checkpoint.initial": "",  # the small model has other shapes
        "checkpoint.enabled": True,
        "checkpoint.interval": 0,
        "validation.interval": steps,
        "validation.batches": 2,
        "evaluation.interval": 0,
        "sample.tokens": 0,
        "metrics.interval": 1,
        "metrics.trackers": [],
    }
    if split:
        changes["parallelism.pipeline_split"] = [1] * (stages - 1) + [changes["model.num_layers"] - stages + 1]
    checkpoint_mode = values["activation_checkpoint"]["mode"]
    if checkpoint_mode == "memory_budget" or (
        checkpoint_mode == "selective" and SCHEDULES[parallelism["pipeline_schedule"]].splits_backward and pipeline > 1
    ):
        changes["activation_checkpoint.mode"] = "full"  # both require the compiler here
    # A program of one's own may have other keys in its sections.
    return {
        key: value for key, value in changes.items() if key.partition(".")[2] in values.get(key.partition(".")[0], {})
    }


def _changed_keys(name: str, section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a section of the recipe that differ from those of `section`."""
    wanted = json.loads(json.dumps(asdict(section)))
    return {f"{name}.{key}": value for key, value in wanted.items() if values.get(name, {}).get(key, value) != value}


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


def parse_tolerance(text: str) -> dict[str, float]:
    """Returns the tolerance of each quantity: `text` is one number for all, or QUANTITY=NUMBER,... for some."""
    found = dict(TOLERANCES)
    for item in filter(None, text.split(",")):
        name, _, number = item.rpartition("=")
        quantity = name.strip().replace("_", " ")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if (name and quantity not in found) or not 0 <= value < math.inf:
            raise UserError(
                f"--tolerance {text}: {item!r} is neither a number, such as 1e-3, nor a quantity (loss, gradient_norm or weights) "
                "with its number, such as weights=1e-3"
            )
        found |= {quantity: value} if name else dict.fromkeys(found, value)
    return found


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the output of a command. Raises `UserError` with its error message if it failed."""
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return done.stdout


def _as_options(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={_toml(value)}" for key, value in values.items()]


def _parse(layout: str) -> dict[str, str]:
    """Returns the dimensions and any other given key of [parallelism], as text."""
    chosen = dict.fromkeys(LAYOUT, "1")
    keys = list(Parallelism.__dataclass_fields__)
    for item in filter(None, re.split(r",(?=\s*[a-z_]+=)", layout)):
        key, equals, value = item.strip().partition("=")
        if key not in keys or not equals:
            near = nearest(key, keys)
            raise UserError(
                f"--layout {layout}: {item!r} is not KEY=VALUE with a key of [parallelism], such as tensor=2"
                + (f"; did you mean {near}?" if near and near != key else "")
            )
        if key in LAYOUT and (parse_int(value) or 0) < 1:
            raise UserError(f"--layout {layout}: {item!r}: give a number of processes, such as {key}=2")
        chosen[key] = value
    if math.prod(int(chosen[name]) for name in DIMENSIONS) > MAX_PROCESSES:
        raise UserError(f"--layout {layout}: more than {MAX_PROCESSES} processes on one machine; fewer show the same")
    return chosen


def _run(words: Sequence[str], processes: int) -> subprocess.CompletedProcess[str]:
    launch = Path(__file__).parent / "cli" / "launch.py"
    return subprocess.run(
        [sys.executable, str(launch), *words],
        env=environment.child_environment({"NPROC": str(processes), "NNODES": "1", "PYTHONPATH": str(REPOSITORY)}),
        capture_output=True,
        text=True,
        check=False,
    )


def _toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
