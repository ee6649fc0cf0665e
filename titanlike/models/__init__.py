"""Models in plain PyTorch, a folder a family. They know nothing of ranks, meshes, checkpoints or compilers.

A family has its config (`config.py`, which does not import torch) beside its module (`model.py`). Families that are built like
Llama share its module, or derive from it. `registry.py` builds the model of a config.
"""
