"""Configs of the model architectures: fields, published sizes, parameter and FLOP counts. Does not import torch.

`size` names a published variant; fields that the recipe gives take precedence over it.
"""

from typing import Any, ClassVar, Literal

from titanlike.config.base import Positive, PositiveFloat, Share, one_of, section

# The fields of each published size that differ from the defaults below.
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

# The four sizes of GPT-2, then those of GPT-3 with the published width and depth. The published head count of 1.3B, 24, does not
# divide its width of 2048; it has 16 here.
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


class TransformerConfig:
    """Base of model configs: what recipe checks, FLOP counts and the planner need to know of an architecture.

    A subclass is a `@section` with the annotated fields, a `name` of type `Literal`, and optionally `size` and `sizes`.
    """

    name: str
    size: str = ""
    dim: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    tied_head: bool = False
    dropout: float = 0.0

    sizes: ClassVar[dict[str, dict[str, Any]]] = {}
    rowwise_matrices: ClassVar[tuple[str, ...]] = ("attention.wo", "feed_forward.w2")
    """Matrices of a block of which a tensor-parallel rank holds some inputs; of all others it holds some outputs."""

    @property
    def head_dim(self) -> int:
        """The dimension of an attention head."""
        return self.dim // self.num_heads

    def block_matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the matrices of a block by name, each as (outputs, inputs)."""
        raise NotImplementedError

    def num_parameters(self) -> int:
        """Returns the number of parameters; an embedding tied to the LM head counts once."""
        raise NotImplementedError

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns all matrices that multiply every token, by full name, including the LM head even if it is tied."""
        block = self.block_matrices().items()
        matrices = {f"layers.{layer}.{name}": size for layer in range(self.num_layers) for name, size in block}
        return matrices | {"output": (self.vocab_size, self.dim)}

    def num_matmul_parameters(self) -> int:
        """Returns the number of parameters that multiply every token: all but lookup tables, norms and biases."""
        return sum(outputs * inputs for outputs, inputs in self.matrices().values())

    def lm_head_cost(self) -> float:
        """Returns the cost of the LM head relative to that of one block."""
        head = self.vocab_size * self.dim
        return head * self.num_layers / (self.num_matmul_parameters() - head)

    def flops_per_token(self, seq_len: int) -> int:
        """Returns FLOPs of the forward and backward pass, without recomputation, with full (not causal) attention, as published
        model FLOPs utilization counts them."""
        return 6 * self.num_matmul_parameters() + 12 * self.num_layers * self.dim * seq_len

    def problems(self) -> list[str]:
        """Returns one message for each inconsistency among the fields."""
        if self.dim % self.num_heads == 0:
            return []
        near = [n for n in range(1, min(self.dim, 2 * self.num_heads) + 1) if self.dim % n == 0]
        return [f"model.num_heads = {self.num_heads} does not divide model.dim = {self.dim}; use {one_of(near[-4:])}"]

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Returns the fields that `parallelism.tensor` must divide."""
        return {"num_heads": self.num_heads, "vocab_size": self.vocab_size}


@section
class LlamaConfig(TransformerConfig):
    """Llama 3: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""

    name: Literal["llama"] = "llama"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "3-8B", "3-70B", "3.1-8B", "3.1-70B", "3.1-405B", "3.2-1B", "3.2-3B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream."""
    num_layers: Positive = 4
    """Number of transformer blocks."""
    num_heads: Positive = 4
    """Number of query heads. A head dimension (`dim / num_heads`) of 64 or 128 is fast; smaller ones are slow."""
    num_kv_heads: Positive = 2
    """Number of key/value heads for grouped-query attention. Equal to `num_heads`: multi-head attention."""
    ffn_dim: Positive = 512
    """Hidden dimension of the feed-forward layers."""
    vocab_size: Positive = 320
    """Rows of the embedding and the LM head: at least the tokenizer's vocabulary, preferably a multiple of 64."""
    max_seq_len: Positive = 8192
    """Maximum sequence length that the model supports. `training.seq_len` may not exceed it."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat = 500000.0
    """Base of the RoPE frequencies. Larger values give longer wavelengths."""
    rope_scaling: PositiveFloat = 1.0
    """Llama 3.1's RoPE scaling factor of the low frequencies: 8 for Llama 3.1, 32 for Llama 3.2; 1 disables it."""
    rope_original_seq_len: Positive = 8192
    """Sequence length of the training before RoPE scaling. Unused if `rope_scaling` is 1."""
    tied_head: bool = False
    """Share the weight of the embedding and the LM head, as the small Llama 3.2 models do."""
    dropout: Share = 0.0
    """Dropout probability after the embedding and after attention and feed-forward. The dropped elements depend on the seed, the
    step and the token, not on the layout."""

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

    def problems(self) -> list[str]:
        problems = super().problems()
        if not problems and self.head_dim % 2:
            problems.append(
                f"model.dim / model.num_heads = {self.head_dim} is odd, but RoPE rotates pairs; change num_heads"
            )
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            problems.append(
                f"model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads = {self.num_heads}; "
                f"use {one_of(divisors)}"
            )
        return problems

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {"num_kv_heads": self.num_kv_heads, "ffn_dim": self.ffn_dim}


@section
class GPTConfig(TransformerConfig):
    """GPT-2 and GPT-3: learned position embeddings, LayerNorm, GELU, biases, tied LM head."""

    name: Literal["gpt"] = "gpt"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "124M", "355M", "774M", "1.5B", "1.3B", "2.7B", "6.7B", "13B", "175B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream. The feed-forward layers are four times as wide."""
    num_layers: Positive = 4
    """Number of transformer blocks."""
    num_heads: Positive = 4
    """Number of attention heads. A head dimension (`dim / num_heads`) of 64 or 128 is fast; smaller ones are slow."""
    vocab_size: Positive = 320
    """Rows of the embedding: at least the tokenizer's vocabulary. 50304 trains faster than GPT-2's 50257."""
    max_seq_len: Positive = 1024
    """Rows of the position embedding. `training.seq_len` may not exceed it."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of LayerNorm."""
    dropout: Share = 0.0
    """Dropout probability after the embedding and after attention and feed-forward. The dropped elements depend on the seed, the
    step and the token, not on the layout."""

    sizes: ClassVar[dict[str, dict[str, Any]]] = GPT_SIZES
    tied_head = True

    def block_matrices(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "attention.wo"), (self.dim, self.dim)) | {
            "feed_forward.w1": (4 * self.dim, self.dim),
            "feed_forward.w2": (self.dim, 4 * self.dim),
        }

    def num_parameters(self) -> int:
        biases_and_norms = self.num_layers * 13 * self.dim + 2 * self.dim
        return self.num_matmul_parameters() + biases_and_norms + self.max_seq_len * self.dim
