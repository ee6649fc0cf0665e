"""A module of a user that a pipeline can split, and its batches."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Decoder(nn.Module):
    """A model that a pipeline can split, with an ordinary tied head."""

    first_stage_modules = ("tok_embeddings",)
    last_stage_modules = ("output",)

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.tok_embeddings: Any = nn.Embedding(32, 16)
        self.layers = nn.ModuleDict({str(i): nn.Linear(16, 16) for i in range(num_blocks)})
        self.output: Any = nn.Linear(16, 32, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = h + layer(h).relu()
        if self.output is None:
            return h
        logits: Tensor = self.output(h)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Batch:
    def __init__(self, tokens: Tensor) -> None:
        self.inputs = {"tokens": tokens}
        self.labels = tokens.roll(-1, 1)
