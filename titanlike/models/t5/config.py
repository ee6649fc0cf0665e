"""Config of T5 1.1 and FLAN-T5. Does not import torch."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from titanlike.config.base import NonNegative, Positive, section
from titanlike.models.common.config import NumLayers, ParameterSpec, TransformerConfig, require

BIAS = "SelfAttention.relative_attention_bias.weight"  # of the first block of a stack, in checkpoints of transformers

T5_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "small": dict(dim=512, num_layers=16, num_encoder_layers=8, num_heads=6, ffn_dim=1024),
    "base": dict(dim=768, num_layers=24, num_encoder_layers=12, num_heads=12, ffn_dim=2048),
    "large": dict(dim=1024, num_layers=48, num_encoder_layers=24, num_heads=16, ffn_dim=2816),
    "xl": dict(dim=2048, num_layers=48, num_encoder_layers=24, num_heads=32, ffn_dim=5120),
    "xxl": dict(dim=4096, num_layers=48, num_encoder_layers=24, num_heads=64, ffn_dim=10240),
}
for _size in ("small", "base", "large", "xl", "xxl"):
    T5_SIZES[_size] |= dict(head_dim=64, vocab_size=32128)


@section
class T5Config(TransformerConfig):
    """T5 1.1 and FLAN-T5: an encoder, and a decoder that attends to its output. Relative position biases, GeGLU, RMSNorm, attention
    scores that are not scaled, an untied LM head, no biases of linear layers (`program = "seq2seq"`)."""

    name: Literal["t5"] = "t5"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "small", "base", "large", "xl", "xxl"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    dim: Positive = 192
    """Model dimension: the width of the residual stream."""
    num_layers: NumLayers = 4
    """Number of transformer blocks: the encoder's, followed by the decoder's."""
    num_encoder_layers: Positive = 2
    """Number of the blocks that are the encoder's. The others are the decoder's."""
    num_heads: Positive = 4
    """Number of attention heads."""
    head_dim: Positive = 48
    """Dimension of an attention head. It need not be `dim / num_heads`. 64 and 128 are fast."""
    ffn_dim: Positive = 512
    """Hidden dimension of the feed-forward layers."""
    vocab_size: Positive = 384
    """Rows of the embedding: at least the tokenizer's vocabulary and, if it has no sentinels `<extra_id_0>`, ..., one for each span
    of a sequence; preferably a multiple of 64."""
    max_seq_len: Positive = 512
    """Maximum length of inputs and of targets. Relative positions have no limit: increase it for longer sequences."""
    relative_attention_num_buckets: Positive = 32
    """Number of distances between tokens that have a bias of their own. Large distances share one."""
    relative_attention_max_distance: Positive = 128
    """Distance from which on all share a bias."""
    decoder_start_token: NonNegative = 0
    """Token that the decoder starts with, and that pads inputs: 0 in T5's tokenizers."""

    hf_architecture = "T5ForConditionalGeneration"
    # Other names of the shared embedding, and a bias that the first checkpoints have and no model reads.
    hf_ignored = (
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    )
    sizes = T5_SIZES
    norm_eps = 1e-6
    is_encoder_decoder = True

    def first_parameters(self) -> dict[str, ParameterSpec]:
        bias = (self.relative_attention_num_buckets, self.num_heads)
        return {
            "tok_embeddings.weight": ParameterSpec((self.vocab_size, self.dim), "vocab_parallel", "shared.weight"),
            "encoder_bias.weight": ParameterSpec(bias, "colwise_embedding", f"encoder.block.0.layer.0.{BIAS}"),
            "decoder_bias.weight": ParameterSpec(bias, "colwise_embedding", f"decoder.block.0.layer.0.{BIAS}"),
            **self._norm("encoder_norm", "encoder.final_layer_norm"),
        }

    def parameters_of(self, index: int) -> dict[str, ParameterSpec]:
        is_decoder, index = self.has_cross_attention(index), index % self.num_layers
        block = f"decoder.block.{index - self.num_encoder_layers}" if is_decoder else f"encoder.block.{index}"
        wide, narrow = (self.ffn_dim, self.dim), (self.dim, self.ffn_dim)
        last = f"{block}.layer.{2 if is_decoder else 1}"
        feed_forward = f"{last}.DenseReluDense"
        return {
            **self._norm("attention_norm", f"{block}.layer.0.layer_norm"),
            **self._attention("attention", f"{block}.layer.0.SelfAttention"),
            **(self._norm("cross_attention_norm", f"{block}.layer.1.layer_norm") if is_decoder else {}),
            **(self._attention("cross_attention", f"{block}.layer.1.EncDecAttention") if is_decoder else {}),
            **self._norm("ffn_norm", f"{last}.layer_norm"),
            "feed_forward.w1.weight": ParameterSpec(wide, "colwise", f"{feed_forward}.wi_0.weight"),
            "feed_forward.w2.weight": ParameterSpec(narrow, "rowwise", f"{feed_forward}.wo.weight"),
            "feed_forward.w3.weight": ParameterSpec(wide, "colwise", f"{feed_forward}.wi_1.weight"),
        }

    def has_cross_attention(self, index: int) -> bool:
        """Whether a block attends to the output of the encoder."""
        return index % self.num_layers >= self.num_encoder_layers

    def block_parameters(self) -> dict[str, ParameterSpec]:
        return self.parameters_of(-1)

    def kinds_of_blocks(self) -> list[tuple[int, int]]:
        return [(0, self.num_encoder_layers), (self.num_encoder_layers, self.num_layers - self.num_encoder_layers)]

    def last_parameters(self) -> dict[str, ParameterSpec]:
        return {
            **self._norm("norm", "decoder.final_layer_norm"),
            "output.weight": ParameterSpec((self.vocab_size, self.dim), "lm_head", "lm_head.weight"),
        }

    def tensor_plan(self, blocks: Iterable[int] | None = None) -> dict[str, str]:
        # The output of the encoder is gathered once for the cross-attention of all blocks.
        gathered = ("layers.*.cross_attention", "encoder_output")
        return dict.fromkeys(gathered, "all_gather_input") | super().tensor_plan(blocks)

    def flops_per_token(self, seq_len: int, *, frozen: bool = False, target_len: int = 0) -> int:
        """Returns FLOPs for each token of the input, including the targets (default: as long as the input)."""
        target_len = target_len or seq_len
        (encoder, num_encoder), (decoder, num_decoder) = (
            (sum(outputs * inputs for outputs, inputs in self.block_matrices(first).values()), number)
            for first, number in self.kinds_of_blocks()
        )
        # The keys and values of cross-attention are computed for the tokens of the input.
        keys = 2 * self.num_heads * self.head_dim * self.dim * num_decoder
        matmuls = seq_len * (num_encoder * encoder + keys) + target_len * (num_decoder * decoder - keys)
        matmuls += target_len * self.num_head_parameters()
        pairs = num_encoder * seq_len**2 + num_decoder * (target_len**2 + target_len * seq_len)
        attention = 12 * self.num_heads * self.head_dim * pairs
        return ((4 if frozen else 6) * matmuls + attention) // seq_len

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {"ffn_dim": self.ffn_dim}

    def problems(self) -> list[str]:
        problems = []
        if self.num_encoder_layers >= self.num_layers:
            problems.append(
                f"model.num_encoder_layers = {self.num_encoder_layers} leaves no block of model.num_layers = {self.num_layers} for "
                f"the decoder; set model.num_layers = {2 * self.num_encoder_layers}"
            )
        if self.relative_attention_num_buckets % 4 or self.relative_attention_max_distance <= (
            self.relative_attention_num_buckets // 2
        ):
            problems.append(
                f"model.relative_attention_num_buckets = {self.relative_attention_num_buckets} has to be a multiple of 4 and less "
                f"than 2 x model.relative_attention_max_distance = {2 * self.relative_attention_max_distance}; use 32 and 128"
            )
        if self.decoder_start_token >= self.vocab_size:
            problems.append(
                f"model.decoder_start_token = {self.decoder_start_token} is not in the vocabulary of model.vocab_size = "
                f"{self.vocab_size}; use 0"
            )
        return problems

    def to_hugging_face(self) -> dict[str, Any]:
        return {
            "architectures": [self.hf_architecture],
            "model_type": "t5",
            "vocab_size": self.vocab_size,
            "d_model": self.dim,
            "d_kv": self.head_dim,
            "d_ff": self.ffn_dim,
            "num_layers": self.num_encoder_layers,
            "num_decoder_layers": self.num_layers - self.num_encoder_layers,
            "num_heads": self.num_heads,
            "n_positions": self.max_seq_len,
            "relative_attention_num_buckets": self.relative_attention_num_buckets,
            "relative_attention_max_distance": self.relative_attention_max_distance,
            "layer_norm_epsilon": self.norm_eps,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "is_encoder_decoder": True,
            "tie_word_embeddings": False,
            **self.generation_tokens,
        }

    @property
    def generation_tokens(self) -> dict[str, int]:
        """Tokens that generation needs and that the tokenizer does not name, by their keys in `generation_config.json`."""
        return dict.fromkeys(("decoder_start_token_id", "pad_token_id"), self.decoder_start_token)

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, is_encoder_decoder=True, layer_norm_epsilon=cls.norm_eps)
        activation = values.get("feed_forward_proj", "relu")
        if activation != "gated-gelu":
            raise ValueError(
                f"feed_forward_proj = {activation!r} is not supported; only 'gated-gelu' is, of T5 1.1 and FLAN-T5"
            )
        # transformers 5 replaces the key that says whether the head is tied, and its input scaled, by another one.
        if values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True)):
            raise ValueError("tie_word_embeddings = True is not supported; only False is, of T5 1.1 and FLAN-T5")
        num_encoder = values["num_layers"]
        pad = values.get("pad_token_id") or 0
        return {
            "dim": values["d_model"],
            "num_layers": num_encoder + (values.get("num_decoder_layers") or num_encoder),
            "num_encoder_layers": num_encoder,
            "num_heads": values["num_heads"],
            "head_dim": values["d_kv"],
            "ffn_dim": values["d_ff"],
            "vocab_size": values["vocab_size"],
            "max_seq_len": values.get("n_positions") or 512,
            "relative_attention_num_buckets": values.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": values.get("relative_attention_max_distance", 128),
            "decoder_start_token": pad
            if values.get("decoder_start_token_id") is None
            else values["decoder_start_token_id"],
        }

    def _norm(self, name: str, hf_name: str) -> dict[str, ParameterSpec]:
        return {f"{name}.weight": ParameterSpec((self.dim,), "sequence_parallel", f"{hf_name}.weight")}

    def _attention(self, name: str, hf_name: str) -> dict[str, ParameterSpec]:
        inner = self.num_heads * self.head_dim
        return {
            **{
                f"{name}.w{kind}.weight": ParameterSpec((inner, self.dim), "colwise", f"{hf_name}.{kind}.weight")
                for kind in "qkv"
            },
            f"{name}.wo.weight": ParameterSpec((self.dim, inner), "rowwise", f"{hf_name}.o.weight"),
        }
