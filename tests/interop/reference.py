"""Models of transformers that exported folders make, and what is compared with them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

from tests.interop.models import export_model
from titanlike.interop.weights import open_weights
from titanlike.losses import IGNORE
from titanlike.models.common.config import TransformerConfig

logging.set_verbosity_error()
logging.disable_progress_bar()


def class_of(config: TransformerConfig) -> Any:
    """Returns the class of transformers for a family."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForCausalLM if config.causal else AutoModelForMaskedLM


def load(folder: Path) -> Any:
    kind = class_of(open_weights(folder).config)
    model, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def exported(model: nn.Module, config: TransformerConfig, folder: Path) -> Any:
    """Exports a model, and returns it as transformers reads it."""
    return load(export_model(model, config, folder))


def num_parameters(config: TransformerConfig) -> int:
    """Returns the size of the model that transformers makes of a config."""
    values = config.to_hugging_face()
    with torch.device("meta"):
        model = class_of(config).from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    count = sum(parameter.numel() for parameter in model.parameters())
    if config.is_encoder_decoder and model.lm_head.weight is model.shared.weight:
        count += model.shared.weight.numel()  # transformers 5 unties the head when it reads a folder
    return count


def inputs_of(config: TransformerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns inputs, and the same with the names of transformers. Those of a decoder are shorter than those of its encoder."""
    generator = torch.Generator().manual_seed(1)
    if config.is_encoder_decoder:  # longer than the distances of one bias each
        tokens, decoder = (torch.randint(0, config.vocab_size, (2, n), generator=generator) for n in (130, 90))
        return {"tokens": tokens, "decoder_tokens": decoder}, {"input_ids": tokens, "decoder_input_ids": decoder}
    tokens = torch.randint(0, config.vocab_size, (2, config.max_seq_len), generator=generator)
    return {"tokens": tokens}, {"input_ids": tokens}


def labels_of(config: TransformerConfig, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns labels, some of which are ignored, and those that transformers takes: it shifts those of a causal model."""
    if config.causal and not config.is_encoder_decoder:
        return nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE), tokens
    labels = tokens.flip(1).where(torch.arange(tokens.shape[1]) % 7 == 0, IGNORE)
    return labels, labels


@torch.no_grad()
def difference(model: Any, reference: Any, config: TransformerConfig) -> float:
    """Returns the largest difference of any logit, relative to the largest logit."""
    inputs, theirs = inputs_of(config)
    logits = model(**inputs)
    return float((logits - reference(**theirs).logits).abs().max() / logits.abs().max())
