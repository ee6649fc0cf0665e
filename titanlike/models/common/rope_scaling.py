"""RoPE for sequences that are longer than those of the training before: frequencies that are divided by a factor."""

import math

import torch
from torch import Tensor

from titanlike.models.llama.config import LlamaFamilyConfig


def scaled_frequencies(frequencies: Tensor, theta: float, config: LlamaFamilyConfig) -> Tensor:
    """Returns the RoPE frequencies of a model with `rope_scaling`."""
    if config.rope_scaling_type == "linear":
        return frequencies / config.rope_scaling
    scale = _yarn if config.rope_scaling_type == "yarn" else _llama3
    kept = scale(frequencies, theta, config)
    return (1.0 - kept) * frequencies / config.rope_scaling + kept * frequencies


def _llama3(frequencies: Tensor, theta: float, config: LlamaFamilyConfig) -> Tensor:
    """Returns the part of each frequency that Llama 3.1 keeps: nothing of those with less than one turn in the original length, all
    of those with more than four, and between a part that is linear in the number of turns."""
    turns = config.rope_original_seq_len / (2 * math.pi / frequencies)
    return ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)


def _yarn(frequencies: Tensor, theta: float, config: LlamaFamilyConfig) -> Tensor:
    """Returns the part of each frequency that YaRN keeps: nothing of those with less than one turn in the original length, all of
    those with more than 32, and between a part that is linear in the index of the pair of channels, from and to indices that are
    rounded if the config says so."""

    def index_of(turns: int) -> float:
        original = config.rope_original_seq_len
        return len(frequencies) * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = index_of(32), index_of(1)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    indices = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    return 1.0 - ((indices - low) / (high - low or 0.001)).clamp(0.0, 1.0)
