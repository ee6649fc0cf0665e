"""Recipes of four processes under each layout, and the batches that their ranks train on."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes import pretrain
from tests.training import MODELS, deep, tiny, train_on_rank
from titanlike.config.sections import Parallelism
from titanlike.recipe import PretrainRecipe

# Four processes each.
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": dict(shard=4),
    "HSDP": dict(replicate=2, shard=2),
    "TP-FSDP": dict(tensor=2, shard=2),
    "CP-FSDP": dict(context=2, shard=2),
    "PP-FSDP": dict(pipeline=2, shard=2),
    "PPzbv-TP": dict(pipeline=2, pipeline_schedule="zbv", tensor=2),
}


def recipe_for(
    folder: Path, name: str, model: str, layout: str | None, dropout: float = 0.0, **sections: Any
) -> PretrainRecipe:
    parallelism = Parallelism(**LAYOUTS[layout]) if layout else Parallelism()
    fields = {"dropout": dropout} if dropout else {}
    return tiny(folder, name, model=deep(MODELS[model], **fields), parallelism=parallelism, **sections)


def stream_of(folder: Path) -> dict[str, Any]:
    """Writes files of short documents, most of them shorter than a sequence. Returns a section that streams them."""
    (folder / "corpus").mkdir()
    for number in range(8):
        lines = [json.dumps({"text": f"{number} and {line}; " * (1 + line % 3)}) for line in range(60)]
        (folder / f"corpus/{number}.jsonl").write_text("\n".join(lines))
    paths = dict(path=str(folder / "corpus"), validation_path=str(folder / "corpus/7.jsonl"), cache=str(folder))
    return dict(source="stream", **paths)


def training_batches(recipe: PretrainRecipe) -> list[dict[str, Tensor]]:
    """Returns the inputs and labels of this rank in each step, with the indices of its sequences in the global batch."""
    steps = []
    original = pretrain.forward_backward

    def patched(model: Any, microbatches: Any, num_tokens: Any, mesh: Any, *others: Any) -> Any:
        step = {name: torch.cat([batch.inputs[name] for batch in microbatches]) for name in microbatches[0].inputs}
        step["labels"] = torch.cat([batch.labels for batch in microbatches])
        first = mesh.data_rank * step["labels"].shape[0]
        steps.append(step | {"sequence": torch.arange(first, first + step["labels"].shape[0])})
        return original(model, microbatches, num_tokens, mesh, *others)

    pretrain.forward_backward = patched
    try:
        train_on_rank(recipe)
    finally:
        pretrain.forward_backward = original
    return steps
