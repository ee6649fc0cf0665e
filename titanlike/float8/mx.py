"""MXFP8: 32 neighbours share a scale, a power of two. Multiplied by Blackwell GPUs; torchao's prototype, which may still move."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.utils.suppress_warnings import suppress_import_warnings

try:
    with suppress_import_warnings():
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        try:
            from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        except ImportError:  # where torchao 0.17 has it
            from torchao.prototype.mx_formats.mx_linear import mx_mm
except ImportError as error:
    raise UserError(
        f"float8.scaling = 'mxfp8': the installed torchao does not have it ({error}); use another"
    ) from None

BLOCK = 32


class MXLinear(nn.Linear):
    """A matrix whose three products are in MXFP8."""

    emulate: bool = False

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float8_e4m3fn
        kernels = (
            (KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
            if self.emulate
            else (KernelPreference.AUTO, MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.TRITON)
        )
        # Rounding scales up keeps the largest of a block from being cut off.
        out = mx_mm.apply(x, self.weight, dtype, dtype, dtype, BLOCK, *kernels, ScaleCalculationMode.RCEIL, False)
        return out if self.bias is None else out + self.bias


def apply_mx(matrices: Mapping[str, nn.Linear], *, emulate: bool) -> None:
    """Have these multiply in MXFP8 from now on."""
    for matrix in matrices.values():
        matrix.__class__ = MXLinear
        cast(MXLinear, matrix).emulate = emulate
