"""Models in plain PyTorch. They know nothing of ranks, meshes, checkpoints or compilers."""

from titanlike.models import gemma, gpt, llama, moe, qwen2, qwen3  # noqa: F401  each registers itself
from titanlike.models.registry import blocks, build_model, register_model

__all__ = ["blocks", "build_model", "register_model"]
