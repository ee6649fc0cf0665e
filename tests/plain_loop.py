"""A plain PyTorch training loop, which shares only the model and the data with the programs."""

import math

import torch
import torch.nn.functional as F

from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.sources import open_sources
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.recipe import PretrainRecipe


def plain_loop(recipe: PretrainRecipe, label_smoothing: float = 0.0) -> tuple[list[float], list[float]]:
    """Returns losses and gradient norms: one micro-batch a step, mean loss, the schedule as a formula."""
    size = recipe.training.global_batch_size
    data = open_sources(
        recipe.data, build_tokenizer(recipe.tokenizer), seq_len=recipe.training.seq_len, global_batch_size=size, seed=0,
        validate=True,
    )  # fmt: skip
    source = BatchLoader(
        data.training, global_batch_size=size, local_batch_size=size, data_rank=0, num_data_ranks=1, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    with torch.device("meta"):
        model = build_model(recipe.model)
    initialize(model, torch.device("cpu"), 0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    not_decayed = [p for p in model.parameters() if p.dim() == 1]
    section = recipe.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": section.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}],
        betas=(section.beta1, section.beta2), eps=section.eps, foreach=False,
    )  # fmt: skip
    losses, norms = [], []
    steps, warmup = recipe.training.steps, recipe.schedule.warmup_steps
    for step in range(1, steps + 1):
        (batch,) = source.microbatches(step)
        logits, labels = model(batch.inputs["tokens"]).flatten(0, 1), batch.labels.flatten()
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.training.max_norm)
        decay = 0.1 + 0.9 * (1 + math.cos(math.pi * max(step - warmup, 0) / (steps - warmup))) / 2
        for group in optimizer.param_groups:
            group["lr"] = section.lr * min(step / warmup, decay)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms
