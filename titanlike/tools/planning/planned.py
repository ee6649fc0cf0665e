"""The plan of a run beside other things: `--check`, and what the run has measured. Does not import torch itself."""

import sys
from dataclasses import replace

from titanlike.config import PretrainRecipe
from titanlike.tools.planning.hardware import Hardware, load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.plan import GIB, Plan, make_plan
from titanlike.tools.planning.report import brief


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
