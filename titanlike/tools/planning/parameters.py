"""The parameters of a pipeline stage, as tensor parallelism, expert parallelism and FSDP divide them. Does not import torch."""

import math
from dataclasses import dataclass, replace
from functools import cache

from titanlike.config.finetune import Lora
from titanlike.config.layout import blocks_of
from titanlike.config.sections import Float8
from titanlike.float8.selection import HEAD, skip_reasons
from titanlike.models.common.config import ParameterSpec, TransformerConfig
from titanlike.tools.planning.job import Job

SHARDED = {
    "vocab_parallel": 0,
    "lm_head": 0,
    "colwise": 0,
    "colwise_norm": 0,
    "head_parallel": 0,
    "rowwise": 1,
    "colwise_embedding": 1,
}  # dimension that tensor-parallel ranks shard


@dataclass(frozen=True)
class Parameter:
    """A parameter on one tensor-parallel and expert-parallel rank."""

    name: str  # in its block, or in the model
    shape: tuple[int, ...]  # of this rank's shard
    sharded: bool  # over tensor-parallel ranks; they replicate it otherwise
    trainable: bool = True
    float8: bool = False  # the weight of a linear layer that multiplies in float8
    expert: bool = False  # stacked matrices of experts, of which an expert-parallel rank has a part

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def padded(self, num_shards: int) -> int:
        """Returns the number of elements after FSDP has padded the first dimension to a multiple of the ranks. It shards the second
        dimension of stacked matrices that are too few for all ranks, if that is divisible."""
        if len(self.shape) == 3 and self.shape[0] % num_shards and self.shape[1] % num_shards == 0:
            return self.size
        return -(-self.shape[0] // num_shards) * num_shards * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP all-gathers and reduces together."""

    parameters: tuple[Parameter, ...]
    reshards: bool  # frees the gathered parameters after the forward pass
    in_backward: bool  # the backward pass gathers them again if they have been freed
    experts: bool = False  # of a block, with expert parallelism: sharded over other ranks than the rest of the block


@dataclass(frozen=True)
class Stage:
    """The parameters of a pipeline stage: before the blocks, of each block by its index, and after the blocks."""

    first: tuple[Parameter, ...]
    blocks: dict[int, tuple[Parameter, ...]]
    last: tuple[Parameter, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters."""
        return (*self.first, *(parameter for block in self.blocks.values() for parameter in block), *self.last)


def stage_of(job: Job, stage: int) -> Stage:
    """Returns the parameters of a pipeline stage. A tied LM head has none of its own, except in a pipeline."""
    recipe, num_stages, tensor, expert = job.recipe, len(job.split), job.layout.tensor, job.layout.expert
    model, float8, lora = recipe.model, recipe.float8, job.lora
    found = Stage(
        first=_first(model, lora, tensor) if stage == 0 else (),
        blocks={index: _block(model, float8, lora, tensor, expert, index) for index in blocks_of(stage, job.split)},
        last=_last(model, float8, lora, tensor, num_stages == 1) if stage == num_stages - 1 else (),
    )
    if not job.forward_only:
        return found
    blocks = {index: _frozen(parameters) for index, parameters in found.blocks.items()}
    return Stage(_frozen(found.first), blocks, _frozen(found.last))


def _frozen(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(parameter, trainable=False) for parameter in parameters)


def fsdp_units(job: Job, stage: Stage) -> list[Unit]:
    """Returns the FSDP units of a stage in the order of the forward pass, as `parallelize.fsdp_units` forms them."""
    policy = job.layout.reshard_after_forward
    if policy == "auto" and len(job.split) > 1:
        policy = "never"
    groups = [stage.first, *stage.blocks.values(), stage.last]
    root: tuple[Parameter, ...] = ()
    if job.recipe.model.tied_head and len(job.split) == 1:  # the embedding is used at both ends
        root, groups = (*stage.first, *stage.last), groups[1:-1]
    elif job.recipe.model.is_encoder_decoder:  # at the start of both stacks
        root, groups = stage.first, groups[1:]
    groups = [group for group in groups if group]
    # `auto` leaves out the last unit, which the backward pass uses first.
    resharded = {"always": len(groups), "auto": len(groups) - 1, "never": 0}[policy]
    found = [(root, policy == "always")] * bool(root)
    found += [(group, index < resharded) for index, group in enumerate(groups)]
    trained = [any(parameter.trainable for parameter in parameters) for parameters, _ in found]
    # The backward pass does not read the embeddings. With LoRA, it ends at the first block that has its matrices; that block
    # prefetches the one before it.
    units = []
    for index, (parameters, reshards) in enumerate(found):
        in_backward = (parameters is root or parameters is not stage.first) and (
            index == 0 or any(trained[: index + 2])
        )
        experts = tuple(each for each in parameters if each.expert and job.layout.expert > 1)
        rest = tuple(each for each in parameters if not each.expert) if experts else parameters
        units.append(Unit(rest, reshards, in_backward))
        if experts:  # a unit inside of the block's, which does not prefetch it
            units.append(Unit(experts, reshards, in_backward and any(trained[: index + 1]), experts=True))
    return units


@cache
def _block(
    model: TransformerConfig, float8: Float8, lora: Lora, tensor: int, expert: int, index: int
) -> tuple[Parameter, ...]:
    sizes = {f"layers.{index}.{name}": size for name, size in model.block_matrices(index).items()}
    reasons = skip_reasons(float8, sizes, model.tied_head)
    parameters = []
    for name, spec in model.parameters_of(index).items():
        if spec.keeps_float32 or f"layers.{index}.{name}" in model.absent_parameters:
            continue  # FSDP leaves the former, which are small, as they are
        layer = f"layers.{index}.{name.removesuffix('.weight')}"
        converted = layer in sizes and float8.scaling != "none" and not reasons[layer]
        parameters.append(_parameter(name, spec, lora, tensor, expert, converted))
        if layer in sizes and lora.selects(layer):  # one matrix is sharded like the weight, and the other is replicated
            outputs, inputs = parameters[-1].shape
            module = name.removesuffix(".weight")
            parameters.append(Parameter(f"{module}.lora_A", (lora.rank, inputs), spec.style == "rowwise"))
            parameters.append(Parameter(f"{module}.lora_B", (outputs, lora.rank), spec.style == "colwise"))
    return tuple(parameters)


@cache
def _first(model: TransformerConfig, lora: Lora, tensor: int) -> tuple[Parameter, ...]:
    return tuple(_parameter(name, spec, lora, tensor) for name, spec in model.first_parameters().items())


@cache
def _last(model: TransformerConfig, float8: Float8, lora: Lora, tensor: int, single: bool) -> tuple[Parameter, ...]:
    matrix = (model.vocab_size, model.dim)
    converted = float8.scaling != "none" and not skip_reasons(float8, {HEAD: matrix}, model.tied_head)[HEAD]
    parameters = model.last_parameters()
    if model.tied_head and single:
        del parameters["output.weight"]
    return tuple(
        _parameter(name, spec, lora, tensor, converted=converted and name == "output.weight")
        for name, spec in parameters.items()
    )


def _parameter(
    name: str, spec: ParameterSpec, lora: Lora, tensor: int, expert: int = 1, converted: bool = False
) -> Parameter:
    shape, is_expert = list(spec.shape), spec.style == "experts"
    output_dim = 2 if ".w2" in name else 1  # the matrices and biases of w2 have no hidden dimension among the outputs
    dim = output_dim if is_expert else SHARDED.get(spec.style, len(shape))
    if is_expert:
        shape[0] //= expert
    if sharded := dim < len(shape):
        shape[dim] //= tensor
    return Parameter(name, tuple(shape), sharded, lora.rank == 0, converted, is_expert)
