"""Config of ModernBERT. Does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from titanlike.config.base import NonNegative, Positive, PositiveFloat, only_from, section
from titanlike.models.bert.config import EncoderConfig
from titanlike.models.common.config import GLOBAL, LOCAL, NumLayers, ParameterSpec, require
from titanlike.models.common.rope_config import odd_problems, rope_fields, rope_of_type

LAYER = "model.layers.*"  # in checkpoints of transformers

MODERNBERT_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "base": dict(dim=768, num_layers=22, num_heads=12, ffn_dim=1152),
    "large": dict(dim=1024, num_layers=28, num_heads=16, ffn_dim=2624),
}
for _size in ("base", "large"):
    MODERNBERT_SIZES[_size] |= dict(vocab_size=50368, sliding_window=128)


@section
class ModernBertConfig(EncoderConfig):
    """ModernBERT: bidirectional attention with RoPE, of which two of three blocks have a sliding window; LayerNorm before attention
    and feed-forward, GeGLU, no biases. It is trained to predict masked tokens (`program = "mlm"`)."""

    name: Literal["modernbert"] = "modernbert"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "base", "large"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream."""
    num_layers: NumLayers = 4
    """Number of transformer blocks."""
    num_heads: Positive = 4
    """Number of attention heads. A head dimension (`dim / num_heads`) of 64 or 128 is fast; smaller ones are slow."""
    ffn_dim: Positive = 384
    """Hidden dimension of the feed-forward layers."""
    vocab_size: Positive = 320
    """Rows of the embedding: at least the tokenizer's vocabulary and, if the tokenizer has no mask token, one more; preferably a
    multiple of 64."""
    max_seq_len: Positive = 8192
    """Maximum sequence length that the model supports. `training.seq_len` may not exceed it."""
    sliding_window: NonNegative = 32
    """Window of the blocks with sliding-window attention: a token attends to itself, to half of this number of tokens before it,
    and to as many after it. 0 disables it. On GPUs, these blocks use FlexAttention if `training.attention` is `auto`."""
    global_attention_every: Annotated[Positive, only_from("sliding_window", 1)] = 3
    """Every how many blocks one attends to the full sequence: with 3, blocks 0, 3, 6, ... do, and the others use the window. Unused
    if `sliding_window` is 0."""
    rope_theta: PositiveFloat = 160000.0
    """Base of the RoPE frequencies of the blocks that attend to the full sequence."""
    rope_local_theta: Annotated[PositiveFloat, only_from("sliding_window", 1)] = 10000.0
    """Base of the RoPE frequencies of the blocks with sliding-window attention."""

    hf_architecture = "ModernBertForMaskedLM"
    sizes = MODERNBERT_SIZES
    norm_eps = 1e-5
    biases = False
    # The input of the first block is the output of a norm.
    absent_parameters = ("layers.0.attention_norm.weight",)
    # Of the attention of models/llama/model.py.
    rope_scaling, rope_scaling_type = 1.0, "llama3"

    def is_local(self, index: int) -> bool:
        return self.sliding_window > 0 and index % self.global_attention_every > 0

    def first_parameters(self) -> dict[str, ParameterSpec]:
        shape = (self.vocab_size, self.dim)
        return {
            "tok_embeddings.weight": ParameterSpec(shape, "vocab_parallel", "model.embeddings.tok_embeddings.weight"),
            **self.norm("embedding_norm", "model.embeddings.norm"),
        }

    def block_parameters(self) -> dict[str, ParameterSpec]:
        # Checkpoints of transformers have one matrix for queries, keys and values, and one for both inputs of the gate.
        wide, narrow, square = (self.ffn_dim, self.dim), (self.dim, self.ffn_dim), (self.dim, self.dim)
        qkv, both = (self.dim,) * 3, (self.ffn_dim,) * 2
        return {
            **self.norm("attention_norm", f"{LAYER}.attn_norm"),
            **self.linear("attention.wq", square, "colwise", f"{LAYER}.attn.Wqkv", 0, qkv),
            **self.linear("attention.wk", square, "colwise", f"{LAYER}.attn.Wqkv", 1, qkv),
            **self.linear("attention.wv", square, "colwise", f"{LAYER}.attn.Wqkv", 2, qkv),
            **self.linear("attention.wo", square, "rowwise", f"{LAYER}.attn.Wo"),
            **self.norm("ffn_norm", f"{LAYER}.mlp_norm"),
            **self.linear("feed_forward.w1", wide, "colwise", f"{LAYER}.mlp.Wi", 0, both),
            **self.linear("feed_forward.w2", narrow, "rowwise", f"{LAYER}.mlp.Wo"),
            **self.linear("feed_forward.w3", wide, "colwise", f"{LAYER}.mlp.Wi", 1, both),
        }

    def last_parameters(self) -> dict[str, ParameterSpec]:
        return {
            **self.norm("norm", "model.final_norm"),
            **self.linear("transform", (self.dim, self.dim), "sequence_parallel", "head.dense"),
            **self.norm("transform_norm", "head.norm"),
            "output.weight": ParameterSpec((self.vocab_size, self.dim), "lm_head", "decoder.weight"),
            "output.bias": ParameterSpec((self.vocab_size,), "lm_head", "decoder.bias"),
        }

    def problems(self) -> list[str]:
        problems = super().problems()
        problems = problems or odd_problems("model.dim / model.num_heads", self.head_dim, "change num_heads")
        if self.sliding_window % 2:
            problems.append(
                f"model.sliding_window = {self.sliding_window} is odd, but half of it is on either side of a token; use "
                f"{self.sliding_window + 1}"
            )
        return problems + self.window_problems()

    def to_hugging_face(self) -> dict[str, Any]:
        return {
            "architectures": [self.hf_architecture],
            "model_type": "modernbert",
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "hidden_activation": "gelu",
            "max_position_embeddings": self.max_seq_len,
            "local_attention": self.sliding_window or 2 * self.max_seq_len,
            # transformers 5 reads layer_types and rope_parameters, 4 the others.
            "layer_types": self.layer_types(),
            "global_attn_every_n_layers": self.global_attention_every if self.sliding_window else 1,
            "rope_parameters": {
                GLOBAL: {"rope_type": "default", "rope_theta": self.rope_theta},
                LOCAL: {"rope_type": "default", "rope_theta": self.rope_local_theta},
            },
            "global_rope_theta": self.rope_theta,
            "local_rope_theta": self.rope_local_theta,
            **FIXED,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            **dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id")),
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, hidden_activation="gelu", tie_word_embeddings=True, **FIXED)
        num_layers = values["num_hidden_layers"]
        every = values.get("global_attn_every_n_layers", 3)
        thetas = {}
        for field, kind, key, default in (
            ("rope_theta", GLOBAL, "global_rope_theta", 160000.0),
            ("rope_local_theta", LOCAL, "local_rope_theta", 10000.0),
        ):
            thetas[field] = rope_fields(rope_of_type(values, kind, key), ("default",), default)["rope_theta"]
        kinds = values.get("layer_types") or [LOCAL if i % every else GLOBAL for i in range(num_layers)]
        globals_ = [index for index, kind in enumerate(kinds) if kind == GLOBAL]
        every = globals_[1] if len(globals_) > 1 else max(every, len(kinds))
        return {
            "dim": values["hidden_size"],
            "num_layers": num_layers,
            "num_heads": values["num_attention_heads"],
            "ffn_dim": values["intermediate_size"],
            "vocab_size": values["vocab_size"],
            "max_seq_len": values.get("max_position_embeddings", 8192),
            "sliding_window": values.get("local_attention", 128) if LOCAL in kinds else 0,
            "global_attention_every": every if LOCAL in kinds else 3,
            **thetas,
        }


# Keys of `config.json` of which only this value is supported.
FIXED = {
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "decoder_bias": True,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
}
