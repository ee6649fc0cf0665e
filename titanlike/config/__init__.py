"""Recipe sections and their loading, validation and schema. Does not import torch."""

from titanlike.config.base import UserError, section
from titanlike.config.load import load, to_toml
from titanlike.config.sections import PretrainRecipe

__all__ = ["PretrainRecipe", "UserError", "load", "section", "to_toml"]
