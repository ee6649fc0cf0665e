"""Layers that the models share. They are modules even where they have no parameters, so that a transform can replace them.

Shapes: B sequences, T tokens, S keys, D model dimension, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlike.config import UserError
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.models.common.document_mask import Mask, block_mask_attention, masked_attention
from titanlike.utils.modules import without_owner

# Scaled-dot-product-attention backends.
ATTENTION_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class DotProductAttention(nn.Module):
    """Scaled-dot-product attention, causal or bidirectional, or attention with the mask of a `DocumentMask`.

    Args:
        soft_cap: bounds the scores; 0: no bound. Requires a mask.
        window: what the mask limits attention to. It is not applied here; the KV cache makes a mask of its own.
        causal: without a mask, whether a token attends to itself and earlier tokens only.
    """

    def __init__(self, *, soft_cap: float = 0.0, window: int = 0, causal: bool = True) -> None:
        super().__init__()
        self.soft_cap, self.window, self.causal = soft_cap, window, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, sinks: Tensor | None = None) -> Tensor:
        """Returns (B, H, T, E) for queries (B, H, T, E), keys and values (B, K, T, E) and, optionally, attention sinks (H,), which
        require a mask."""
        if mask is None:
            assert not self.soft_cap and sinks is None
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])
        attention: Any = masked_attention if isinstance(mask, Tensor) else block_mask_attention
        return cast(Tensor, attention(q, k, v, mask, self.soft_cap, sinks))


class UnitOffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32: a weight of 0 is the identity, and weight decay pulls towards it."""

    casts_parameters = True

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + self.weight.to(x.dtype).float()  # rounded as the weights that FSDP gathers
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


@contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """Selects the attention backend in this context: one by name or, with `auto`, the first that supports the inputs."""
    is_version = name in ("flash3", "flash4")
    names = ["flash"] if is_version else [name]
    if name == "auto":
        # cuDNN is faster than FlashAttention 2 from Hopper on, and slower on earlier GPUs.
        is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        names = [*(("cudnn", "flash") if is_hopper else ("flash", "cudnn")), "efficient", "math"]
    with ExitStack() as contexts:
        if is_version:
            from titanlike.models.common.flash_attention import flash_attention

            contexts.enter_context(flash_attention(name))
        contexts.enter_context(sdpa_kernel([ATTENTION_BACKENDS[each] for each in names], set_priority=True))
        yield


class LMHead(nn.Linear):
    """The output projection. Given labels, it returns their loss, and the full logits need not exist.

    It casts its weight by itself: the loss accumulates the gradient of a float32 weight in the gradient's own buffer.

    Args:
        soft_cap: bounds the logits; 0: no bound.
    """

    casts_parameters = True
    loss: Any = CrossEntropy()

    def __init__(self, dim: int, vocab_size: int, *, bias: bool = False, soft_cap: float = 0.0, **factory: Any) -> None:
        super().__init__(dim, vocab_size, bias=bias, **factory)
        self.soft_cap = soft_cap

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:  # type: ignore[override]
        return head_output(self, Logits(x, self.weight, self.bias, self.soft_cap), labels, options)


class TiedLMHead(nn.Module):
    """An output projection that uses the weight of the token embedding. It casts its bias by itself.

    Args:
        bias: whether a bias, which is not shared with the embedding, is added to the logits.
        soft_cap: bounds the logits; 0: no bound.
    """

    casts_parameters = True
    loss: Any = CrossEntropy()

    def __init__(self, embedding: nn.Embedding, *, bias: bool = False, soft_cap: float = 0.0) -> None:
        super().__init__()
        self.embedding = (embedding,)  # in a tuple, so that the weight is registered once
        self.bias = nn.Parameter(torch.empty(embedding.num_embeddings)) if bias else None
        self.soft_cap = soft_cap

    @property
    def weight(self) -> Tensor:
        """The weight of the embedding."""
        return self.embedding[0].weight

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        return head_output(self, Logits(x, self.weight, self.bias, self.soft_cap), labels, options)


def set_loss(model: nn.Module, loss: Callable[..., Tensor]) -> None:
    """Sets the loss that a model returns for labels. Its `output` has to be an `LMHead` or a `TiedLMHead`."""
    head: Any = without_owner(model.get_submodule("output"))
    if not isinstance(head, LMHead | TiedLMHead):
        raise UserError(
            f"a loss of your own requires an LMHead or TiedLMHead as model.output, not {type(head).__name__}"
        )
    cast(Any, head).loss = loss


def head_output(head: Any, logits: Logits, labels: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Returns what an LM head returns: its logits (B, T, V), or the loss for labels.

    Args:
        options: of the loss.
    """
    return cast(Tensor, logits.bounded() if labels is None else head.loss(logits, labels, **options))
