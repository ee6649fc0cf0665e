"""MXFP8: blocks of 32 elements share a power-of-two scale. Requires Blackwell GPUs. Uses a prototype of torchao."""

from collections.abc import Iterable
from typing import Any

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
        except ImportError:  # its location in torchao 0.17
            from torchao.prototype.mx_formats.mx_linear import mx_mm
except ImportError as error:
    raise UserError(
        f"float8.scaling = 'mxfp8': the installed torchao does not provide it ({error}); use another scaling"
    ) from None

BLOCK = 32


class MXLinear(nn.Linear):
    """A linear layer whose forward and backward matmuls are in MXFP8."""

    emulate: bool = False

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float8_e4m3fn
        kernels = (
            (KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
            if self.emulate
            else (KernelPreference.AUTO, MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.TRITON)
        )
        # RCEIL rounds scales up, so that the largest element of a block does not saturate.
        out = mx_mm.apply(x, self.weight, dtype, dtype, dtype, BLOCK, *kernels, ScaleCalculationMode.RCEIL, False)
        return out if self.bias is None else out + self.bias


def apply_mx(linears: Iterable[Any], *, emulate: bool) -> None:
    """Converts linear layers to MXFP8 in place."""
    for linear in linears:
        linear.__class__ = MXLinear
        linear.emulate = emulate
