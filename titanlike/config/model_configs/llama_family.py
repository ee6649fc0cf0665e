"""What the configs of Llama and of the models built like it share: RoPE, RMSNorm, SwiGLU, grouped-query attention.

Does not import torch.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from titanlike.config.base import (
    Positive,
    PositiveFloat,
    Share,
    divisors,
    one_of,
    section,
)
from titanlike.config.model_configs.transformer import NumLayers, TransformerConfig, require


@section
class LlamaFamilyConfig(TransformerConfig):
    """Base of the configs that `models/llama.py` builds. A subclass is a `@section` that adds fields and sets defaults."""

    name: str = ""
    """Architecture. It decides which keys this section has."""
    size: str = ""
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream."""
    num_layers: NumLayers = 4
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
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat = 1000000.0
    """Base of the RoPE frequencies. Larger values give longer wavelengths."""
    tied_head: bool = False
    """Share the weight of the embedding and the LM head, as the small published sizes do."""
    dropout: Share = 0.0
    """Dropout probability after the embedding and after attention and feed-forward. The dropped elements depend on the seed, the
    step and the token, not on the layout."""

    rope_scaling = 1.0  # not a field of all architectures, as head_dim
    rope_original_seq_len = 8192
    rope_local_theta = 0.0
    rope_scaling_type: ClassVar[Literal["llama3", "linear"]] = "llama3"
    """What `rope_scaling` means: of the low frequencies, or of all."""
    embedding_scale: ClassVar[bool] = False
    """Whether the output of the embedding is multiplied by the square root of `dim`."""
    own_head_dim: ClassVar[bool] = False
    """Whether `head_dim` is a field, and does not follow from the other fields."""
    gelu: ClassVar[bool] = False
    """Whether the gate of the feed-forward layers is GELU, in the tanh approximation, and not SiLU."""
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    """The RoPE types of transformers that the fields can express."""
    hf_model_type: ClassVar[str] = ""
    """The `model_type` of transformers."""

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by, besides the usual factor of 1 / sqrt(head_dim) of the scores."""
        return 1.0

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
        vectors = self.num_layers * sum(self.block_vectors().values()) + self.dim
        embedding = 0 if self.tied_head else self.vocab_size * self.dim
        return self.num_matmul_parameters() + vectors + embedding

    def problems(self) -> list[str]:
        problems = self.head_dim_problems()
        if self.num_heads % self.num_kv_heads:
            problems.append(
                f"model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads = {self.num_heads}; "
                f"use {one_of(divisors(self.num_heads)[-8:])}"
            )
        return problems

    def head_dim_problems(self) -> list[str]:
        """Returns a message if the head dimension is not valid."""
        if self.own_head_dim:
            near = f"{self.head_dim - 1} or {self.head_dim + 1}" if self.head_dim > 1 else "2"
            odd = f"model.head_dim = {self.head_dim} is odd, but RoPE rotates pairs; use {near}"
            return [odd] if self.head_dim % 2 else []
        problems = super().problems()
        if not problems and self.head_dim % 2:
            problems.append(
                f"model.dim / model.num_heads = {self.head_dim} is odd, but RoPE rotates pairs; change num_heads"
            )
        return problems

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {"num_kv_heads": self.num_kv_heads, "ffn_dim": self.ffn_dim}

    def to_hugging_face(self) -> dict[str, Any]:
        self.refuse_options()
        scaling = {
            "rope_type": "llama3",
            "factor": self.rope_scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": self.rope_original_seq_len,
        }
        scaling = scaling if self.rope_scaling != 1.0 else {}
        return {
            "architectures": [self.hf_architecture],
            "model_type": self.hf_model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "gelu_pytorch_tanh" if self.gelu else "silu",
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            # transformers 5 reads rope_parameters, 4 the other two: without its form, each falls back to a theta of 10,000.
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, **scaling},
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling or None,
            "tie_word_embeddings": self.tied_head,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }

    def refuse_options(self) -> None:
        """Raises `UserError` for an option that the model of transformers does not have."""

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that a `config.json` describes, except for a head dimension of its own."""
        require(values, attention_dropout=0.0, **({} if cls.gelu else {"hidden_act": "silu"}))
        heads = values["num_attention_heads"]
        return {
            "dim": values["hidden_size"],
            "num_layers": values["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": values.get("num_key_value_heads") or heads,
            "ffn_dim": values["intermediate_size"],
            "vocab_size": values["vocab_size"],
            "max_seq_len": values.get("max_position_embeddings", 2048),
            "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
            "tied_head": values.get("tie_word_embeddings", False),
            **rope_fields(values, cls.rope_types),
        }


def rope_fields(values: Mapping[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
    """Returns the RoPE fields of a `config.json`, which transformers 4 and 5 write in different forms."""
    forms = [values.get(key) for key in ("rope_parameters", "rope_scaling")]
    rope: Mapping[str, Any] = next((form for form in forms if form), {})
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    if values.get("rope_theta", theta) != theta:
        raise ValueError(f"rope_theta = {values['rope_theta']!r}, but rope_parameters has rope_theta = {theta!r}")
    fields = {"rope_theta": float(theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in supported:
        only = " and ".join(map(repr, supported)) + (" are" if len(supported) > 1 else " is")
        raise ValueError(f"the RoPE type {kind!r} is not supported; only {only}")
    if kind == "default":
        return fields
    if kind == "linear":
        return fields | {"rope_scaling": float(rope["factor"])}
    require(rope, low_freq_factor=1.0, high_freq_factor=4.0)
    return fields | {
        "rope_scaling": float(rope["factor"]),
        "rope_original_seq_len": rope["original_max_position_embeddings"],
    }
