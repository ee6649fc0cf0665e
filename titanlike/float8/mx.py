"""MXFP8: blocks of 32 elements share a power-of-two scale. Requires Blackwell GPUs. Uses a prototype of torchao."""

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


class MXMatmul:
    """The matmul of a linear layer in MXFP8, forward and backward."""

    def __init__(self, *, emulate: bool) -> None:
        self.kernels = (
            (KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
            if emulate
            else (KernelPreference.AUTO, MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.TRITON)
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = torch.float8_e4m3fn
        # RCEIL rounds scales up, so that the largest element of a block does not saturate.
        options = (dtype, dtype, dtype, BLOCK, *self.kernels, ScaleCalculationMode.RCEIL, False)
        out = mx_mm.apply(x, weight.to(x.dtype), *options)
        return out if bias is None else out + bias.to(x.dtype)


class MXLinear(nn.Linear):
    """A linear layer that multiplies in MXFP8."""

    casts_parameters = True
    matmul: MXMatmul

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)
