"""Random hardware files with random recipes: each is planned with finite numbers and a short report, or refused in sentences."""

import functools
import io
import json
import math
import random
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.forkserver import ROOT
from tests.fuzz import harness
from tests.fuzz.command_line import CPU_LIMIT, assert_sentences
from tests.fuzz.harness import ODD_LITERALS, ODD_TEXT
from titanlike.config import UserError
from titanlike.hardware.files import FOLDER
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_recipe
from titanlike.tools.planning import report
from titanlike.tools.planning.advice import Advice, limits
from titanlike.tools.planning.hardware import Hardware, load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import Plan, make_plan
from titanlike.tools.programs import load_known

KEYS = [field.name for field in fields(Hardware)]
RECIPES = [
    ROOT / f"train_configs/{name}.toml" for name in ("debug", "gpt2_124m", "llama3_8b", "llama3_70b", "mixtral_8x7b")
]
OVERRIDES: dict[str, tuple[str, ...]] = {
    "parallelism.shard": ("1", "2", "-1", "0", "3"),
    "parallelism.tensor": ("1", "2", "8", "16"),
    "parallelism.context": ("1", "2", "4"),
    "parallelism.replicate": ("1", "2"),
    "parallelism.pipeline": ("1", "2", "4"),
    "parallelism.reshard_after_forward": ("auto", "always", "never"),
    "parallelism.gradient_sync": ("each_microbatch", "last_microbatch"),
    "parallelism.cpu_offload": ("true", "false"),
    "parallelism.async_tensor_parallel": ("true", "false"),
    "activation_checkpoint.mode": ("none", "selective", "full", "memory_budget"),
    "compile.mode": ("none", "block"),
    "float8.scaling": ("none", "tensorwise", "rowwise"),
    "optimizer.state_dtype": ("full", "bfloat16", "8bit"),
    "training.local_batch_size": ("1", "2", "16"),
    "training.global_batch_size": ("1", "8", "64", "100000000"),
    "training.seq_len": ("1", "128", "4096", "1000000"),
    "training.compute_dtype": ("bfloat16", "float32"),
    "training.steps": ("1", "1000000000"),
    "model.num_layers": ("1", "3", "100"),
    "lora.rank": ("0", "1", "64"),
}
MAX_LINE, MAX_OUTPUT = 200, 20_000  # characters
CONSOLE_WIDTH = 150


@functools.cache
def lines_of(name: str) -> tuple[str, ...]:
    return tuple((FOLDER / f"{name}.toml").read_text().splitlines())


def random_number(rng: random.Random) -> str:
    return rng.choice(
        (
            *(repr(10.0 ** rng.uniform(*span)) for span in ((-6, 0), (-6, 0), (-3, 0), (-3, 0), (0, 3), (-7, 7))),
            repr(10.0 ** rng.randint(-320, 308)),
            repr(rng.choice((-1, 1)) * 10.0 ** rng.randint(-6, 6)),
            str(rng.choice((0, 1, 8, 1024, 1025, 10**6, 2**63, -1))),
            rng.choice(("1e-6", "1e6", "0.0", "0.001", "2.0", "1.0", "5e-324")),
        )
    )


def hardware_text(rng: random.Random) -> tuple[bytes, bool]:
    """Returns a hardware file and whether it has to be refused."""
    lines, refused = list(lines_of(rng.choice(("h100", "a100", "b200", "l40s")))), set[str]()
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3, 8))):
        key = rng.choice(KEYS)
        kind = rng.choice((*["number"] * 12, "odd", "text", "missing", "unknown"))
        lines = [line for line in lines if not line.startswith(f"{key} =")]
        refused.discard(key)
        if kind == "number":
            lines.append(f"{key} = {random_number(rng)}")
        elif kind == "odd":
            lines.append(f"{key} = {rng.choice(ODD_LITERALS)}")
        elif kind == "text":
            lines.append(f"{key} = {json.dumps(rng.choice(ODD_TEXT), ensure_ascii=False)}")
            refused |= {key} - {"name"}
        elif kind == "unknown":
            lines.append(f"{key}_{rng.choice('abc')} = 1")
            refused.add("unknown")
    data = "\n".join(lines).encode()
    if rng.random() < 0.1:
        start = rng.randrange(len(data) + 1)
        stop = min(start + rng.choice((0, 1, 10, 100)), len(data))
        odd = rng.choice((rng.choice(ODD_TEXT).encode(), bytes([rng.randrange(256)]), b"\n[x]\n"))
        data, refused = data[:start] + odd + data[stop:], set()
    return data, bool(refused)


def overrides_of(rng: random.Random) -> dict[str, str]:
    return {key: rng.choice(OVERRIDES[key]) for key in rng.sample(sorted(OVERRIDES), rng.choice((0, 0, 0, 1, 1, 2, 4)))}


@functools.cache
def shipped(recipe: Path) -> PretrainRecipe:
    return load_known(recipe, {})


def check_numbers(value: Any, where: str = "") -> None:
    """Every number is finite and not negative."""
    if isinstance(value, dict):
        for name, each in value.items():
            check_numbers(each, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for each in value:
            check_numbers(each, where)
    elif isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        assert math.isfinite(value) and value >= (-1 if "parallelism" in where else 0), f"{where} = {value}"
        assert value < 1e40, f"{where} = {value}"


def check_report(plan: Plan) -> None:
    values = report.as_json(plan)
    check_numbers(values)
    assert values["step_seconds"] > 0 and values["tokens_per_second"] > 0, values
    # No faster than the fastest matmuls with the largest `efficiency`. MFU refers to bfloat16, which may be the slowest.
    hardware = plan.hardware
    peaks = (hardware.bf16_tflops, hardware.float32_tflops, hardware.tf32_tflops, hardware.float8_tflops)
    assert values["mfu"] <= 2 * max(peaks) / hardware.bf16_tflops, values
    assert sum(values["step_parts_seconds"].values()) == pytest.approx(values["step_seconds"])
    json.dumps(values, allow_nan=False)
    output = io.StringIO()
    console = Console(file=output, width=CONSOLE_WIDTH, highlight=False, markup=False, emoji=False)
    report.print_plan(plan, Advice("nothing", {}, None), {}, console)
    assert_bounded(output.getvalue() + limits(plan))


def assert_bounded(text: str) -> None:
    assert len(text) <= MAX_OUTPUT, text
    assert all(len(line) <= MAX_LINE for line in text.splitlines()), text
    assert text.replace("\n", "").isprintable(), ascii(text)
    assert "nan" not in text.split() and "inf" not in text.split(), text


def hardware(rng: random.Random, folder: Path) -> str:
    """Plans a random recipe on random hardware. Returns what happened."""
    data, refused = hardware_text(rng)
    path = folder / "mine.toml"
    path.write_bytes(data)
    recipe, overrides, num_gpus = rng.choice(RECIPES), overrides_of(rng), rng.choice((1, 8, 8, 64, 64, 100, 512))
    start = time.process_time()
    try:
        found = load_hardware(str(path))
    except UserError as error:
        assert_sentences("".join(f"error: {line}\n" for line in str(error).splitlines()))
        return "hardware refused"
    assert not refused, f"accepted: {data!r}"
    try:
        changed = load_known(recipe, overrides) if overrides else shipped(recipe)
        check_recipe(changed, num_gpus)
        plan = make_plan(Job(changed, num_gpus), found)
    except UserError as error:
        assert_sentences("".join(f"error: {line}\n" for line in str(error).splitlines()))
        return "recipe refused"
    check_report(plan)
    used = time.process_time() - start
    assert used < CPU_LIMIT, f"{used:.1f} s of CPU time"
    return "planned"


@harness.tiers
def test_hardware_files_are_planned_or_refused(further: bool) -> None:
    found = harness.run_cases(hardware, 30, further)
    assert min(found[name] for name in ("hardware refused", "recipe refused", "planned")) >= 3, found


main = functools.partial(harness.main, {hardware: 1})

if __name__ == "__main__":
    main()
