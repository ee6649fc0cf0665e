"""What ranks exchange and compute for Muon: the rounds of `titanlike.optim.whole_matrices`. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from titanlike.config.layout import blocks_of, shard_range
from titanlike.config.optimizer import OptimizerGroup
from titanlike.tools.planning.job import Job


@dataclass(frozen=True)
class Matrix:
    """A whole matrix of a block."""

    outputs: int
    inputs: int
    style: str  # of tensor parallelism

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.outputs * self.inputs

    def shard(self, job: Job) -> int:
        """Returns the number of elements of the largest shard, which the first rank has."""
        rows, columns = range(self.outputs), range(self.inputs)
        if self.style == "rowwise":
            columns = shard_range(columns, job.layout.tensor, 0)
        elif self.style == "colwise":
            rows = shard_range(rows, job.layout.tensor, 0)
        return len(shard_range(rows, job.num_shards, 0)) * len(columns)

    def received(self, job: Job) -> int:
        """Returns the number of elements that all ranks send to the one that computes: tensor-parallel ranks send copies of what
        they replicate."""
        return self.size * (job.layout.tensor if self.style == "replicated" else 1)


def matrices(job: Job, stages: Sequence[int]) -> dict[OptimizerGroup, list[Matrix]]:
    """Returns the matrices that Muon updates on the ranks that hold these pipeline stages, by group."""
    model, optimizer = job.recipe.model, job.recipe.optimizer
    found: dict[OptimizerGroup, list[Matrix]] = {}
    if any(group.optimizer == "muon" for group in optimizer.groups):
        for index in (index for stage in stages for index in blocks_of(stage, job.split)):
            table = model.parameters_of(index)
            for name, (outputs, inputs) in model.block_matrices(index).items():
                group = optimizer.group_of(f"layers.{index}.{name}.weight", is_matrix=True)
                if group and group.optimizer == "muon":
                    found.setdefault(group, []).append(Matrix(outputs, inputs, table[f"{name}.weight"].style))
    return found


def rounds(job: Job, stages: Sequence[int]) -> list[list[Matrix]]:
    """Returns the matrices of each round, at most one for each rank that shares them."""
    number = job.layout.replicate * job.num_shards * job.layout.tensor
    found = []
    for group in matrices(job, stages).values():
        ordered = sorted(group, key=lambda matrix: (-matrix.size, matrix.outputs))
        found += [ordered[start : start + number] for start in range(0, len(ordered), number)]
    return found


def element_size(job: Job) -> int:
    """Returns the bytes of an element in which ranks exchange and orthogonalize matrices."""
    return 2 if job.recipe.run.allows_cuda else 4
