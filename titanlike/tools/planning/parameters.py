"""The parameters of a pipeline stage, as tensor parallelism, expert parallelism and FSDP divide them. Does not import torch."""

import math
from dataclasses import dataclass
from functools import cache

from titanlike.config.layout import blocks_of
from titanlike.config.model_configs import TransformerConfig
from titanlike.config.sections import Float8, Lora
from titanlike.float8.selection import HEAD, skip_reasons
from titanlike.tools.planning.job import Job

VOCAB = ("tok_embeddings.weight", "output.weight")  # tensor-parallel ranks shard these along the vocabulary


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
    model, float8, lora = recipe.model, recipe.float8, recipe.lora
    return Stage(
        first=_first(model, lora, tensor) if stage == 0 else (),
        blocks={index: _block(model, float8, lora, tensor, expert, index) for index in blocks_of(stage, job.split)},
        last=_last(model, float8, lora, tensor, num_stages == 1) if stage == num_stages - 1 else (),
    )


def fsdp_units(job: Job, stage: Stage) -> list[Unit]:
    """Returns the FSDP units of a stage in the order of the forward pass, as `parallelize.fsdp_units` forms them."""
    policy = job.layout.reshard_after_forward
    if policy == "auto" and len(job.split) > 1:
        policy = "never"
    groups = [stage.first, *stage.blocks.values(), stage.last]
    root: tuple[Parameter, ...] = ()
    if job.recipe.model.tied_head and len(job.split) == 1:  # the embedding is used at both ends
        root, groups = (*stage.first, *stage.last), groups[1:-1]
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
        in_backward = parameters is not stage.first and (index == 0 or any(trained[: index + 2]))
        experts = tuple(each for each in parameters if each.expert and job.layout.expert > 1)
        rest = tuple(each for each in parameters if not each.expert) if experts else parameters
        units.append(Unit(rest, reshards, in_backward))
        if experts:  # a unit inside of that of the block, which does not prefetch it
            units.append(Unit(experts, reshards, in_backward and any(trained[: index + 1]), experts=True))
    return units


@cache
def _block(
    model: TransformerConfig, float8: Float8, lora: Lora, tensor: int, expert: int, index: int
) -> tuple[Parameter, ...]:
    matrices = model.block_matrices()
    names = {name: f"layers.{index}.{name}" for name in matrices}
    reasons = skip_reasons(float8, {names[name]: size for name, size in matrices.items()}, model.tied_head)
    trainable = lora.rank == 0
    parameters = []
    for name, (outputs, inputs) in matrices.items():
        rowwise = name in model.rowwise_matrices
        outputs, inputs = (outputs, inputs // tensor) if rowwise else (outputs // tensor, inputs)
        converted = float8.scaling != "none" and not reasons[names[name]]
        parameters.append(Parameter(f"{name}.weight", (outputs, inputs), True, trainable, converted))
        if lora.selects(names[name]):  # one matrix is sharded like the weight, and the other is replicated
            parameters.append(Parameter(f"{name}.lora_A", (lora.rank, inputs), rowwise))
            parameters.append(Parameter(f"{name}.lora_B", (outputs, lora.rank), not rowwise))
    for name, size in model.block_vectors().items():
        owner = name.rpartition(".")[0]
        sharded = owner in matrices and owner not in model.rowwise_matrices
        parameters.append(Parameter(name, (size // tensor if sharded else size,), sharded, trainable))
    for name, shape in model.router_parameters().items():
        parameters.append(Parameter(name, shape, False, trainable and not name.endswith("expert_bias")))
    for name, (num_experts, outputs, inputs) in model.expert_parameters().items():
        sizes = (outputs, inputs // tensor) if name.endswith(".w2") else (outputs // tensor, inputs)
        parameters.append(Parameter(name, (num_experts // expert, *sizes), True, trainable, expert=True))
    return tuple(parameters)


@cache
def _first(model: TransformerConfig, lora: Lora, tensor: int) -> tuple[Parameter, ...]:
    return tuple(_outer(model.first_parameters(), lora, tensor))


@cache
def _last(model: TransformerConfig, float8: Float8, lora: Lora, tensor: int, single: bool) -> tuple[Parameter, ...]:
    matrix = (model.vocab_size, model.dim)
    converted = float8.scaling != "none" and not skip_reasons(float8, {HEAD: matrix}, model.tied_head)[HEAD]
    parameters = _outer(model.last_parameters(), lora, tensor, converted)
    shares_weight = model.tied_head and single
    return tuple(parameter for parameter in parameters if not (shares_weight and parameter.name in VOCAB))


def _outer(sizes: dict[str, tuple[int, ...]], lora: Lora, tensor: int, converted: bool = False) -> list[Parameter]:
    return [
        Parameter(name, (rows // tensor, *rest), True, lora.rank == 0, converted)
        if name in VOCAB
        else Parameter(name, (rows, *rest), False, lora.rank == 0)
        for name, (rows, *rest) in sizes.items()
    ]
