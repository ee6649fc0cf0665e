"""Logits of a model under any layout.

Shapes: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.distributed.autograd_collectives import all_gather
from titanlike.parallelisms.context import context_position_ids, gather_sequence
from titanlike.parallelisms.mesh import Mesh

# Returns the logits (B, V) after the last token of each sequence, on all ranks.
NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]


def sequence_multiple(mesh: Mesh) -> int:
    """Returns a number of which the length of a sequence must be a multiple under a layout."""
    return mesh.tensor.size() * (2 * mesh.context.size() if mesh.context.size() > 1 else 1)


def check_finite(values: Tensor) -> Tensor:
    """Returns what was computed from logits. Raises `UserError` if some of it is NaN or infinite."""
    if (~values.isfinite()).any():
        raise UserError(
            "the model computes NaN or infinity; restore its weights or, if they are finite, compute in float32"
        )
    return values


def round_up(number: int, multiple: int) -> int:
    """Returns the next multiple of a number."""
    return -(-number // multiple) * multiple


@torch.no_grad()
def parallel_logits(model: nn.Module, mesh: Mesh, tokens: Tensor, last: Tensor | None = None) -> Tensor:
    """Returns the logits (B, T, V) of full sequences (B, T), or with `last` (B,) those at one index of each (B, V).

    The ranks of a tensor-, context- and pipeline-parallel group pass the same tokens and get the same logits.
    """
    length = round_up(tokens.shape[1], sequence_multiple(mesh))
    # Padding follows the text, where a causal model does not see it.
    padded = torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))
    position_ids = context_position_ids(length, mesh.context).to(tokens.device)
    # Padding may lie past the last position that a model has.
    valid_ids = position_ids.clamp(max=tokens.shape[1] - 1)
    logits: Tensor = model(tokens=padded[:, position_ids], position_ids=valid_ids[None])
    logits = gather_sequence(logits, 1, mesh.context)[:, : tokens.shape[1]]
    if last is not None:
        logits = logits[torch.arange(len(last), device=last.device), last]
    return logits if mesh.vocab_group is None else all_gather(logits, logits.dim() - 1, mesh.vocab_group)


def recomputed_logits(model: nn.Module, mesh: Mesh, context_length: int, device: torch.device) -> NextLogits:
    """Returns a function that computes all tokens at each step, under any layout. It sees the last `context_length` tokens.

    The model always gets that many, so that compiled code is reused.
    """

    def next_logits(sequences: Sequence[Sequence[int]]) -> Tensor:
        contexts = [sequence[-context_length:] for sequence in sequences]
        padded = torch.tensor([[*tokens, *[0] * (context_length - len(tokens))] for tokens in contexts], device=device)
        last = torch.tensor([len(tokens) - 1 for tokens in contexts], device=device)
        return parallel_logits(model, mesh, padded, last)

    return next_logits
