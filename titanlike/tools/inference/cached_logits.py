"""Logits of a model with a KV cache.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.distributed.autograd_collectives import all_gather
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.registry import blocks
from titanlike.parallelisms.mesh import Mesh
from titanlike.tools.inference.kv_cache import apply_kv_cache


class CachedLogits:
    """Computes the new tokens of each sequence only, with a KV cache. For a model whose activations are not sharded.

    The first call takes the prompts, which it pads on the left; each later one takes sequences that are one token longer. The cache
    holds at most `max_new_tokens` after the prompts, and no more than fill `max_length`, the context, of the shortest one. After
    the text of a single prompt, `resume` allows another one.
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
            self._num_padded, self._length = [longest - len(sequence) for sequence in sequences], 0
            self._padding = torch.tensor(self._num_padded, device=self.device)
            self._cache = apply_kv_cache(
                blocks(self.model),
                batch_size=len(sequences),
                max_length=longest + self._num_new_tokens(shortest),
                document_masks=[module for module in self.model.modules() if isinstance(module, DocumentMask)],
            )
            self._cache.start(self._padding)
            # The model has no need to compute the logits of a prompt.
            head = self.model.get_submodule("output")
            self._hook = head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:], *args[1:]))
        self._sequences = sequences
        tokens = [
            [*[0] * max(0, padded - self._length), *sequence[max(0, self._length - padded) :]]
            for padded, sequence in zip(self._num_padded, sequences, strict=True)
        ]
        new = torch.tensor(tokens, device=self.device)
        position_ids = (
            torch.arange(self._length, self._length + new.shape[1], device=self.device) - self._padding[:, None]
        )
        self._length += new.shape[1]
        # Padding, and sequences that have ended in a batch that has not, have no valid position.
        logits = self.model(tokens=new, position_ids=position_ids.clamp(0, self.max_length - 1))[:, -1]
        return logits if self.mesh.vocab_group is None else all_gather(logits, 1, self.mesh.vocab_group)

    def resume(self, prompt: Sequence[int]) -> None:
        """Prepares for another prompt after the text of a single one. Their common start is not computed again."""
        if self._padding is None:
            return
        [before] = self._sequences
        cached = before[: self._length]
        # The last token of the prompt is computed in any case, for its logits.
        is_equal = [one == other for one, other in zip(cached, prompt[:-1], strict=False)]
        self._length = [*is_equal, False].index(False)
        self._cache.resize(self._length, len(prompt) + self._num_new_tokens(len(prompt)))

    def _num_new_tokens(self, prompt_length: int) -> int:
        return min(self.max_new_tokens, self.max_length - prompt_length)

    def __enter__(self) -> "CachedLogits":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._padding is not None:
            self._hook.remove()
            self._cache.remove()
            self._padding = None


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Raises `UserError` if a prompt leaves no room for a token in a model's context."""
    for number, tokens in enumerate(prompts, start=1):
        if len(tokens) >= max_length:
            raise UserError(
                f"prompt {number} has {len(tokens)} tokens, but the context of the model is {max_length} tokens "
                f"(model.max_seq_len); shorten it to {max_length - 1} tokens or less"
            )
