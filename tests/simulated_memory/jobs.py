"""Jobs of shipped recipes with changes."""

from dataclasses import replace
from typing import Any

from titanlike.config.shipped import recipe_path
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.tools.planning.job import Job
from titanlike.tools.programs import load_known


def job(name: str, num_gpus: int, **sections: dict[str, Any]) -> Job:
    """Returns a shipped recipe with changes, by default without compilation."""
    path = recipe_path(name)
    recipe: PretrainRecipe = PretrainRecipe()
    if name.startswith(("dpo", "distill", "modernbert", "t5", "seq2seq")):
        recipe = load_known(path, {})
    else:
        recipe = load(FinetuneRecipe if "lora" in sections else PretrainRecipe, path)
    sections = {"compile": dict(mode="none")} | sections
    changes: dict[str, Any] = {key: replace(getattr(recipe, key), **values) for key, values in sections.items()}
    return Job(replace(recipe, **changes), num_gpus)
