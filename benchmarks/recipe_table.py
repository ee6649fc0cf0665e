"""The shipped recipes with their planned memory and time on H100 GPUs, as the table of docs/recipes.md.

python -m benchmarks.recipe_table
"""

from pathlib import Path

from benchmarks.common import table as table_of
from titanlike.config.shipped import RECIPES, shipped_recipes
from titanlike.tools.null_gpu.recipes import GPUS_OF
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import GIB, Plan, make_plan
from titanlike.tools.programs import load_known

HEADS = ("Recipe", "Model", "Parameters", "GPUs", "Layout", "Tokens", "GiB per GPU", "Hours")
NAMES = {1e12: "T", 1e9: "B", 1e6: "M"}


def is_small(path: Path) -> bool:
    """Whether a recipe is for a CPU."""
    return path.stem.endswith("debug") or path.parent.name == "stages"


def row(path: Path) -> list[str]:
    """Returns the cells of a recipe."""
    name = path.relative_to(RECIPES).with_suffix("").as_posix()
    plan = make_plan(Job(load_known(path, {}), GPUS_OF[name]), load_hardware("h100"))
    recipe, training = plan.job.recipe, plan.job.recipe.training
    return [
        f"[{name}](../train_configs/{name}.toml)",
        f"{recipe.model.name} {recipe.model.size}",
        f"{recipe.model.num_parameters():,}",
        str(plan.job.num_gpus),
        layout(plan),
        short(training.num_tokens(training.steps)),
        f"{plan.reserved / GIB:.0f}",
        f"{plan.hours:,.0f}" if plan.hours >= 10 else f"{plan.hours:.1f}",
    ]


def layout(plan: Plan) -> str:
    """Returns the parallel sizes above 1."""
    sizes = plan.job.layout.dimensions() | {"expert": plan.job.layout.expert}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def short(tokens: int) -> str:
    """Returns a number of tokens with two digits."""
    unit, letter = next((unit, letter) for unit, letter in NAMES.items() if tokens >= unit)
    return f"{float(f'{tokens / unit:.2g}'):g} {letter}"


def table() -> str:
    """Returns the table, by number of GPUs."""
    rows = [row(path) for path in shipped_recipes().values() if not is_small(path)]
    return table_of(HEADS, sorted(rows, key=lambda cells: int(cells[3])))


if __name__ == "__main__":
    print(table())
