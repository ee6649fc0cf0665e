"""The shapes of the models as data: their fields, their published sizes, and what they cost.

No torch here: a recipe is checked, priced and refused from these numbers alone. A section of the recipe names a
`size`; every field it also gives wins over that size.
"""

from typing import Any, ClassVar, Literal

from titanlike.config.base import Positive, PositiveFloat, Share, section

# What each size changes from the defaults below.
LLAMA_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "3-8B": dict(
        dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256, max_seq_len=8192
    ),
    "3-70B": dict(
        dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, vocab_size=128256, max_seq_len=8192
    ),
}
LLAMA_SIZES["3.1-8B"] = LLAMA_SIZES["3-8B"] | dict(max_seq_len=131072, rope_scaling=8.0)
LLAMA_SIZES["3.1-70B"] = LLAMA_SIZES["3-70B"] | dict(max_seq_len=131072, rope_scaling=8.0)
LLAMA_SIZES["3.1-405B"] = LLAMA_SIZES["3.1-70B"] | dict(dim=16384, num_layers=126, num_heads=128, ffn_dim=53248)
LLAMA_SIZES["3.2-1B"] = LLAMA_SIZES["3.1-8B"] | dict(
    dim=2048, num_layers=16, ffn_dim=8192, rope_scaling=32.0, tied_head=True
)
LLAMA_SIZES["3.2-3B"] = LLAMA_SIZES["3.2-1B"] | dict(dim=3072, num_layers=28, num_heads=24)

# GPT-2's four, then GPT-3's by their published width and depth (1.3B with 16 heads: the printed 24 do not divide 2048).
GPT_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "124M": dict(dim=768, num_layers=12, num_heads=12, vocab_size=50257, max_seq_len=1024),
    "355M": dict(dim=1024, num_layers=24, num_heads=16, vocab_size=50257, max_seq_len=1024),
    "774M": dict(dim=1280, num_layers=36, num_heads=20, vocab_size=50257, max_seq_len=1024),
    "1.5B": dict(dim=1600, num_layers=48, num_heads=25, vocab_size=50257, max_seq_len=1024),
    "1.3B": dict(dim=2048, num_layers=24, num_heads=16, vocab_size=50257, max_seq_len=2048),
    "2.7B": dict(dim=2560, num_layers=32, num_heads=32, vocab_size=50257, max_seq_len=2048),
    "6.7B": dict(dim=4096, num_layers=32, num_heads=32, vocab_size=50257, max_seq_len=2048),
    "13B": dict(dim=5120, num_layers=40, num_heads=40, vocab_size=50257, max_seq_len=2048),
    "175B": dict(dim=12288, num_layers=96, num_heads=96, vocab_size=50257, max_seq_len=2048),
}


class _Transformer:
    """What both shapes can be asked."""

    dim: int
    num_layers: int
    num_heads: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def block_matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a block by name, each as (outputs, inputs)."""
        raise NotImplementedError

    def matrices(self) -> dict[str, tuple[int, int]]:
        """All that multiplies every token, by name in the whole model: the blocks' matrices, and the head even when it is
        the embedding's table."""
        blocks = self.block_matrices().items()
        found = {f"layers.{layer}.{name}": size for layer in range(self.num_layers) for name, size in blocks}
        return found | {"output": (self.vocab_size, self.dim)}

    def num_parameters(self) -> int:
        """Parameters, the embedding counted once when the head is tied to it."""
        raise NotImplementedError

    def num_matmul_parameters(self) -> int:
        """Parameters that multiply every token: all but the look-up tables, and the head even when it is tied."""
        return sum(outputs * inputs for outputs, inputs in self.matrices().values())

    def head_in_blocks(self) -> float:
        """What the head costs, measured in blocks."""
        head = self.vocab_size * self.dim
        return head * self.num_layers / (self.num_matmul_parameters() - head)

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, two operations a multiply-add, attention counted in full as published figures do."""
        return 6 * self.num_matmul_parameters() + 12 * self.num_layers * self.dim * seq_len


@section
class LlamaConfig(_Transformer):
    """Llama 3: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases."""

    name: Literal["llama"] = "llama"
    """The architecture. It decides which fields this section has."""
    size: Literal["debug", "3-8B", "3-70B", "3.1-8B", "3.1-70B", "3.1-405B", "3.2-1B", "3.2-3B"] = "debug"
    """A published size, which sets every field below that the recipe does not."""
    dim: Positive = 192
    """Width of the residual stream."""
    num_layers: Positive = 4
    """Number of blocks."""
    num_heads: Positive = 4
    """Query heads. `dim / num_heads` is the head's width: 64 or 128 are fast, smaller ones slow."""
    num_kv_heads: Positive = 2
    """Key and value heads, shared by groups of query heads. Equal to `num_heads`: no grouping."""
    ffn_dim: Positive = 512
    """Width of the feed-forward's hidden layer."""
    vocab_size: Positive = 320
    """Rows of the embedding and of the head: at least the tokenizer's vocabulary, better a multiple of 64."""
    max_seq_len: Positive = 8192
    """The longest sequence that the model is meant for. `training.seq_len` may not pass it."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm, against a division by zero."""
    rope_theta: PositiveFloat = 500000.0
    """Base of the rotary frequencies. Larger turns slower and reaches further."""
    rope_scaling: PositiveFloat = 1.0
    """Llama 3.1's stretch of the low rotary frequencies: 8 for 3.1, 32 for 3.2's small models; 1 turns it off."""
    rope_original_seq_len: Positive = 8192
    """The length trained at before the stretch. Unused while `rope_scaling` is 1."""
    tied_head: bool = False
    """Use the embedding as the head's weight, as Llama 3.2's small models do."""
    dropout: Share = 0.0
    """Share of the stream that is zeroed after the embedding and after each half of a block, while training. What is zeroed
    follows from the seed, the step and the token, not from the layout."""

    sizes: ClassVar[dict[str, dict[str, Any]]] = LLAMA_SIZES

    def block_matrices(self) -> dict[str, tuple[int, int]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "attention.wq": (queries, self.dim),
            "attention.wk": (keys, self.dim),
            "attention.wv": (keys, self.dim),
            "attention.wo": (self.dim, queries),
            "feed_forward.w1": (self.ffn_dim, self.dim),
            "feed_forward.w2": (self.dim, self.ffn_dim),
            "feed_forward.w3": (self.ffn_dim, self.dim),
        }

    def num_parameters(self) -> int:
        norms = (2 * self.num_layers + 1) * self.dim
        embedding = 0 if self.tied_head else self.vocab_size * self.dim
        return self.num_matmul_parameters() + norms + embedding


@section
class GPTConfig(_Transformer):
    """GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases, the head tied to the embedding."""

    name: Literal["gpt"] = "gpt"
    """The architecture. It decides which fields this section has."""
    size: Literal["debug", "124M", "355M", "774M", "1.5B", "1.3B", "2.7B", "6.7B", "13B", "175B"] = "debug"
    """A published size, which sets every field below that the recipe does not."""
    dim: Positive = 192
    """Width of the residual stream. The feed-forward is four times as wide."""
    num_layers: Positive = 4
    """Number of blocks."""
    num_heads: Positive = 4
    """Attention heads. `dim / num_heads` is the head's width: 64 or 128 are fast, smaller ones slow."""
    vocab_size: Positive = 320
    """Rows of the embedding: at least the tokenizer's vocabulary. 50304 trains GPT-2 faster than its own 50257."""
    max_seq_len: Positive = 1024
    """Rows of the position table. `training.seq_len` may not pass it."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in LayerNorm, against a division by zero."""
    dropout: Share = 0.0
    """Share of the stream that is zeroed after the embedding and after each half of a block, while training. What is zeroed
    follows from the seed, the step and the token, not from the layout."""

    sizes: ClassVar[dict[str, dict[str, Any]]] = GPT_SIZES
    tied_head: ClassVar[bool] = True

    def block_matrices(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "attention.wo"), (self.dim, self.dim)) | {
            "feed_forward.w1": (4 * self.dim, self.dim),
            "feed_forward.w2": (self.dim, 4 * self.dim),
        }

    def num_parameters(self) -> int:
        biases_and_norms = self.num_layers * 13 * self.dim + 2 * self.dim
        return self.num_matmul_parameters() + biases_and_norms + self.max_seq_len * self.dim
