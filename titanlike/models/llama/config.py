"""Config of Llama, and the base of the configs of models built like it: RoPE, RMSNorm, SwiGLU, grouped-query attention. Does not
import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from titanlike.config.base import Positive, PositiveFloat, divisors, one_of, section
from titanlike.models.common.config import NumLayers, ParameterSpec, TransformerConfig, require
from titanlike.models.common.rope_config import SCALES_ROPE, odd_problems, rope_fields, rope_scaling

LAYER = "model.layers.*"  # in checkpoints of transformers


@section
class LlamaFamilyConfig(TransformerConfig):
    """Base of the configs that `models/llama/model.py` builds. A subclass is a `@section` that adds fields and sets defaults."""

    name: str = ""
    """Architecture. It decides which keys this section has."""
    size: str = ""
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream."""
    num_layers: NumLayers = 4
    """Number of transformer blocks."""
    num_heads: Positive = 4
    """Number of query heads. Their dimension is `dim / num_heads`, unless there is a key `head_dim`: 64 and 128 are fast, smaller
    ones are slow."""
    num_kv_heads: Positive = 2
    """Number of key/value heads for grouped-query attention. Equal to `num_heads`: multi-head attention."""
    ffn_dim: Positive = 512
    """Hidden dimension of the feed-forward layers."""
    vocab_size: Positive = 320
    """Rows of the embedding and the LM head: at least the tokenizer's vocabulary, preferably a multiple of 64."""
    max_seq_len: Positive = 8192
    """Maximum sequence length that the model supports. `training.seq_len` may not exceed it."""
    rope_theta: PositiveFloat = 1000000.0
    """Base of the RoPE frequencies. Larger values give longer wavelengths."""

    # Fields of those architectures whose published sizes differ in them, as head_dim.
    norm_eps = 1e-6
    tied_head = False
    rope_scaling = 1.0
    rope_original_seq_len = 8192
    rope_local_theta = 0.0
    rope_scaling_type: ClassVar[Literal["llama3", "linear", "yarn"]] = "llama3"
    """What `rope_scaling` means: of the low frequencies, of all, or YaRN."""
    rope_truncate: ClassVar[bool] = True
    """Whether YaRN rounds the indices between which it interpolates."""
    own_head_dim: ClassVar[int] = 0
    """The `head_dim` of a `config.json` that has none, if it is a field, and does not follow from the other fields."""
    gelu: ClassVar[bool] = False
    """Whether the gate of the feed-forward layers is GELU, in the tanh approximation, and not SiLU."""
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    """The RoPE types of transformers that the fields can express."""
    hf_rope_theta: ClassVar[float] = 10000.0
    """The `rope_theta` of a `config.json` that has none."""
    hf_model_type: ClassVar[str] = ""
    """The `model_type` of transformers."""
    hf_fixed: ClassVar[Mapping[str, Any]] = {}
    """Keys of `config.json` of which only this value is supported."""
    hf_unused: ClassVar[Mapping[str, Any]] = {}
    """Further keys to write, whose value in other folders has no effect."""

    def block_parameters(self) -> dict[str, ParameterSpec]:
        return {
            "attention_norm.weight": self.norm("input_layernorm"),
            **self.attention_parameters(),
            "ffn_norm.weight": self.norm("post_attention_layernorm"),
            **self.feed_forward_parameters(),
        }

    def norm(self, hf_name: str) -> ParameterSpec:
        """Returns a norm of the residual stream. Each tensor-parallel rank has the full width of the tokens that it normalizes."""
        return ParameterSpec((self.dim,), "sequence_parallel", f"{LAYER}.{hf_name}.weight")

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        """Returns the parameters of a block's attention."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hf = f"{LAYER}.self_attn"
        return {
            "attention.wq.weight": ParameterSpec((queries, self.dim), "colwise", f"{hf}.q_proj.weight"),
            "attention.wk.weight": ParameterSpec((keys, self.dim), "colwise", f"{hf}.k_proj.weight"),
            "attention.wv.weight": ParameterSpec((keys, self.dim), "colwise", f"{hf}.v_proj.weight"),
            "attention.wo.weight": ParameterSpec((self.dim, queries), "rowwise", f"{hf}.o_proj.weight"),
        }

    def with_qkv_biases(self, parameters: dict[str, ParameterSpec]) -> dict[str, ParameterSpec]:
        """Returns parameters of attention with the biases of queries, keys and values of an architecture that has them."""
        found = {}
        for name, spec in parameters.items():
            found[name] = spec
            if name in ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"):
                bias, stored = (text.replace("weight", "bias") for text in (name, spec.hf_name))
                found[bias] = ParameterSpec(spec.shape[:1], "colwise", stored)
        return found

    def qk_norms(self) -> dict[str, ParameterSpec]:
        """Returns the norms of queries and keys of an architecture that has them. Each rank normalizes its own heads."""
        return {
            f"attention.{name}.weight": ParameterSpec(
                (self.head_dim,), "replicated", f"{LAYER}.self_attn.{name}.weight"
            )
            for name in ("q_norm", "k_norm")
        }

    def feed_forward_parameters(self) -> dict[str, ParameterSpec]:
        """Returns the parameters of a block's feed-forward layer."""
        return self.gated_parameters("feed_forward", self.ffn_dim, "mlp")

    def gated_parameters(self, name: str, hidden: int, hf_name: str) -> dict[str, ParameterSpec]:
        """Returns the parameters of a `FeedForward`, given its names in a block of ours and, if it is there, of transformers."""
        parameters = {}
        for part, hf_part in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            shape, style = ((self.dim, hidden), "rowwise") if part == "w2" else ((hidden, self.dim), "colwise")
            stored = f"{LAYER}.{hf_name}.{hf_part}.weight" if hf_name else ""
            parameters[f"{name}.{part}.weight"] = ParameterSpec(shape, style, stored)
        return parameters

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
            return odd_problems("model.head_dim", self.head_dim)
        return super().problems() or odd_problems("model.dim / model.num_heads", self.head_dim, "change num_heads")

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {"num_kv_heads": self.num_kv_heads, "ffn_dim": self.ffn_dim}

    def to_hugging_face(self) -> dict[str, Any]:
        scaling = rope_scaling(self)
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
            **self.hf_fixed,
            **self.hf_unused,
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, attention_dropout=0.0, **({} if cls.gelu else {"hidden_act": "silu"}), **cls.hf_fixed)
        heads = values["num_attention_heads"]
        own: dict[str, Any] = {"head_dim": values.get("head_dim") or cls.own_head_dim} if cls.own_head_dim else {}
        if not cls.own_head_dim:
            require(values, head_dim=values["hidden_size"] // heads)
        if cls.has_field("norm_eps"):
            own["norm_eps"] = values.get("rms_norm_eps", 1e-6)
        else:
            require(values, rms_norm_eps=cls.norm_eps)
        if cls.has_field("tied_head"):
            own["tied_head"] = values.get("tie_word_embeddings", False)
        else:
            require(values, tie_word_embeddings=cls.tied_head)
        return {
            "dim": values["hidden_size"],
            "num_layers": values["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": values.get("num_key_value_heads") or heads,
            "ffn_dim": values["intermediate_size"],
            "vocab_size": values["vocab_size"],
            "max_seq_len": values.get("max_position_embeddings", 2048),
            **own,
            **rope_fields(values, cls.rope_types, cls.hf_rope_theta, cls.rope_truncate),
        }


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


@section
class LlamaConfig(LlamaFamilyConfig):
    """Llama 3: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""

    name: Literal["llama"] = "llama"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "3-8B", "3-70B", "3.1-8B", "3.1-70B", "3.1-405B", "3.2-1B", "3.2-3B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    tied_head: bool = False
    """Share the weight of the embedding and the LM head."""
    rope_scaling: PositiveFloat = 1.0
    """Llama 3.1's RoPE scaling factor of the low frequencies: 8 for Llama 3.1, 32 for Llama 3.2; 1 disables it."""
    rope_original_seq_len: Annotated[Positive, SCALES_ROPE] = 8192
    """Sequence length of the training before RoPE scaling. Unused if `rope_scaling` is 1."""

    defaults: ClassVar = {"rope_theta": 500000.0}
    hf_architecture = "LlamaForCausalLM"
    hf_model_type = "llama"
    rope_types = ("default", "llama3")
    hf_fixed: ClassVar = {"attention_bias": False, "mlp_bias": False}
    hf_unused: ClassVar = {"pretraining_tp": 1}
    sizes = LLAMA_SIZES
