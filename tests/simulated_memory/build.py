"""The model and a micro-batch of a job, without data."""

import torch
from torch import nn

from tests.simulated_memory.fake_operators import any_hardware
from titanlike.config.sections import Compile
from titanlike.data.batches.loader import Batch
from titanlike.models.registry import build_model
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelize import parallelize
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.tools.planning.job import Job

EAGER = Compile(mode="none")


def build(job: Job, mesh: Mesh, compile: Compile = EAGER) -> nn.Module:
    """Returns the model of a job after all transforms, on the meta device."""
    recipe = job.recipe
    with torch.device("meta"):
        model: nn.Module = build_model(recipe.model)
    with any_hardware(recipe.float8):
        return parallelize(
            model,
            mesh,
            split=job.split,
            training=recipe.training,
            parallelism=job.layout,
            float8=recipe.float8,
            lora=job.lora,
            activation_checkpoint=recipe.activation_checkpoint,
            compile=compile,
            loss_reduction="none" if job.trains_on_pairs else "sum",
        )


def fake_batch(job: Job) -> Batch:
    """Returns a micro-batch of a rank, without data."""
    recipe = job.recipe
    tokens = torch.zeros(job.sequences, recipe.training.seq_len // job.layout.context, dtype=torch.long)
    inputs, labels = {"tokens": tokens, "position_ids": tokens}, tokens
    if further := recipe.model.num_mtp_layers:
        inputs |= dict.fromkeys(("next_tokens", "next_labels"), tokens[..., None].expand(-1, -1, further))
    if isinstance(recipe, Seq2SeqRecipe):
        labels = torch.zeros(job.sequences, recipe.target_len, dtype=torch.long)
        inputs |= {"decoder_tokens": labels}
        inputs |= {"document_ids": tokens, "decoder_document_ids": labels} if recipe.has_pairs else {}
    return Batch(inputs, labels)
