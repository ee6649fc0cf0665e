"""Config of BERT, and the base of the configs of encoders. Does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from titanlike.config.base import Positive, Share, section
from titanlike.models.common.config import NumLayers, ParameterSpec, TransformerConfig, require

EMBEDDINGS, LAYER, HEAD = "bert.embeddings", "bert.encoder.layer.*", "cls.predictions"  # in checkpoints of transformers

BERT_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "base": dict(dim=768, num_layers=12, num_heads=12, ffn_dim=3072, vocab_size=30522, max_seq_len=512),
    "large": dict(dim=1024, num_layers=24, num_heads=16, ffn_dim=4096, vocab_size=30522, max_seq_len=512),
}


class LayerNormConfig(TransformerConfig):
    """Base of the configs of models with LayerNorm, whose norms and linear layers may have biases."""

    biases: ClassVar[bool] = True
    """Whether linear layers and norms have a bias. The decoder of an encoder has one in any case."""
    transposed: ClassVar[bool] = False
    """Whether checkpoints of transformers have matrices as (inputs, outputs)."""

    def linear(
        self, name: str, shape: tuple[int, int], style: str, hf_name: str, part: int = 0, parts: tuple[int, ...] = ()
    ) -> dict[str, ParameterSpec]:
        """Returns the parameters of a linear layer. `part` and `parts` are as in `ParameterSpec`."""
        weight = {f"{name}.weight": ParameterSpec(shape, style, f"{hf_name}.weight", part, parts, self.transposed)}
        bias = {f"{name}.bias": ParameterSpec(shape[:1], style, f"{hf_name}.bias", part, parts)}
        return weight | bias if self.biases else weight

    def norm(self, name: str, hf_name: str) -> dict[str, ParameterSpec]:
        """Returns the parameters of a LayerNorm."""
        kinds = ("weight", "bias") if self.biases else ("weight",)
        return {
            f"{name}.{kind}": ParameterSpec((self.dim,), "sequence_parallel", f"{hf_name}.{kind}") for kind in kinds
        }


class EncoderConfig(LayerNormConfig):
    """Base of the configs of encoders: bidirectional attention, and a head for masked tokens whose decoder is tied to the token
    embedding and has a bias."""

    ffn_dim: int

    causal = False
    tied_head = True

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {"ffn_dim": self.ffn_dim}


@section
class BertConfig(EncoderConfig):
    """BERT: bidirectional attention, learned position embeddings, LayerNorm after each residual connection, GELU, biases. It is
    trained to predict masked tokens (`program = "mlm"`), without the prediction of the next sentence."""

    name: Literal["bert"] = "bert"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "base", "large"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream."""
    num_layers: NumLayers = 4
    """Number of transformer blocks."""
    num_heads: Positive = 4
    """Number of attention heads. A head dimension (`dim / num_heads`) of 64 or 128 is fast; smaller ones are slow."""
    ffn_dim: Positive = 768
    """Hidden dimension of the feed-forward layers."""
    vocab_size: Positive = 320
    """Rows of the embedding: at least the tokenizer's vocabulary and, if the tokenizer has no mask token, one more. 30592 trains
    faster than BERT's 30522."""
    max_seq_len: Positive = 512
    """Rows of the position embedding. `training.seq_len` may not exceed it."""
    num_token_types: Positive = 2
    """Rows of the token type embedding. All tokens are of type 0: the other rows are kept for models that continue with pairs of
    texts."""
    dropout: Share = 0.0
    """Dropout probability after the embedding and after attention and feed-forward; BERT was trained with 0.1. The dropped
    elements depend on the seed, the step and the token, not on the layout."""

    hf_architecture = "BertForMaskedLM"
    # The pooler and the head of the next sentence of published checkpoints, and the copy of the decoder's bias.
    hf_ignored = ("bert.pooler.*", "cls.seq_relationship.*", "bert.embeddings.position_ids", f"{HEAD}.decoder.bias")
    sizes = BERT_SIZES
    norm_eps = 1e-12

    def first_parameters(self) -> dict[str, ParameterSpec]:
        rows = {"tok": self.vocab_size, "pos": self.max_seq_len, "type": self.num_token_types}
        hf_names = {"tok": "word", "pos": "position", "type": "token_type"}
        return {
            f"{kind}_embeddings.weight": ParameterSpec(
                (number, self.dim),
                "vocab_parallel" if kind == "tok" else "position_embedding",
                f"{EMBEDDINGS}.{hf_names[kind]}_embeddings.weight",
            )
            for kind, number in rows.items()
        } | self.norm("embedding_norm", f"{EMBEDDINGS}.LayerNorm")

    def block_parameters(self) -> dict[str, ParameterSpec]:
        wide, narrow, square = (self.ffn_dim, self.dim), (self.dim, self.ffn_dim), (self.dim, self.dim)
        return {
            **self.linear("attention.wq", square, "colwise", f"{LAYER}.attention.self.query"),
            **self.linear("attention.wk", square, "colwise", f"{LAYER}.attention.self.key"),
            **self.linear("attention.wv", square, "colwise", f"{LAYER}.attention.self.value"),
            **self.linear("attention.wo", square, "rowwise", f"{LAYER}.attention.output.dense"),
            **self.norm("attention_norm", f"{LAYER}.attention.output.LayerNorm"),
            **self.linear("feed_forward.w1", wide, "colwise", f"{LAYER}.intermediate.dense"),
            **self.linear("feed_forward.w2", narrow, "rowwise", f"{LAYER}.output.dense"),
            **self.norm("ffn_norm", f"{LAYER}.output.LayerNorm"),
        }

    def last_parameters(self) -> dict[str, ParameterSpec]:
        return {
            **self.linear("transform", (self.dim, self.dim), "sequence_parallel", f"{HEAD}.transform.dense"),
            **self.norm("transform_norm", f"{HEAD}.transform.LayerNorm"),
            "output.weight": ParameterSpec((self.vocab_size, self.dim), "lm_head", f"{HEAD}.decoder.weight"),
            "output.bias": ParameterSpec((self.vocab_size,), "lm_head", f"{HEAD}.bias"),
        }

    @classmethod
    def hf_name_of(cls, stored: str) -> str:
        # Names of the first checkpoints.
        return stored.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")

    def to_hugging_face(self) -> dict[str, Any]:
        return {
            "architectures": [self.hf_architecture],
            "model_type": "bert",
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.ffn_dim,
            "hidden_act": "gelu",
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": self.max_seq_len,
            "type_vocab_size": self.num_token_types,
            "layer_norm_eps": self.norm_eps,
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "pad_token_id": None,
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(
            values,
            hidden_act="gelu",
            layer_norm_eps=cls.norm_eps,
            position_embedding_type="absolute",
            is_decoder=False,
            add_cross_attention=False,
            tie_word_embeddings=True,
        )
        return {
            "dim": values["hidden_size"],
            "num_layers": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "ffn_dim": values["intermediate_size"],
            "vocab_size": values["vocab_size"],
            "max_seq_len": values.get("max_position_embeddings", 512),
            "num_token_types": values.get("type_vocab_size", 2),
        }
