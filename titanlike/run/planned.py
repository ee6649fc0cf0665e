"""The plan of a run beside other things: `--check`, and what the run has measured. Does not import torch itself."""

import re
import sys
from dataclasses import replace

from titanlike.config import PretrainRecipe
from titanlike.planning.hardware import Hardware, hardware_names, load_hardware
from titanlike.planning.job import Job
from titanlike.planning.memory import memory
from titanlike.planning.plan import GIB, Plan, make_plan
from titanlike.planning.report import brief

DEFAULT_HARDWARE = "h100"
MEMORY_TOLERANCE = 0.1  # data sheets give GB or GiB, and drivers and ECC reserve some
OTHER_CARDS = {"PCIE", "NVL", "MIG"}  # slower cards of the same name, and instances of a GPU


def plan_or_none(recipe: PretrainRecipe, num_gpus: int, hardware: Hardware) -> Plan | None:
    """Returns a plan. If the planner fails, prints a warning and returns None: what it is shown beside must not fail with it."""
    try:
        return make_plan(Job(recipe, num_gpus), hardware)
    except Exception as error:  # noqa: BLE001  a recipe that is valid must not be refused because of its plan
        print(f"warning: no plan: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def plan_line(recipe: PretrainRecipe, num_gpus: int, hardware_name: str) -> str | None:
    """Returns memory, speed and cost in one line. Raises `UserError` if the hardware is unknown."""
    hardware = load_hardware(hardware_name)
    plan = plan_or_none(recipe, num_gpus, hardware) if recipe.run.allows_cuda else None
    return f"on {num_gpus:,} x {hardware.name}: {brief(plan)}" if plan else None


def hardware_of_device(name: str, memory_gib: float) -> Hardware | None:
    """Returns the description of a GPU by the name that CUDA reports and its memory, or None if there is none."""
    parts = set(re.split(r"[\s_-]+", name.upper()))
    if parts & OTHER_CARDS:
        return None
    for file in hardware_names():
        if file.partition("_")[0].upper() in parts:
            hardware = load_hardware(file)
            if abs(hardware.memory_gib / memory_gib - 1) <= MEMORY_TOLERANCE:
                return hardware
    return None


def compare(
    recipe: PretrainRecipe,
    num_gpus: int,
    gpus_per_node: int,
    hardware: Hardware | None,
    *,
    memory_gib: float,
    tokens_per_second: float | None,
) -> dict[str, float]:
    """Returns what a run has measured beside its plan, with the names of the last record in `metrics.jsonl`.

    Args:
        recipe: The recipe.
        num_gpus: Number of GPUs of the run.
        gpus_per_node: Number of GPUs of a node.
        hardware: Description of the GPUs. None compares memory only.
        memory_gib: Peak of allocated memory on rank 0.
        tokens_per_second: Throughput of all GPUs, or None after too few steps.
    """
    job = Job(recipe, num_gpus)
    found = {"run_memory_gib": memory_gib, "planned_memory_gib": memory(job).allocated / GIB}
    if hardware and tokens_per_second:
        plan = make_plan(job, replace(hardware, gpus_per_node=gpus_per_node))
        found |= {"run_tokens_per_second": tokens_per_second, "planned_tokens_per_second": plan.tokens_per_second}
    return found


def comparison_line(values: dict[str, float]) -> str:
    """Formats a comparison: measured, planned, and the relative difference."""
    texts = []
    for name, label, pattern in (
        ("memory_gib", "GiB allocated at the peak", "{:.2f}"),
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ):
        if f"run_{name}" in values:
            measured, planned = values[f"run_{name}"], values[f"planned_{name}"]
            difference = f"{measured / planned - 1:+.1%}" if planned else "no plan"
            texts.append(f"{pattern.format(measured)} {label}, planned {pattern.format(planned)} ({difference})")
    return f"plan    {'; '.join(texts)}"
