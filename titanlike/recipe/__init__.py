"""The recipes of the programs: their sections and the configs of models together. Does not import torch."""

from titanlike.recipe.load import load, to_toml
from titanlike.recipe.pretrain import PretrainRecipe

__all__ = ["PretrainRecipe", "load", "to_toml"]
