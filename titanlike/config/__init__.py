"""Recipe sections, their validation and schema. Does not import torch."""

from titanlike.config.base import UserError, section

__all__ = ["UserError", "section"]
