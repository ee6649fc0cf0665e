"""Checks of a recipe with run.device = 'mps': what torch does not support on an Apple GPU. Does not import torch."""

import platform
import sys

from titanlike.config import PretrainRecipe

BFLOAT16_MACOS = 14  # the first version of macOS with bfloat16 on its GPUs


def mps_problems(recipe: PretrainRecipe, world_size: int) -> list[str]:
    """What torch does not support on an Apple GPU."""
    if recipe.run.device != "mps":
        return []
    attention, scaling, mode = recipe.training.attention, recipe.float8.scaling, recipe.compile.mode
    unsupported = (
        (world_size > 1, f"trains one process, but there are {world_size}; use one, or run.device = 'cpu'"),
        (scaling != "none", f"has no float8; set float8.scaling = 'none' instead of {scaling!r}"),
        (mode != "none", f"is not supported by compile.mode = {mode!r}; set it to 'none'"),
        (attention not in ("auto", "math"), f"has no kernel training.attention = {attention!r}; set it to 'auto'"),
    )
    return [f"run.device = 'mps' {problem}" for applies, problem in unsupported if applies]


def apple_gpu_problems(recipe: PretrainRecipe) -> list[str]:
    """Whether this machine may have an Apple GPU, with the precision of the recipe."""
    if sys.platform != "darwin":
        return [f"run.device = 'mps' is an Apple GPU, but this system is {sys.platform}; set run.device = 'auto'"]
    version = platform.mac_ver()[0]
    if recipe.training.compute_dtype == "bfloat16" and int(version.partition(".")[0] or 0) < BFLOAT16_MACOS:
        return [
            f"training.compute_dtype = 'bfloat16' requires macOS {BFLOAT16_MACOS} on an Apple GPU, but this is macOS {version}; "
            "set it to 'float32'"
        ]
    return []
