"""What only a plan asks of an architecture. Does not import torch."""

from titanlike.models.bert.config import BertConfig
from titanlike.models.common.config import TransformerConfig
from titanlike.models.gemma.config import GemmaConfig
from titanlike.models.olmo2.config import Olmo2Config


def has_qk_norm(model: TransformerConfig) -> bool:
    """Whether queries and keys are normalized."""
    return "attention.k_norm.weight" in model.block_parameters()


def has_unit_offset_norm(model: TransformerConfig) -> bool:
    """Whether RMSNorm multiplies by 1 + weight, in float32."""
    return isinstance(model, GemmaConfig)


def has_post_norms(model: TransformerConfig) -> bool:
    """Whether the outputs of attention and feed-forward are normalized before they are added to the residual stream."""
    return "post_ffn_norm.weight" in model.block_parameters()


def has_norms_after_layers(model: TransformerConfig) -> bool:
    """Whether norms follow attention and feed-forward, before or after the residual connection, and none is before them."""
    return isinstance(model, BertConfig | Olmo2Config)


def latent_matrices(model: TransformerConfig) -> tuple[str, ...]:
    """Returns matrices of a block that do not read the input of attention, but a latent vector that is computed from it."""
    latents = ("attention.wq_b", "attention.wkv_b")
    return tuple(name for name in latents if f"{name}.weight" in model.block_parameters())


def router_parameters(model: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a block's router by name."""
    return {name: spec.shape for name, spec in model.block_parameters().items() if spec.style == "router"}
