"""Initial weights, and embeddings in bfloat16, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.interop.models import CONFIGS, T5, export_model, model_of
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours


def test_initial_weights_of_t5_have_the_scale_of_those_of_transformers() -> None:
    """But for the head, which it initializes as the embedding, to which it is tied in its first models."""
    values = T5.to_hugging_face()
    reference = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    expected = dict(reference.named_parameters())
    model = build_model(T5)
    initialize(model, torch.device("cpu"), 0)
    scales = {name: value.square().mean().sqrt().item() for name, value in model.named_parameters()}
    assert scales.pop("output.weight") == pytest.approx(T5.dim**-0.5, rel=0.05)
    for name, scale in scales.items():
        other = expected[T5.parameters()[name].hf_name].square().mean().sqrt().item()
        assert scale == pytest.approx(other, rel=0.5 if name.endswith("_bias.weight") else 0.05), name


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3"])
def test_embeddings_are_scaled_in_bfloat16(name: str, tmp_path: Path) -> None:
    """By a number that is rounded, too."""
    config, first = CONFIGS[name], list[Tensor]()
    model = model_of(config).bfloat16()
    export_model(model, config, tmp_path / "hf")
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    model.get_submodule("layers.0").register_forward_pre_hook(lambda _, inputs: first.append(inputs[0]))
    tokens = torch.arange(8)[None]
    model(tokens)
    assert torch.equal(first[0], reference(tokens, output_hidden_states=True).hidden_states[0])
