"""YaRN: RoPE for sequences that are longer than those of the training before."""

import math

import torch
from torch import Tensor


def yarn_frequencies(
    frequencies: Tensor, theta: float, factor: float, original_seq_len: int, truncate: bool = True
) -> Tensor:
    """Applies YaRN: divides frequencies with less than one turn in the original length by `factor`, keeps those with more than
    32, and interpolates between, linearly in the index of the pair of channels, from and to indices that `truncate` rounds."""

    def index_of(turns: int) -> float:
        return len(frequencies) * math.log(original_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    low, high = index_of(32), index_of(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    indices = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    scaled = ((indices - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return scaled * (frequencies / factor) + (1.0 - scaled) * frequencies
