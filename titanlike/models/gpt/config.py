"""Config of GPT-2 and GPT-3. Does not import torch."""

from collections.abc import Mapping
from typing import Any, Literal

from titanlike.config.base import Positive, Share, section
from titanlike.models.bert.config import LayerNormConfig
from titanlike.models.common.config import NumLayers, ParameterSpec, require

LAYER = "transformer.h.*"  # in checkpoints of transformers

# The four sizes of GPT-2, then GPT-3 with the published width and depth. The published head count of 1.3B, 24, does not
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


@section
class GPTConfig(LayerNormConfig):
    """GPT-2 and GPT-3: learned position embeddings, LayerNorm, GELU, biases, tied LM head."""

    name: Literal["gpt"] = "gpt"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "124M", "355M", "774M", "1.5B", "1.3B", "2.7B", "6.7B", "13B", "175B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream. The feed-forward layers are four times as wide."""
    num_layers: NumLayers = 4
    """Number of transformer blocks."""
    num_heads: Positive = 4
    """Number of attention heads. A head dimension (`dim / num_heads`) of 64 or 128 is fast; smaller ones are slow."""
    vocab_size: Positive = 320
    """Rows of the embedding: at least the tokenizer's vocabulary. 50304 trains faster than GPT-2's 50257."""
    max_seq_len: Positive = 1024
    """Rows of the position embedding. `training.seq_len` may not exceed it."""
    dropout: Share = 0.0
    """Dropout probability after the embedding and after attention and feed-forward. The dropped elements depend on the seed, the
    step and the token, not on the layout."""

    hf_architecture = "GPT2LMHeadModel"
    sizes = GPT_SIZES
    norm_eps = 1e-5
    tied_head = True
    transposed = True

    def first_parameters(self) -> dict[str, ParameterSpec]:
        tokens, positions = (self.vocab_size, self.dim), (self.max_seq_len, self.dim)
        return {
            "tok_embeddings.weight": ParameterSpec(tokens, "vocab_parallel", "transformer.wte.weight"),
            "pos_embeddings.weight": ParameterSpec(positions, "position_embedding", "transformer.wpe.weight"),
        }

    def block_parameters(self) -> dict[str, ParameterSpec]:
        # Checkpoints of transformers have one matrix for queries, keys and values.
        wide, narrow, square = (4 * self.dim, self.dim), (self.dim, 4 * self.dim), (self.dim, self.dim)
        qkv = (self.dim,) * 3
        return {
            **self.norm("attention_norm", f"{LAYER}.ln_1"),
            **self.linear("attention.wq", square, "colwise", f"{LAYER}.attn.c_attn", 0, qkv),
            **self.linear("attention.wk", square, "colwise", f"{LAYER}.attn.c_attn", 1, qkv),
            **self.linear("attention.wv", square, "colwise", f"{LAYER}.attn.c_attn", 2, qkv),
            **self.linear("attention.wo", square, "rowwise", f"{LAYER}.attn.c_proj"),
            **self.norm("ffn_norm", f"{LAYER}.ln_2"),
            **self.linear("feed_forward.w1", wide, "colwise", f"{LAYER}.mlp.c_fc"),
            **self.linear("feed_forward.w2", narrow, "rowwise", f"{LAYER}.mlp.c_proj"),
        }

    def last_parameters(self) -> dict[str, ParameterSpec]:
        head = ParameterSpec((self.vocab_size, self.dim), "lm_head")
        return self.norm("norm", "transformer.ln_f") | {"output.weight": head}

    def to_hugging_face(self) -> dict[str, Any]:
        return {
            "architectures": [self.hf_architecture],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.max_seq_len,
            "n_ctx": self.max_seq_len,
            "n_embd": self.dim,
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.norm_eps,
            "embd_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "attn_pdrop": 0.0,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(
            values,
            activation_function="gelu_new",
            layer_norm_epsilon=cls.norm_eps,
            n_inner=4 * values["n_embd"],
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            tie_word_embeddings=True,
            add_cross_attention=False,
        )
        return {
            "dim": values["n_embd"],
            "num_layers": values["n_layer"],
            "num_heads": values["n_head"],
            "vocab_size": values.get("vocab_size", 50257),
            "max_seq_len": values.get("n_positions", 1024),
        }
