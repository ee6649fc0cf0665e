"""Float8 linear layers: torchao's float8 tensors and rowwise matmuls, and tensorwise scales that do not depend on the layout."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config import UserError
from titanlike.config.sections import Float8
from titanlike.float8.selection import ALIGNMENT, skip_reasons
from titanlike.losses.chunked import Logits
from titanlike.models.common.layers import LMHead, head_output
from titanlike.utils.compat import all_reduce, resolve_process_group, wait_tensor
from titanlike.utils.modules import rebuild, replace_modules, without_owner
from titanlike.utils.suppress_warnings import suppress_import_warnings

with suppress_import_warnings():
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as TorchaoLinear
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as float8_matmul
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, hp_tensor_and_scale_to_float8

INPUT, WEIGHT, GRADIENT = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
EPS = 1e-12  # the smallest maximum that has a scale of its own: that of zeros is finite


def apply_float8(model: nn.Module, float8: Float8) -> None:
    """Converts the selected linear layers of any model to float8 in place. Parameters and their names do not change.

    Apply it before tensor parallelism and FSDP. A linear layer named `output` is the LM head, selected by `float8.head`; exclude a
    head of another name with `float8.skip`. Raises `UserError` if no layer is selected, or one that float8 cannot multiply.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sizes = {name: tuple(linear.weight.shape) for name, linear in linears.items()}
    reasons = skip_reasons(float8, sizes, tied_head="output" not in linears)
    selected = {name for name, reason in reasons.items() if not reason and float8.scaling != "none"}
    if not selected:
        why = (
            "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3] if reason) or "no linear layers"
        )
        why = "the scaling is 'none'; set 'tensorwise'" if float8.scaling == "none" else why
        raise UserError(f"float8 converts no layer of {type(model).__name__} ({why})")
    for name in sorted(selected):
        kind = type(linears[name])
        if kind not in (nn.Linear, LMHead):
            raise UserError(
                f"{name} is a {kind.__name__}, whose forward float8 would replace; exclude it with float8.skip"
            )
        if isinstance(linears[name].weight, DTensor):
            raise UserError(f"{name} is sharded already; apply float8 before tensor parallelism and FSDP")
        if not float8.emulate and any(size % ALIGNMENT[float8.scaling] for size in sizes[name]):
            raise UserError(
                f"float8.scaling = {float8.scaling!r} requires multiples of {ALIGNMENT[float8.scaling]}, but {name} is "
                f"{' x '.join(map(str, sizes[name]))}; exclude it with float8.skip"
            )
    if float8.scaling == "mxfp8":
        from titanlike.float8.mx import MXLinear, MXMatmul  # raises where the installed torchao lacks this prototype

        mx = MXMatmul(emulate=float8.emulate)
        replace_modules(model, {linears[name]: rebuild(linears[name], MXLinear, matmul=mx) for name in selected})
        return
    config = replace(Float8LinearConfig.from_recipe_name(float8.scaling), emulate=float8.emulate)
    # torchao makes it in its layer. One object: all blocks share one compiled forward.
    mm_config = TorchaoLinear(1, 1, bias=False, device="meta", config=config).linear_mm_config
    classes = {name: Float8Head if name == "output" else Float8Linear for name in selected}
    replace_modules(
        model,
        {
            linears[name]: rebuild(linears[name], layer_class, matmul=Float8Matmul(config, mm_config))  # <- converts
            for name, layer_class in classes.items()
        },
    )


def check_hardware(device_type: str, float8: Float8) -> None:
    """Raises `UserError` if the device has no float8 matmuls and the recipe does not emulate them."""
    device, capability = "the CPU", None
    if device_type == "cuda":
        device, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if problem := float8.hardware_problem(device, capability):
        raise UserError(problem)


class Float8Matmul:
    """The matmul of a linear layer. Tensorwise scales are computed over the full, unsharded tensor: every layout rounds alike."""

    def __init__(self, config: Float8LinearConfig, mm_config: Any) -> None:
        self.config, self.mm_config = config, mm_config
        self.is_tensorwise = bool(config.cast_config_weight.scaling_granularity.value == "tensorwise")
        """Whether a tensor has a single scale."""
        self.batch_groups: tuple[str, ...] = ()
        """Names of the process groups over which the micro-batch is sharded."""
        self.weight_amax: Tensor | None = None
        """The largest absolute value of the full weight if tensor parallelism shards it, from `share_scales`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled():
            x = x.to(torch.get_autocast_gpu_dtype())
        if self.is_tensorwise:
            out = _Matmul.apply(x, weight, self.weight_amax, self.mm_config, self.batch_groups)
        else:
            out = float8_matmul.apply(x, weight.to(x.dtype).t(), self.mm_config, self.config)
        return out if bias is None else out + bias.to(out.dtype)

    def __repr__(self) -> str:
        config = self.config
        casts = config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output
        return f"Float8Matmul({', '.join(cast.short_str() for cast in casts)})"


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8."""

    casts_parameters = True
    matmul: Float8Matmul

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, matmul={self.matmul}"


class Float8Head(LMHead):
    """An `LMHead` in float8. Its loss is not chunked: all logits are in memory at once."""

    matmul: Float8Matmul

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:  # type: ignore[override]
        logits = Logits(self.matmul(x, self.weight), None, self.bias, self.soft_cap)
        return head_output(self, logits, labels, options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, matmul={self.matmul}"


def matmul_of(module: nn.Module) -> Float8Matmul | None:
    """Returns the float8 matmul of a layer that has one, also of one under LoRA or tensor parallelism."""
    matmul = getattr(without_owner(module), "matmul", None)
    return matmul if isinstance(matmul, Float8Matmul) else None


def to_float8(
    x: Tensor,
    role: Any,
    mm_config: Any,
    groups: tuple[str, ...] = (),
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Casts a tensor to float8 with `scale`, with the scale that follows from `amax`, or with the scale of shards over `groups`.
    Returns float8 tensors unchanged."""
    if isinstance(x, Float8TrainingTensor):
        return x
    dtype = float8_dtype(role)
    if scale is None:
        # The maximum of a cast weight is the cast maximum.
        scale = scale_of(_amax(x, groups) if amax is None else amax.to(x.device, x.dtype), dtype)
    return hp_tensor_and_scale_to_float8(x, scale, dtype, mm_config, role)


def _amax(x: Tensor, groups: tuple[str, ...]) -> Tensor:
    amax = x.abs().max()
    for name in groups:
        amax = wait_tensor(all_reduce(amax, "max", resolve_process_group(name)))
    return amax


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales of tensors with these largest absolute values. In float32: compiled code repeats the division for each
    element that it casts, which in float64 takes longer than reading and writing it."""
    return torch.finfo(dtype).max / amax.float().clamp(min=EPS)


def float8_dtype(role: Any) -> torch.dtype:
    """Returns e5m2 for gradients, which need more range, and e4m3, which is more precise, for inputs and weights."""
    return torch.float8_e5m2 if role is GRADIENT else torch.float8_e4m3fn


# dynamo does not trace functions with float8 inputs or outputs; AOTAutograd traces inside them.
@torch.compiler.allow_in_graph
class _Matmul(torch.autograd.Function):
    """`x @ weight.t()` with a scale for each tensor, also of float8 tensors. The gradient of a weight has the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, weight_amax: Tensor | None, mm_config: Any, groups: tuple[str, ...]
    ) -> Tensor:
        ctx.mm_config, ctx.groups = mm_config, groups
        x8: Any = to_float8(x, INPUT, mm_config, groups)
        weight8: Any = to_float8(weight.to(x.dtype), WEIGHT, mm_config, amax=weight_amax)
        ctx.save_for_backward(x8, weight, weight8._scale)  # the weight is cast again: no copy of it is kept
        return torch.mm(x8.reshape(-1, x.shape[-1]), weight8.t()).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, weight, scale = ctx.saved_tensors
        gradient8: Any = to_float8(gradient, GRADIENT, ctx.mm_config, ctx.groups)
        gradient8 = gradient8.reshape(-1, gradient.shape[-1])
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            weight8 = to_float8(weight.to(gradient.dtype), WEIGHT, ctx.mm_config, scale=scale)
            x_gradient = torch.mm(gradient8, weight8).reshape(x8.shape)
        if ctx.needs_input_grad[1]:
            # The dtype of its first factor is that of a float8 matmul's result.
            gradient8 = Float8TrainingTensor(gradient8._data, gradient8._scale, weight.dtype, ctx.mm_config, GRADIENT)
            weight_gradient = torch.mm(gradient8.t(), x8.reshape(-1, x8.shape[-1]))
        return x_gradient, weight_gradient, None, None, None
