"""Mixed precision for parameters that are not sharded: FSDP's `param_dtype` without its unsharded copies.

Parameters are cast where they are used, not before: the compiler then recomputes the cast in the backward pass instead of saving
its result. Layers of the library with `casts_parameters` cast to the dtype of their input by themselves. The layers of `torch.nn`
are replaced by those below, and other modules that have parameters by a `MixedPrecision` around them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config import UserError
from titanlike.utils import weight_gradients
from titanlike.utils.compat import tree_map_only
from titanlike.utils.modules import ParameterOwner, rebuild, replace_modules


def float32_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that modules name in `float32_parameters`: they have no gradient, stay in float32 whatever the dtype
    of the others, and FSDP neither shards nor casts them."""
    named = ((module, name) for module in model.modules() for name in getattr(module, "float32_parameters", ()))
    return {parameter for module, name in named if (parameter := module._parameters.get(name)) is not None}


def cast_parameters(model: nn.Module, dtype: torch.dtype, frozen_dtype: torch.dtype | None = None) -> None:
    """Casts the parameters of a model to `dtype`, those without a gradient to `frozen_dtype` (default: the same), and its
    `float32_parameters` to float32."""
    kept = float32_parameters(model)
    for parameter in model.parameters():
        own = dtype if parameter.requires_grad else frozen_dtype or dtype
        parameter.data = parameter.data.to(torch.float32 if parameter in kept else own)


def apply_mixed_precision(model: nn.Module, dtype: torch.dtype, *, cast_forward_inputs: bool = True) -> None:
    """Has the modules inside of a model compute with their floating-point parameters cast to `dtype`. Parameters and gradients keep
    their own dtype.

    Args:
        cast_forward_inputs: also casts the floating-point inputs of the model.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise UserError(
                "apply_mixed_precision casts parameters that are not sharded; use compute_dtype of apply_fsdp"
            )
        casts = any(p.dtype != dtype and p.is_floating_point() for p in parameters)
        if casts and not getattr(module, "casts_parameters", False):
            layer_class = LAYERS.get(type(module))
            replacements[module] = (
                rebuild(module, layer_class, compute_dtype=dtype) if layer_class else MixedPrecision(module, dtype)
            )
    replace_modules(model, replacements)
    if cast_forward_inputs:

        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

        model.register_forward_pre_hook(cast_inputs, with_kwargs=True)


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Within this context, the linear layers of a model with `casts_once` use one copy of their weight, which must not change. They
    would make one in each forward pass, and keep it for the backward pass. The model's micro-batches of a step run in it."""
    modules = model.modules() if getattr(model, "casts_once", False) else ()
    layers = [each for each in modules if isinstance(each, MixedPrecisionLinear) and each.is_cast()]
    versions = [layer.weight._version for layer in layers]
    try:
        for layer in layers:
            layer.weight_copy = layer.weight.detach().to(layer.compute_dtype)
        yield
        if versions != [layer.weight._version for layer in layers]:
            raise RuntimeError("weights have changed between the micro-batches of a step")
    finally:
        for layer in layers:
            layer.weight_copy = None


class MixedPrecisionLinear(nn.Linear):
    """A linear layer that computes in `compute_dtype`."""

    compute_dtype: torch.dtype
    weight_copy: Tensor | None = None

    def is_cast(self) -> bool:
        """Whether this is done by a function that has the matmul of a float32 gradient, which only CUDA has."""
        return self.weight.is_cuda and self.weight.dtype == torch.float32 and self.weight.requires_grad

    def forward(self, x: Tensor) -> Tensor:
        if self.is_cast():
            return cast(Tensor, _Linear.apply(x, self.weight, self.bias, self.compute_dtype, self.weight_copy))
        return F.linear(x, self.weight.to(self.compute_dtype), _cast(self.bias, self.compute_dtype))


class _Linear(torch.autograd.Function):
    """A product with a float32 weight that is cast. The matmul of its gradient, which only CUDA has, writes float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, copy: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, copy)
        return F.linear(x, weight.to(dtype) if copy is None else copy, _cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        x, weight, copy = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        weight_gradient = weight_gradients.weight_gradient(weight, rows.t(), x.flatten(0, -2))
        bias_gradient = rows.sum(0, dtype=weight.dtype) if ctx.needs_input_grad[2] else None
        used = weight.to(gradient.dtype) if copy is None else copy
        x_gradient = gradient @ used if ctx.needs_input_grad[0] else None
        return x_gradient, weight_gradient, bias_gradient, None, None


class MixedPrecisionEmbedding(nn.Embedding):
    """An embedding that returns `compute_dtype`. It casts the rows of the tokens, not the whole weight."""

    compute_dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        if options == (None, None, 2.0, False, False) and not torch.compiler.is_compiling():
            return cast(Tensor, _Embedding.apply(ids, self.weight, self.compute_dtype))
        return F.embedding(ids, self.weight, *options).to(self.compute_dtype)


class _Embedding(torch.autograd.Function):
    """Rows of a weight, cast. In the backward pass, they are added to `weight.grad`, if it exists."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ids, weight = ctx.saved_tensors
        rows = gradient.to(weight.dtype)
        total = weight_gradients.take(weight)
        if total is None:
            return None, torch.ops.aten.embedding_dense_backward(rows, ids, len(weight), -1, False), None
        return None, total.index_put_((ids,), rows, accumulate=True), None


class MixedPrecisionRMSNorm(nn.RMSNorm):
    """RMSNorm in `compute_dtype`."""

    compute_dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, _cast(self.weight, self.compute_dtype), self.eps)


class MixedPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm in `compute_dtype`."""

    compute_dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (_cast(parameter, self.compute_dtype) for parameter in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: MixedPrecisionLinear,
    nn.Embedding: MixedPrecisionEmbedding,
    nn.RMSNorm: MixedPrecisionRMSNorm,
    nn.LayerNorm: MixedPrecisionLayerNorm,
}


class MixedPrecision(ParameterOwner):
    """Any other module, called with its own parameters cast to a dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.set_module(module)  # `functional_call` replaces its parameters
        self.compute_dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        casts = {
            name: parameter.to(self.compute_dtype)
            for name, parameter in self.named_parameters(recurse=False)
            if parameter.is_floating_point() and name not in getattr(self, "float32_parameters", ())
        }
        return torch.func.functional_call(self.module, casts, args, kwargs)


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
