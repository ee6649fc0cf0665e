"""Logits of a model under any layout.

Shapes: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.distributed.collectives import all_gather
from titanlike.inference.kv_cache import apply_kv_cache
from titanlike.models.document_mask import DocumentMask
from titanlike.models.registry import blocks
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


class CachedLogits:
    """Computes the new token of each sequence only, with a KV cache. For a model whose activations are not sharded.

    The first call takes the prompts, which it pads on the left; each later one takes sequences that are one token longer. The cache
    holds at most `max_new_tokens` after the prompts, and no more than fill `max_length`, the context, of the shortest one.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, max_new_tokens: int, max_length: int, device: torch.device
    ) -> None:
        self.model, self.mesh, self.device = model, mesh, device
        self.max_new_tokens, self.max_length = max_new_tokens, max_length
        self._padding: Tensor | None = None  # None: the next call is the first one

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits (B, V) after the last token of each sequence."""
        if self._padding is None:
            shortest, longest = min(map(len, sequences)), max(map(len, sequences))
            padding = [longest - len(sequence) for sequence in sequences]
            tokens = [[*[0] * count, *sequence] for count, sequence in zip(padding, sequences, strict=True)]
            self._padding, self._length = torch.tensor(padding, device=self.device), 0
            self._cache = apply_kv_cache(
                blocks(self.model),
                batch_size=len(sequences),
                max_length=longest + min(self.max_new_tokens, self.max_length - shortest),
                document_masks=[module for module in self.model.modules() if isinstance(module, DocumentMask)],
            )
            self._cache.start(self._padding)
            # The model has no need to compute the logits of a prompt.
            head = self.model.get_submodule("output")
            self._hook = head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:], *args[1:]))
        else:
            tokens = [[sequence[-1]] for sequence in sequences]
        new = torch.tensor(tokens, device=self.device)
        position_ids = (
            torch.arange(self._length, self._length + new.shape[1], device=self.device) - self._padding[:, None]
        )
        self._length += new.shape[1]
        # Padding, and sequences that have ended in a batch that has not, have no valid position.
        logits = self.model(tokens=new, position_ids=position_ids.clamp(0, self.max_length - 1))[:, -1]
        return logits if self.mesh.vocab_group is None else all_gather(logits, 1, self.mesh.vocab_group)

    def __enter__(self) -> "CachedLogits":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._padding is not None:
            self._hook.remove()
            self._cache.remove()
            self._padding = None
