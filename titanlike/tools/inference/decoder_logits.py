"""Logits of an encoder-decoder.

Shapes: B sequences, S tokens of the inputs, T tokens of the decoder, D model dimension, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from titanlike.distributed.autograd_collectives import all_gather
from titanlike.parallelisms.mesh import Mesh

PADDING = -1  # the document of padding


class DecoderLogits:
    """Computes the decoder for inputs that the encoder reads once. There is no KV cache: each call computes all tokens of the
    decoder. For a model whose activations are not sharded."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, mesh: Mesh, inputs: Sequence[Sequence[int]], device: torch.device) -> None:
        self.model, self.mesh, self.device = cast(Any, model), mesh, device
        longest = max(map(len, inputs))
        tokens = [[*sequence, *[0] * (longest - len(sequence))] for sequence in inputs]
        documents = [[*[0] * len(sequence), *[PADDING] * (longest - len(sequence))] for sequence in inputs]
        self.document_ids = torch.tensor(documents, device=device)  # (B, S)
        self.memory = self.model.encode(torch.tensor(tokens, device=device), self.document_ids)  # (B, S, D)

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits (B, V) after the last token of each sequence of the decoder. All are equally long."""
        tokens = torch.tensor([list(sequence) for sequence in sequences], device=self.device)  # (B, T)
        logits = self.model.decode(tokens, self.memory, self.document_ids, torch.zeros_like(tokens))[:, -1]
        return logits if self.mesh.vocab_group is None else all_gather(logits, 1, self.mesh.vocab_group)
