"""What the planner adds to a run (`titanlike.run.hooks`). `completed` alone needs torch."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.distributed import environment
from titanlike.hardware.files import file_of_device
from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning.hardware import DEFAULT_HARDWARE, Hardware, load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.out_of_memory import advice
from titanlike.tools.planning.plan import GIB, make_plan, plan_or_none
from titanlike.tools.planning.report import brief

if TYPE_CHECKING:
    import torch

    from titanlike.metrics import Measured


def checked(recipe: PretrainRecipe, num_processes: int) -> str | None:
    """Returns memory, speed and cost of a checked recipe in one line. Raises `UserError` if its hardware is unknown."""
    hardware = load_hardware(recipe.metrics.hardware or DEFAULT_HARDWARE, "metrics.hardware =")
    plan = plan_or_none(recipe, num_processes, hardware) if recipe.run.allows_cuda else None
    return f"on {num_processes:,} x {hardware.name}: {brief(plan)}" if plan else None


def completed(recipe: PretrainRecipe, metrics: Path, device: "torch.device", measured: "Measured") -> str | None:
    """Compares memory and throughput of a run on GPUs with the plan, in the records and in a line."""
    if device.type != "cuda":
        return None
    from titanlike.metrics.hardware import device_name
    from titanlike.metrics.records import JSONLWriter

    ranks = environment.rank_info()
    hardware = recipe.metrics.hardware or file_of_device(device_name(device))
    values = compare(
        recipe,
        ranks.world_size,
        ranks.local_world_size,
        load_hardware(hardware) if hardware else None,
        memory_gib=measured.memory_gib,
        tokens_per_second=measured.tokens_per_second,
    )
    writer = JSONLWriter(metrics)
    writer.log(recipe.training.steps, values)
    writer.close()
    line = comparison_line(values)
    if "planned_tokens_per_second" in values:
        line += anchor_line(metrics.parent, ranks.world_size, hardware, values["run_tokens_per_second"])
    return line


def out_of_memory(recipe: PretrainRecipe) -> str:
    """Returns the changes of a recipe that would have saved most memory."""
    return advice(recipe, environment.rank_info().world_size)


HOST_SHARE = 0.2
"""Of a planned step, in which the GPU waits for the host: above, the host decides the speed, and plans do not know it."""


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
        plan = make_plan(job, replace(hardware, gpus_per_node=gpus_per_node, node_switch=hardware.has_switch))
        found["run_tokens_per_second"] = tokens_per_second
        if plan.time.parts.get("kernel launches", 0.0) < HOST_SHARE * plan.time.seconds:
            found["planned_tokens_per_second"] = plan.tokens_per_second
    return found


def anchor_line(run: Path, num_gpus: int, hardware: str, tokens_per_second: float) -> str:
    """Returns the command that plans other layouts from the speed of a run, on a line of its own."""
    words = ["titanlike", "plan", f"{run}/recipe.toml", "--gpus", str(num_gpus), "--hardware", hardware]
    words += ["--measured", f"{tokens_per_second / num_gpus:.0f}", "--search"]
    return f"\n        plan others from it: {shlex.join(words)}"


def comparison_line(values: dict[str, float]) -> str:
    """Formats a comparison: measured, planned, and the relative difference."""
    texts = []
    for name, label, pattern in (
        ("memory_gib", "GiB allocated at the peak", "{:.2f}"),
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ):
        if f"planned_{name}" in values:
            measured, planned = values[f"run_{name}"], values[f"planned_{name}"]
            difference = f"{measured / planned - 1:+.1%}"
            texts.append(f"{pattern.format(measured)} {label}, planned {pattern.format(planned)} ({difference})")
    if "run_tokens_per_second" in values and "planned_tokens_per_second" not in values:
        texts.append(f"{values['run_tokens_per_second']:,.0f} tokens/s, limited by how fast this host launches kernels")
    return f"plan    {'; '.join(texts)}"
