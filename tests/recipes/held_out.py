"""The data of a run, opened again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlike.data.batches import openers
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.recipe import load


def opened(kind: Any, folder: Path, record: Path) -> tuple[Any, Iterator[Batch]]:
    """Returns the recipe of a run, and its batches of validation, whose tokens are masked or cut in the same way.

    `titanlike data inspect` opens what the run has read: its first batch is the one that was recorded in the folder `record`.
    """
    recipe = load(kind, folder / "recipe.toml")
    training = recipe.training
    sources = openers.of(recipe)(
        recipe.data, build_tokenizer(recipe.tokenizer), seq_len=training.seq_len, global_batch_size=training.global_batch_size,
        seed=recipe.run.seed, validate=True,
    )  # fmt: skip
    sizes: dict[str, Any] = dict(global_batch_size=training.global_batch_size, local_batch_size=4, seed=0)
    sizes |= dict(data_rank=0, num_data_ranks=1, device=torch.device("cpu"))
    BatchLoader(sources.training, **sizes, record=record / "inspected").microbatches(1)
    read_by_run, inspected = (next(record.glob(f"{kind}.*")).read_text() for kind in ("training", "inspected"))
    assert read_by_run.splitlines()[0] == inspected.strip()
    held_out = BatchLoader(sources.validation, **sizes).first_batches(recipe.validation.batches)
    return recipe, (batch for microbatches in held_out for batch in microbatches)
