"""What is checked before a run starts. Does not import torch."""

from titanlike.run.checks.machine import check_machine
from titanlike.run.checks.recipe import check_recipe

__all__ = ["check_machine", "check_recipe"]
