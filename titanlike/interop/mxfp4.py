"""Matrices of experts in MXFP4, as GPT-OSS is published, which become bfloat16 as they are read.

Blocks of 32 inputs share a scale, a power of two. A byte has two values of 4 bits, the first one in its lower half.

Shapes: E experts, N outputs, K inputs, G = K / 32 blocks of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlike.checkpoint.files import ReadableFile
from titanlike.checkpoint.reader import Entry, read_part
from titanlike.config import UserError
from titanlike.config.base import shown

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors of a stack of matrices
BLOCK_SIZE, BYTES = 32, 16  # inputs and bytes of a block
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
EXPONENT_BIAS = 127


@dataclass(frozen=True)
class PackedEntry(Entry):
    """A stack of matrices in MXFP4. It has the shape in which it is stored in bfloat16 (E, K, N)."""

    scales: tuple[ReadableFile, Entry]
    blocks: Entry


def with_mxfp4(found: Mapping[str, tuple[ReadableFile, Entry]]) -> dict[str, tuple[ReadableFile, Entry]]:
    """Returns the tensors of a folder with one in place of the blocks and the scales of each stack of matrices in MXFP4."""
    tensors = dict(found)
    for name in [name for name in found if name.endswith(BLOCKS)]:
        stack = name.removesuffix(BLOCKS)
        if stack + SCALES not in found or stack in found:
            continue  # the check of the names refuses it
        (file, blocks), scales = tensors.pop(name), tensors.pop(stack + SCALES)
        pair = (blocks, scales[1])
        sizes = len(blocks.shape) == 4 and blocks.shape[-1] == BYTES and blocks.shape[:-1] == scales[1].shape
        if not sizes or any(entry.dtype != torch.uint8 for entry in pair):
            raise UserError(
                f"{file}: {shown(name)} is {blocks.dtype} of shape {blocks.shape}, and its scales are {scales[1].dtype} of shape "
                f"{scales[1].shape}, which is not MXFP4; download the folder again"
            )
        num_experts, outputs, groups, _ = blocks.shape
        shape = (num_experts, groups * BLOCK_SIZE, outputs)
        tensors[stack] = file, PackedEntry(shape, (0, 0, 0), shape, torch.bfloat16, blocks.start, scales, blocks)
    return tensors


def read_stored(file: ReadableFile, entry: Entry, part: list[slice]) -> Tensor:
    """Reads a part of a tensor of a folder, as `read_part` does; in MXFP4, one expert at a time."""
    if not isinstance(entry, PackedEntry):
        return read_part(file, entry, part)
    experts, inputs, outputs = part
    groups = slice(inputs.start // BLOCK_SIZE, -(-inputs.stop // BLOCK_SIZE))
    start = groups.start * BLOCK_SIZE
    matrices = []
    for index in range(experts.start, experts.stop):
        where = [slice(index, index + 1), outputs, groups]
        blocks, scales = read_part(file, entry.blocks, [*where, slice(None)]), read_part(*entry.scales, where)
        matrix = dequantize(blocks[0], scales[0])[:, inputs.start - start : inputs.stop - start]  # (N, K)
        matrices.append(matrix.t())
    return torch.stack(matrices)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns a matrix (N, K) in bfloat16 for bytes (N, G, 16) and exponents (N, G), without an error of rounding."""
    pairs = torch.tensor([(VALUES[byte % 16], VALUES[byte // 16]) for byte in range(256)])
    powers = torch.tensor([2.0 ** (exponent - EXPONENT_BIAS) for exponent in range(256)])
    values = pairs[blocks.int()].flatten(-2)  # (N, G, 32)
    return (values * powers[scales.int()][..., None]).to(torch.bfloat16).flatten(-2)
