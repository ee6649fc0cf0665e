"""T5 1.1 in plain PyTorch: an encoder, and a decoder that attends to its output.

Shapes: B sequences, S tokens of the input, T tokens of the target, D model dimension, H heads, E head dimension, V vocabulary.
"""

import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.init import fill
from titanlike.models.common.layers import DotProductAttention, LMHead
from titanlike.models.t5.config import T5Config


class T5(nn.Module):
    """An encoder-decoder. `layers` has the blocks of the encoder, followed by the decoder's."""

    # None: the embedding and the biases of positions, which both stacks read, stay with the root of FSDP.
    first_stage_modules: ClassVar[tuple[str, ...]] = ()
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "output")

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.tensor_plan = config.tensor_plan()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.encoder_bias = RelativePositionBias(config, bidirectional=True)
        self.decoder_bias = RelativePositionBias(config, bidirectional=False)
        # Dense masks, to which the biases are added; no kernel with gradients of them skips blocks.
        self.encoder_mask = DocumentMask(causal=False, flex=False)
        self.decoder_mask = DocumentMask(always=True, flex=False)
        self.cross_mask = DocumentMask(causal=False, flex=False)
        kinds: list[Any] = [EncoderBlock] * config.num_encoder_layers
        kinds += [DecoderBlock] * (config.num_layers - config.num_encoder_layers)
        self.layers = nn.ModuleDict({str(index): kind(config) for index, kind in enumerate(kinds)})
        self.encoder_norm = norm(config)
        self.encoder_output = nn.Identity()  # named, so that tensor parallelism can gather it once for all blocks
        self.norm = norm(config)
        self.output = LMHead(config.dim, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, V) for inputs (B, S) and what the decoder reads (B, T): the targets, shifted to the right. Given
        labels (B, T), it returns their summed loss.

        Args:
            position_ids: not used: attention knows relative positions only.
            document_ids: the pair of each token of the input (B, S), of which padding has a number of its own; attention does not
                cross pairs. Default: one pair.
            decoder_document_ids: the pair of each token of the target (B, T).
        """
        memory = self.encode(tokens, document_ids)
        return self.decode(decoder_tokens, memory, document_ids, decoder_document_ids, labels)

    def encode(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Returns the output of the encoder (B, S, D) for inputs (B, S)."""
        h = self.tok_embeddings(tokens)  # (B, S, D)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        bias = self.encoder_bias(positions - positions[:, None])  # (1, H, S, S), once, for all blocks
        mask = self.encoder_mask(document_ids)
        bias = bias if mask is None else bias.masked_fill(~cast(Tensor, mask), -math.inf)
        for layer in self._blocks(EncoderBlock):
            h = layer(h, bias)
        return cast(Tensor, self.encoder_output(self.encoder_norm(h)))

    def decode(
        self,
        tokens: Tensor,
        memory: Tensor,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, V) for what the decoder reads (B, T) and the output of the encoder (B, S, D)."""
        h = self.tok_embeddings(tokens)  # (B, T, D)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = cast(Tensor, self.decoder_mask(decoder_document_ids, positions[None]))
        bias = self.decoder_bias(positions - positions[:, None]).masked_fill(~mask, -math.inf)  # (B or 1, H, T, T)
        cross_mask = None
        if document_ids is not None and decoder_document_ids is not None:
            sources = torch.arange(document_ids.shape[1], device=tokens.device)
            cross_mask = self.cross_mask.make(positions, sources, decoder_document_ids, document_ids)
        for layer in self._blocks(DecoderBlock):
            h = layer(h, memory, bias, cross_mask)
        return cast(Tensor, self.output(self.norm(h), labels))

    def _blocks(self, kind: type[nn.Module]) -> list[nn.Module]:
        first = 0 if kind is EncoderBlock else self.config.num_encoder_layers
        last = self.config.num_encoder_layers if kind is EncoderBlock else self.config.num_layers
        return [self.layers[str(index)] for index in range(first, last)]

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value. Scores are not scaled: the weights of queries are smaller instead."""
        std = {"tok_embeddings.weight": 1.0}.get(name, value.shape[-1] ** -0.5)
        if name.endswith("_bias.weight"):
            std = self.config.dim**-0.5
        elif name.endswith("attention.wq.weight"):
            std = (self.config.dim * self.config.head_dim) ** -0.5
        fill(name, value, std, generator)


class RelativePositionBias(nn.Embedding):
    """Biases of attention scores: a number for each head and each bucket of the distance of a key from a query."""

    def __init__(self, config: T5Config, *, bidirectional: bool) -> None:
        super().__init__(config.relative_attention_num_buckets, config.num_heads)
        self.bidirectional = bidirectional
        self.num_buckets, self.max_distance = (
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
        )

    def forward(self, distance: Tensor) -> Tensor:
        """Returns (1, H, T, S) for distances of keys from queries (T, S), negative before them."""
        return super().forward(self.buckets(distance)).permute(2, 0, 1)[None].contiguous()

    def buckets(self, distance: Tensor) -> Tensor:
        """Returns the bucket of each distance. Half of them are for one distance each; the others grow logarithmically. In both
        directions, each direction has half of all."""
        number, first = self.num_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            number //= 2
            first = (distance > 0) * number
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = number // 2
        share = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        large = exact + (share * (number - exact)).long()
        return first + distance.where(distance < exact, large.clamp(max=number - 1))


class EncoderBlock(nn.Module):
    """A pre-norm block with bidirectional attention."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = norm(config)
        self.attention = Attention(config, BiasedAttention())
        self.ffn_norm = norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), mask=bias)
        return h + self.feed_forward(self.ffn_norm(h))


class DecoderBlock(nn.Module):
    """A pre-norm block with causal attention, and attention to the output of the encoder."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = norm(config)
        self.attention = Attention(config, BiasedAttention())
        self.cross_attention_norm = norm(config)
        self.cross_attention = Attention(config, DotProductAttention(causal=False))
        self.ffn_norm = norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor, cross_mask: Tensor | None = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), mask=bias)
        h = h + self.cross_attention(self.cross_attention_norm(h), memory, cross_mask)
        return h + self.feed_forward(self.ffn_norm(h))


class BiasedAttention(DotProductAttention):
    """Attention with biases of the scores in place of a mask, by the kernels that compute gradients of them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, sinks: Tensor | None = None) -> Tensor:
        """Returns (B, H, T, E) for queries (B, H, T, E), keys and values (B, H, S, E), and biases (B or 1, H, T, S)."""
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return super().forward(q, k, v, mask, sinks)


class Attention(nn.Module):
    """Attention to the tokens of the same sequence, or of another one."""

    def __init__(self, config: T5Config, attend: nn.Module) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner = config.num_heads * config.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, inner, bias=False) for _ in range(3))
        self.wo = nn.Linear(inner, config.dim, bias=False)
        self.attend = attend

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        # Take the number of heads from the projections: under tensor parallelism a rank has only some of them.
        source = x if memory is None else memory
        q = self.wq(x) * self.head_dim**0.5  # attention divides by this: scores of T5 are not scaled
        q, k, v = (
            heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for heads in (q, self.wk(source), self.wv(source))
        )  # (B, H, T or S, E)
        return cast(Tensor, self.wo(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2)))  # (B, T, D)


class FeedForward(nn.Module):
    """A feed-forward layer with a gate of GELU in the tanh approximation."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


def norm(config: T5Config) -> nn.RMSNorm:
    """Returns the norm of the architecture."""
    return nn.RMSNorm(config.dim, eps=config.norm_eps)
