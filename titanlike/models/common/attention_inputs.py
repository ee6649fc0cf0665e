"""What the attention of all blocks reads. Some may have sliding-window attention, with rotary angles of their own."""

from typing import Any

import torch
from torch import Tensor

from titanlike.models.common.document_mask import Mask
from titanlike.models.common.rope import rotary_angles

AttentionInputs = tuple[tuple[Tensor, Tensor], Mask | None]  # cosine and sine of the rotary angles, and the mask


def attention_inputs(
    model: Any, tokens: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
) -> dict[str, AttentionInputs]:
    """Returns the rotary angles and the mask of each block, once for all blocks with sliding-window attention, and once for others.
    The masks are the model's `local_mask` and `document_mask`."""
    if position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
    is_local = {name: model.config.is_local(int(name)) for name in model.layers}
    masks = {False: model.document_mask, True: model.local_mask}
    inputs = {
        local: (rotary_angles(model.config, position_ids, local=local), masks[local](document_ids, position_ids))
        for local in set(is_local.values())
    }
    return {name: inputs[local] for name, local in is_local.items()}
