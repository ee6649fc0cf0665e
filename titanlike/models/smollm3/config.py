"""SmolLM3: Llama in which some blocks have no rotary embeddings. Does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from titanlike.config.base import NonNegative, section
from titanlike.models.common.config import require
from titanlike.models.llama.config import LlamaFamilyConfig

SMOLLM3_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "3B": dict(dim=2048, num_layers=36, num_heads=16, num_kv_heads=4, ffn_dim=11008, vocab_size=128256),
}


@section
class SmolLM3Config(LlamaFamilyConfig):
    """SmolLM3: Llama with a tied head, in which some blocks have no rotary embeddings."""

    name: Literal["smollm3"] = "smollm3"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "3B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    no_rope_every: NonNegative = 4
    """Every how many blocks one has no rotary embeddings: with 4, blocks 3, 7, 11, ... have none. 0: all have them."""

    defaults: ClassVar = {"rope_theta": 5000000.0, "max_seq_len": 65536}
    tied_head = True
    hf_architecture = "SmolLM3ForCausalLM"
    hf_model_type = "smollm3"
    hf_fixed: ClassVar = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    hf_unused: ClassVar = {"sliding_window": None, "pad_token_id": None}  # by default, 128004
    sizes = SMOLLM3_SIZES

    def has_rope(self, index: int) -> bool:
        """Whether a block has rotary embeddings."""
        return not self.no_rope_every or (index + 1) % self.no_rope_every > 0

    def to_hugging_face(self) -> dict[str, Any]:
        has_rope = [int(self.has_rope(index)) for index in range(self.num_layers)]
        return super().to_hugging_face() | {
            "no_rope_layers": has_rope, "no_rope_layer_interval": self.no_rope_every or 1,
        }  # fmt: skip

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        number, every = values["num_hidden_layers"], values.get("no_rope_layer_interval", 4)
        has_rope = [int((index + 1) % every > 0) for index in range(number)]
        found = values.get("no_rope_layers") or has_rope
        if found != has_rope:
            require({"no_rope_layers": found}, no_rope_layers=[1] * number)
            every = 0
        return super().fields_from_hugging_face(values) | {"no_rope_every": every}
