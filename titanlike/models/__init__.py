"""The models in plain PyTorch: they know nothing of ranks, meshes, checkpoints or compilers."""

from torch import nn

from titanlike.config.model_configs import GPTConfig, LlamaConfig
from titanlike.models.gpt import GPT
from titanlike.models.llama import Llama


def build_model(shape: LlamaConfig | GPTConfig) -> Llama | GPT:
    """The model of this shape. Build it under `torch.device("meta")`: `initialize` gives it memory and values."""
    return Llama(shape) if isinstance(shape, LlamaConfig) else GPT(shape)


def blocks(model: nn.Module) -> nn.ModuleDict:
    """The model's blocks by name: what is compiled, recomputed and sharded one at a time."""
    found = model.get_submodule("layers")
    assert isinstance(found, nn.ModuleDict)
    return found
