"""Quantized tensors of published folders, which become bfloat16 as they are read: the experts of GPT-OSS in MXFP4, and the matrices
of DeepSeek-V3 in float8.

In MXFP4, blocks of 32 inputs share a scale, a power of two. A byte has two values of 4 bits, the first one in its lower half. In
float8, blocks of 128 x 128 elements share a scale in float32, by which they are multiplied.

Shapes: E experts, N outputs, K inputs, G = K / 32 blocks of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titanlike.checkpoint.files import ReadableFile
from titanlike.checkpoint.reader import Entry, read_part
from titanlike.config import UserError
from titanlike.config.base import shown

BLOCK_SIZE, BYTES = 32, 16  # inputs and bytes of a block in MXFP4
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
EXPONENT_BIAS = 127
FLOAT8_BLOCK = 128  # outputs and inputs of a block in float8


@dataclass(frozen=True)
class QuantizedEntry(Entry):
    """A tensor in a file whose values have scales. It has the shape and the precision of their products."""

    scales: tuple[ReadableFile, Entry]
    values: Entry

    format: ClassVar[str]
    suffixes: ClassVar[tuple[str, str]]
    """What the names of values and scales have after the name of the tensor."""

    @staticmethod
    def shape_of(values: Entry, scales: Entry) -> tuple[int, ...] | None:
        """Returns the shape of the tensor; None if the two are not of this format."""
        raise NotImplementedError

    def read(self, file: ReadableFile, part: list[slice]) -> Tensor:
        """Reads a part of the tensor."""
        raise NotImplementedError


class MXFP4Stack(QuantizedEntry):
    """A stack of matrices in MXFP4, in the shape in which it is stored in bfloat16 (E, K, N)."""

    format = "MXFP4"
    suffixes = ("_blocks", "_scales")

    @staticmethod
    def shape_of(values: Entry, scales: Entry) -> tuple[int, ...] | None:
        sizes = len(values.shape) == 4 and values.shape[-1] == BYTES and values.shape[:-1] == scales.shape
        if not sizes or {values.dtype, scales.dtype} != {torch.uint8}:
            return None
        num_experts, outputs, groups, _ = values.shape
        return num_experts, groups * BLOCK_SIZE, outputs

    def read(self, file: ReadableFile, part: list[slice]) -> Tensor:
        experts, inputs, outputs = part
        groups = slice(inputs.start // BLOCK_SIZE, -(-inputs.stop // BLOCK_SIZE))
        start = groups.start * BLOCK_SIZE
        matrices = []
        for index in range(experts.start, experts.stop):  # one at a time: the table of values needs memory
            where = [slice(index, index + 1), outputs, groups]
            blocks, scales = read_part(file, self.values, [*where, slice(None)]), read_part(*self.scales, where)
            matrix = dequantize_mxfp4(blocks[0], scales[0])[:, inputs.start - start : inputs.stop - start]  # (N, K)
            matrices.append(matrix.t())
        return torch.stack(matrices)


class Float8Matrix(QuantizedEntry):
    """A matrix (N, K) in float8. The blocks at its ends may be smaller."""

    format = f"float8 with blocks of {FLOAT8_BLOCK} x {FLOAT8_BLOCK}"
    suffixes = ("", "_scale_inv")

    @staticmethod
    def shape_of(values: Entry, scales: Entry) -> tuple[int, ...] | None:
        num_blocks = tuple(-(-size // FLOAT8_BLOCK) for size in values.shape)
        is_float8 = (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        return values.shape if is_float8 and len(num_blocks) == 2 and num_blocks == scales.shape else None

    def read(self, file: ReadableFile, part: list[slice]) -> Tensor:
        blocks = [slice(one.start // FLOAT8_BLOCK, -(-one.stop // FLOAT8_BLOCK)) for one in part]
        scales = read_part(*self.scales, blocks)
        for dim, one in enumerate(part):
            scales = scales.repeat_interleave(FLOAT8_BLOCK, dim)
            scales = scales.narrow(dim, one.start % FLOAT8_BLOCK, one.stop - one.start)
        return read_part(file, self.values, part).float().mul_(scales).to(torch.bfloat16)


def with_quantized(found: Mapping[str, tuple[ReadableFile, Entry]]) -> dict[str, tuple[ReadableFile, Entry]]:
    """Returns the tensors of a folder with one in place of the values and the scales of each that is quantized."""
    tensors = dict(found)
    for kind in (MXFP4Stack, Float8Matrix):
        values_end, scales_end = kind.suffixes
        for scales_name in [name for name in found if name.endswith(scales_end)]:
            name = scales_name.removesuffix(scales_end)
            values_name = name + values_end
            if values_name not in found or (values_end and name in found):
                continue  # the check of the names refuses it
            (file, values), scales = tensors.pop(values_name), tensors.pop(scales_name)
            shape = kind.shape_of(values, scales[1])
            if shape is None:
                raise UserError(
                    f"{file}: {shown(values_name)} is {values.dtype} of shape {values.shape}, and its scales are "
                    f"{scales[1].dtype} of shape {scales[1].shape}, which is not {kind.format}; download the folder again"
                )
            whole = (shape, (0,) * len(shape), shape)
            tensors[name] = file, kind(*whole, torch.bfloat16, values.start, scales, values)
    return tensors


def read_stored(file: ReadableFile, entry: Entry, part: list[slice]) -> Tensor:
    """Reads a part of a tensor of a folder, as `read_part` does, which may be quantized."""
    return entry.read(file, part) if isinstance(entry, QuantizedEntry) else read_part(file, entry, part)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns a matrix (N, K) in bfloat16 for bytes (N, G, 16) and exponents (N, G), without an error of rounding."""
    pairs = torch.tensor([(VALUES[byte % 16], VALUES[byte // 16]) for byte in range(256)])
    powers = torch.tensor([2.0 ** (exponent - EXPONENT_BIAS) for exponent in range(256)])
    values = pairs[blocks.int()].flatten(-2)  # (N, G, 32)
    return (values * powers[scales.int()][..., None]).to(torch.bfloat16).flatten(-2)
