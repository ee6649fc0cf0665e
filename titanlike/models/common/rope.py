"""Rotary position embeddings, also for sequences that are longer than in earlier training.

Shapes: B sequences, T tokens, E head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor


def rotary_angles(config: Any, position_ids: Tensor, *, local: bool = False) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine (B, T, 1, E) of the rotary angles of a `LlamaFamilyConfig` at positions (B, T), in float32.
    Blocks with sliding-window attention (`local`) may have a base of their own, and no scaling.

    They are computed in each forward pass: a buffer would have to be sharded, saved and cast correctly.
    """
    size = config.rotary_dim
    exponents = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32) / size
    # Not theta**-exponents, whose last bit differs from published models: 5e-3 in a cosine at position 131,071.
    theta = config.rope_local_theta if local and config.rope_local_theta else config.rope_theta
    frequencies = 1.0 / theta**exponents  # (E/2,)
    if config.rope_scaling != 1.0 and not (local and config.rope_local_theta):
        frequencies = scaled_frequencies(frequencies, theta, config)
    angles = position_ids.float()[:, :, None, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)  # (B, T, 1, E): both halves of a head rotate by the same angles
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
    """Rotates each pair of channels (first half, second half of a head) of heads (B, T, H, E) by its position's angle, and
    multiplies them by `scale`, in float32.

    Before heads are transposed to (B, H, T, E): after that, compiled code would copy the gradients into another order.
    """
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    out = x.float() * cos + rotated * sin
    return (out if scale == 1.0 else out * scale).to(x.dtype)


def scaled_frequencies(frequencies: Tensor, theta: float, config: Any) -> Tensor:
    """Returns the RoPE frequencies of a model with `rope_scaling`."""
    if config.rope_scaling_type == "linear":
        return frequencies / config.rope_scaling
    scale = _yarn if config.rope_scaling_type == "yarn" else _llama3
    kept = scale(frequencies, theta, config)
    return (1.0 - kept) * frequencies / config.rope_scaling + kept * frequencies


def _llama3(frequencies: Tensor, theta: float, config: Any) -> Tensor:
    """Returns the part of each frequency that Llama 3.1 keeps: nothing of those with less than one turn in the original length, all
    of those with more than four, and between a part that is linear in the number of turns."""
    turns = config.rope_original_seq_len / (2 * math.pi / frequencies)
    return ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)


def _yarn(frequencies: Tensor, theta: float, config: Any) -> Tensor:
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
