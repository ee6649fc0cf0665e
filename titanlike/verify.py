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

from titanlike.config import UserError
from titanlike.config.layout import DIMENSIONS, SCHEDULES
from titanlike.config.load import nearest
from titanlike.config.sections import Data, Parallelism, Tokenizer
from titanlike.distributed import environment
from titanlike.run.start import REPOSITORY

# Relative tolerances for float32 sums in a different order, which Adam amplifies.
TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-4}
MAX_PROCESSES = 32
FLOAT8_OFF = {
    "scaling": "none",
    "all_gather": False,
    "layers": [],
    "skip": [],
    "head": False,
    "emulate": False,
}
NOT_SHOWN = ("run", "checkpoint", "validation", "sample", "metrics")  # sections whose changes are not printed


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
    """Returns the largest relative difference of losses (including validation), gradient norms and weights, and where it is.

    A weight is compared relative to the largest element of its tensor, or to `smallest` if that is larger.
    """

    def relative(difference: float, size: float) -> float:
        return difference / size if math.isfinite(difference) and size else math.inf  # NaN never agrees

    def worst(one: Sequence[float], other: Sequence[float]) -> tuple[float, str]:
        assert len(one) == len(other) > 0
        each = [relative(abs(a - b), abs(b)) for a, b in zip(one, other, strict=True)]
        return max(each), f"step {each.index(max(each)) + 1}"

    weights_found, weights_expected = found.state["model"], expected.state["model"]
    assert weights_found.keys() == weights_expected.keys()
    weights = {
        name: relative((weights_found[name] - value).abs().max().item(), max(value.abs().max().item(), smallest))
        for name, value in weights_expected.items()
    }
    name = max(weights, key=lambda name: weights[name])
    losses = max(worst(found.losses, expected.losses), worst(found.validation, expected.validation))
    return {
        "loss": losses,
        "gradient norm": worst(found.gradient_norms, expected.gradient_norms),
        "weights": (weights[name], name),
    }


def verify(recipe: Path, layout: str, steps: int, overrides: Sequence[str] = ()) -> NoReturn:
    """Runs the recipe in one process and under the layout, and prints both. Exits with 0 if they agree, 1 if not."""
    try:
        chosen = _parse(layout)
        processes = math.prod(int(chosen[name]) for name in DIMENSIONS)
        arguments = [str(recipe), *overrides, *(f"--parallelism.{key}={value}" for key, value in chosen.items())]
        # Check the layout at the real size first: the small model would hide what does not divide.
        checked = _run([*arguments, "--check", str(processes)], 1)
        if checked.returncode:
            raise UserError(checked.stderr.strip().removeprefix("error: "))
        values = tomli.loads(_run([*arguments, "--resolved"], 1).stdout)
    except UserError as error:
        environment.fail(error)
    title = " x ".join(f"{name} {chosen[name]}" for name in DIMENSIONS if chosen[name] != "1") or "one process"
    print(f"{recipe} under {title} ({processes} processes) against one process, {steps} steps on the CPU\n")
    smaller = shrink(values, processes, steps)
    print("reduced to fit on this machine:")
    for key, value in smaller.items():
        before = values[key.partition(".")[0]].get(key.partition(".")[2])
        if before != value and key.partition(".")[0] not in NOT_SHOWN:
            print(f"  {key:<28} {_toml(before)} -> {_toml(value)}")
    print(flush=True)
    alone: dict[str, Any] = {f"parallelism.{name}": 1 for name in DIMENSIONS}
    alone |= {"parallelism.pipeline_split": [], "parallelism.pipeline_stages": 0}
    alone |= {"training.local_batch_size": smaller["training.global_batch_size"]}
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, number, changes in (("one", 1, smaller | alone), ("layout", processes, smaller)):
            changes = changes | {"run.dir": folder, "run.name": name}
            done = _run([*arguments, *(f"--{key}={_toml(value)}" for key, value in changes.items())], number)
            if done.returncode:
                print(done.stderr.strip()[-4000:], file=sys.stderr)
                print(f"NOT equal: {'one process' if number == 1 else title} ended with exit code {done.returncode}")
                sys.exit(1)
            results.append(Result.of(Path(folder, name)))
    note = "" if values["float8"]["scaling"] == "none" else " (float8 off: its rounding hides the effect of layouts)"
    sys.exit(_report(results[0], results[1], title, note))


def shrink(values: dict[str, Any], processes: int, steps: int) -> dict[str, Any]:
    """Returns overrides that make a resolved recipe run within seconds on a CPU and keep it divisible by the layout."""
    model, parallelism, training = values["model"], values["parallelism"], values["training"]
    tensor, context, pipeline = (parallelism[name] for name in ("tensor", "context", "pipeline"))
    schedule = SCHEDULES[parallelism["pipeline_schedule"]]
    split = parallelism.get("pipeline_split", [])
    stages = len(split) or (
        pipeline * (parallelism["pipeline_stages"] or schedule.stages_per_rank) if pipeline > 1 else 1
    )
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
        "ffn_dim": min(model.get("ffn_dim", 0), 3 * dim),
        "vocab_size": min(model["vocab_size"], math.lcm(64, tensor) * -(-320 // math.lcm(64, tensor))),
    }
    if "ffn_dim" in model and small["ffn_dim"] % tensor:
        small["ffn_dim"] = model["ffn_dim"]
    changes = {f"model.{key}": value for key, value in small.items() if key in model}
    pieces = tensor * (2 * context if context > 1 else 1)
    num_data_ranks = processes // (tensor * context * pipeline)
    changes |= {
        **_changed_keys("tokenizer", Tokenizer(), values),
        **_changed_keys("data", Data(source="synthetic", document_masks=values["data"]["document_masks"]), values),
        "training.steps": steps,
        "training.seq_len": min(training["seq_len"], -(-32 // pieces) * pieces),
        "training.global_batch_size": num_data_ranks * max(2, stages),
        "training.local_batch_size": 1,
        "training.compute_dtype": "float32",
        "training.master_dtype": "float32",
        "training.reduce_dtype": "float32",
        "training.matmul_precision": "highest",
        "training.attention": "auto",
        "training.non_finite": "stop",
        # Adam normalizes gradients: with the usual eps, rounding noise around 0 becomes a full step.
        "optimizer.eps": max(values["optimizer"]["eps"], 1e-4),
        "optimizer.lr": max(values["optimizer"]["lr"], 1e-2),  # a wrong gradient must show within a few steps
        "compile.mode": "none",  # compilation would dominate the run time
        # Float8 amplifies a rounding difference to 1/16 of a value: layouts cannot be compared through it.
        **{f"float8.{key}": value for key, value in FLOAT8_OFF.items()},
        "optimizer.state_dtype": "full",
        "optimizer.stochastic_rounding": False,
        "schedule.warmup_steps": min(values["schedule"]["warmup_steps"], 2),
        "schedule.decay_steps": 0,
        "parallelism.cpu_offload": False,
        "parallelism.async_tensor_parallel": False,
        "run.device": "cpu",
        "checkpoint.enabled": True,
        "checkpoint.interval": 0,
        "validation.interval": steps,
        "validation.batches": 2,
        "sample.tokens": 0,
        "metrics.interval": 1,
        "metrics.tensorboard": False,
    }
    if split:
        changes["parallelism.pipeline_split"] = [1] * (stages - 1) + [changes["model.num_layers"] - stages + 1]
    checkpoint_mode = values["activation_checkpoint"]["mode"]
    if checkpoint_mode == "memory_budget" or (
        checkpoint_mode == "selective" and schedule.splits_backward and pipeline > 1
    ):
        changes["activation_checkpoint.mode"] = "full"  # both require the compiler here
    return changes


def _changed_keys(name: str, section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a section of the recipe that differ from those of `section`."""
    wanted = json.loads(json.dumps(asdict(section)))
    return {f"{name}.{key}": value for key, value in wanted.items() if values[name][key] != value}


def _report(one: Result, other: Result, title: str, note: str) -> int:
    width = max(len(title), 12)
    print(f"{'step':>10}  {'loss: one':>12} {title:>{width}}   {'norm: one':>12} {title:>{width}}")
    rows = zip(one.losses, other.losses, one.gradient_norms, other.gradient_norms, strict=True)
    for step, (a, b, c, d) in enumerate(rows, start=1):
        print(f"{step:>10}  {a:>12.6f} {b:>{width}.6f}   {c:>12.6f} {d:>{width}.6f}")
    print(f"{'validation':>10}  {one.validation[-1]:>12.6f} {other.validation[-1]:>{width}.6f}\n")
    found = differences(other, one)
    for what, (value, where) in found.items():
        print(f"  {what:<14} maximum relative difference {value:.1e} ({where}); tolerance {TOLERANCES[what]:.0e}")
    wrong = [what for what, (value, _) in found.items() if not value <= TOLERANCES[what]]
    print(f"\nNOT equal: {', '.join(wrong)}" if wrong else f"\nequal within tolerance{note}")
    return 1 if wrong else 0


def _parse(layout: str) -> dict[str, str]:
    """Returns the five dimensions and any other given key of [parallelism], as text."""
    chosen = dict.fromkeys(DIMENSIONS, "1")
    keys = list(Parallelism.__dataclass_fields__)
    for item in filter(None, re.split(r",(?=\s*[a-z_]+=)", layout)):
        key, equals, value = item.strip().partition("=")
        if key not in keys or not equals:
            near = nearest(key, keys)
            raise UserError(
                f"--layout {layout}: {item!r} is not KEY=VALUE with a key of [parallelism], such as tensor=2"
                + (f"; did you mean {near}?" if near and near != key else "")
            )
        if key in DIMENSIONS and (not value.isdigit() or int(value) < 1):
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
    return json.dumps(value) if not isinstance(value, str) else value
