"""What the planner adds to a run (`titanlike.run.hooks`). `completed` alone needs torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config import PretrainRecipe
from titanlike.distributed import environment
from titanlike.tools.planning.hardware import DEFAULT_HARDWARE, hardware_of_device
from titanlike.tools.planning.out_of_memory import advice
from titanlike.tools.planning.planned import compare, comparison_line, plan_line

if TYPE_CHECKING:
    import torch

    from titanlike.metrics import Measured


def checked(recipe: PretrainRecipe, num_processes: int, hardware: str) -> str | None:
    """Returns memory, speed and cost of a checked recipe in one line."""
    return plan_line(recipe, num_processes, hardware or DEFAULT_HARDWARE)


def completed(recipe: PretrainRecipe, metrics: Path, device: "torch.device", measured: "Measured") -> str | None:
    """Compares memory and throughput of a run on GPUs with the plan, in the records and in a line."""
    if device.type != "cuda":
        return None
    import torch

    from titanlike.metrics.trackers import JSONLWriter

    properties = torch.cuda.get_device_properties(device)
    ranks = environment.rank_info()
    values = compare(
        recipe,
        ranks.world_size,
        ranks.local_world_size,
        hardware_of_device(properties.name, properties.total_memory / 2**30),
        memory_gib=measured.memory_gib,
        tokens_per_second=measured.tokens_per_second,
    )
    writer = JSONLWriter(metrics)
    writer.log(recipe.training.steps, values)
    writer.close()
    return comparison_line(values)


def out_of_memory(recipe: PretrainRecipe) -> str:
    """Returns the changes of a recipe that would have saved most memory."""
    return advice(recipe, environment.rank_info().world_size)
