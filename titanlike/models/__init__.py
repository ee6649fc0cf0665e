"""Models in plain PyTorch. They know nothing of ranks, meshes, checkpoints or compilers.

Each family has its config (`*_config.py`, which does not import torch) beside its module. Families that are built like Llama share
the module in `llama.py`.
"""
