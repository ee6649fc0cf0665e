"""RoPE for sequences that are longer than those of the training before: YaRN, and the scaling of Llama 3.1."""

import math

import torch
from torch import Tensor


def yarn_frequencies(frequencies: Tensor, theta: float, factor: float, original_seq_len: int) -> Tensor:
    """Applies YaRN: divides frequencies with less than one turn in the original length by `factor`, keeps those with more than
    32, and interpolates between, linearly in the index of the pair of channels."""

    def index_of(turns: int) -> float:
        return len(frequencies) * math.log(original_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    low, high = max(math.floor(index_of(32)), 0), min(math.ceil(index_of(1)), 2 * len(frequencies) - 1)
    indices = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    scaled = ((indices - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return scaled * (frequencies / factor) + (1.0 - scaled) * frequencies


def scale_rope_frequencies(frequencies: Tensor, factor: float, original_seq_len: int) -> Tensor:
    """Applies Llama 3.1's RoPE scaling: divides frequencies with less than one turn in the original length by `factor`, keeps those
    with more than four, interpolates between."""
    turns = original_seq_len / (2 * math.pi / frequencies)
    keep = ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)
    return (1.0 - keep) * frequencies / factor + keep * frequencies
