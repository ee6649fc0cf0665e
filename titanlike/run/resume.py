"""Where a run starts: from a checkpoint, from initial weights, or from random ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.data.batches.packed_dataset import BatchSource
from titanlike.recipe import PretrainRecipe
from titanlike.run.run_dir import RunDirectory
from titanlike.utils.rng import seed_generators


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts, decided before anything is built or written."""

    checkpoint: CheckpointMetadata | None  # None: a new run
    message: str | None  # what to print about it

    @property
    def first_step(self) -> int:
        """The first step to train, counted from 1."""
        return self.checkpoint.step + 1 if self.checkpoint else 1

    @property
    def skipped(self) -> Sequence[int]:
        """Steps whose update earlier starts of the run skipped."""
        return self.checkpoint.skipped if self.checkpoint else ()

    @property
    def loss_scale(self) -> Sequence[float]:
        """The state of the loss scale at the end of an earlier start of the run."""
        return self.checkpoint.loss_scale if self.checkpoint else ()


def restore(
    resume: ResumePoint,
    checkpoints: CheckpointManager,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: BatchSource,
    recipe: PretrainRecipe,
    **others: nn.Module,
) -> None:
    """Loads the checkpoint that a run resumes from, also into other modules that were saved in it, or the initial weights of a new
    one. Seeds the global random generators, whose state a checkpoint contains."""
    checkpoints.register(model, optimizer)
    seed_generators(recipe.run.seed)
    if resume.checkpoint:
        checkpoints.load(model, optimizer, resume.checkpoint, **others)
        source.load_position(resume.checkpoint.position)
    elif recipe.checkpoint.initial:
        from titanlike.interop.weights import load_initial

        load_initial(model, recipe.checkpoint.initial, recipe.model, recipe.checkpoint.allow_changed)


def find_resume_point(
    run: RunDirectory, checkpoints: CheckpointManager, metadata: CheckpointMetadata, recipe: PretrainRecipe
) -> ResumePoint:
    """Finds the checkpoint to resume from, and refuses it if this recipe would not continue its run."""
    checkpoint = checkpoints.find(recipe.checkpoint.resume_from)
    inexact = []
    if checkpoint:
        from titanlike.run.changes import check_resume

        inexact = check_resume(checkpoint, metadata, recipe)
    return ResumePoint(checkpoint, run.resume_message(checkpoint, inexact))
