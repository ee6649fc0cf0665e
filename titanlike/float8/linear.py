"""A matrix that multiplies in float8, in the place of a plain one: torchao's, under our names and selection."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.config.sections import Float8
from titanlike.distributed.collectives import resolve_group
from titanlike.float8.selection import select
from titanlike.float8.validation import hardware_problems
from titanlike.models.layers import LossFunction
from titanlike.models.loss import chunked_linear_cross_entropy
from titanlike.utils.suppress_warnings import suppress_import_warnings

with suppress_import_warnings():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear as TorchaoLinear
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as multiply
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale

INPUT, WEIGHT, GRADIENT = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT


def apply_float8(model: nn.Module, float8: Float8) -> None:
    """Put float8 matrices in the place of the plain ones that the recipe chooses. Parameters and names stay as they are."""
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sizes = {name: tuple(matrix.weight.shape) for name, matrix in matrices.items()}
    verdicts = select(float8, sizes, tied_head="output" not in matrices)
    chosen = {name for name, why_not in verdicts.items() if not why_not}
    if float8.scaling == "mxfp8":
        from titanlike.float8.mx import apply_mx  # only here: a prototype, whose places move

        apply_mx({name: matrices[name] for name in chosen}, emulate=float8.emulate)
        return
    config = replace(Float8LinearConfig.from_recipe_name(float8.scaling), emulate=float8.emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)  # <- converts
    converted: list[Any] = [model.get_submodule(name) for name in chosen]
    for matrix in converted:
        matrix.__class__ = Float8Linear if matrix is not getattr(model, "output", None) else Float8Head
        matrix.linear_mm_config = converted[0].linear_mm_config  # one for all, so that one compiled block serves all


def check_hardware(device_type: str, float8: Float8) -> None:
    """Raise `UserError` if this device cannot multiply in float8 and the recipe does not say to emulate it."""
    device, capability = "the CPU", None
    if device_type == "cuda":
        device, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    problems = hardware_problems(float8, device, capability)
    if problems:
        raise UserError("\n".join(problems))


class Float8Linear(TorchaoLinear):
    """torchao's matrix. Where ranks share what one process would have as a whole, the scale is that of the whole: every
    layout rounds alike."""

    # Names of groups of ranks: those that have other parts of the weight, and those that have others of the micro-batch.
    weight_groups: tuple[str, ...] = ()
    batch_groups: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_groups or not self.has_one_scale:
            return super().forward(x)
        mm_config = self.linear_mm_config
        x = to_float8(x, INPUT, mm_config, self.batch_groups)
        weight = to_float8(self.weight, WEIGHT, mm_config, self.weight_groups)
        out = _RoundGradient.apply(multiply.apply(x, weight.t(), mm_config, self.config), mm_config, self.batch_groups)
        return out if self.bias is None else out + self.bias

    @property
    def has_one_scale(self) -> bool:
        """Whether a whole tensor shares one scale."""
        return bool(self.config.cast_config_weight.scaling_granularity.value == "tensorwise")


class Float8Head(Float8Linear):
    """The same as the last matrix: an `LMHead`, whose logits are there all at once."""

    loss: LossFunction = staticmethod(chunked_linear_cross_entropy)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(x)
        return logits if labels is None else self.loss(logits, None, labels)


def to_float8(
    x: Tensor, role: Any, mm_config: Any, groups: tuple[str, ...] = (), scale: Tensor | None = None
) -> Tensor:
    """The tensor in float8, with this scale or that of all ranks' parts; as it is, if it is float8 already."""
    if isinstance(x, Float8TrainingTensor):
        return x
    if scale is None:
        scale = scale_of(_largest(x.detach(), groups), role)
    return hp_tensor_and_scale_to_float8(x, scale, dtype_of(role), mm_config, role)


@torch._dynamo.allow_in_graph
def _largest(x: Tensor, groups: tuple[str, ...]) -> Tensor:
    largest = x.abs().max()
    for name in groups:
        largest = collectives.wait_tensor(collectives.all_reduce(largest, "max", resolve_group(name)))
    return largest


def scale_of(largest: Tensor, role: Any) -> Tensor:
    """What to multiply with, so that the largest number becomes the largest that float8 has."""
    return amax_to_scale(largest, dtype_of(role))


def dtype_of(role: Any) -> torch.dtype:
    """Gradients spread over more orders of magnitude, and have less need of digits."""
    return torch.float8_e5m2 if role is GRADIENT else torch.float8_e4m3fn


# The compiler takes functions with float8 tensors at their ends as they are, and looks inside when it differentiates.
@torch._dynamo.allow_in_graph
class _RoundGradient(torch.autograd.Function):
    """The tensor as it is; its gradient in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
        ctx.mm_config, ctx.groups = mm_config, groups
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return to_float8(gradient, GRADIENT, ctx.mm_config, ctx.groups), None, None
