"""Encoders against transformers: counts, logits, gradients, folders in both directions, and errors that the comparison finds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM
from transformers.utils import logging

from tests.interop.models import ENCODERS, assert_equal_weights, changed_tensors, export_model, model_of
from titanlike.config import UserError
from titanlike.interop.weights import open_weights
from titanlike.models.base_config import TransformerConfig
from titanlike.models.bert_config import BertConfig
from titanlike.models.loss import IGNORE
from titanlike.models.modernbert_config import ModernBertConfig

logging.set_verbosity_error()
logging.disable_progress_bar()

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours


def load(folder: Path) -> Any:
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def tokens_of(config: TransformerConfig) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (2, config.max_seq_len), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(model: Any, reference: Any, config: TransformerConfig) -> float:
    """Returns the largest difference of any logit, relative to the largest logit."""
    tokens = tokens_of(config)
    logits = model(tokens=tokens)
    return float((logits - reference(tokens).logits).abs().max() / logits.abs().max())


@pytest.mark.parametrize("config", ENCODERS.values(), ids=list(ENCODERS))
def test_logits_and_gradients_equal_those_of_transformers(config: TransformerConfig, tmp_path: Path) -> None:
    model = model_of(config)
    reference = load(export_model(model, config, tmp_path / "hf"))
    # Rotary angles are in float32 in both: in float64, ModernBERT still differs by 4e-6.
    assert difference(model, reference, config) < 2e-5
    assert sum(parameter.numel() for parameter in reference.parameters()) == config.num_parameters()
    reference.save_pretrained(tmp_path / "saved")
    assert_equal_weights(tmp_path / "saved", model, config)
    tokens = tokens_of(config)
    labels = tokens.flip(1).where(torch.arange(tokens.shape[1]) % 7 == 0, IGNORE)
    loss = model(tokens, labels=labels) / (labels != IGNORE).sum()
    loss.backward()
    expected = reference(tokens, labels=labels).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    stored: dict[str, torch.Tensor] = {name: value.grad for name, value in reference.named_parameters()}
    compared = 0
    for name, spec in config.parameters().items():
        part = stored[spec.hf_name].chunk(spec.num_parts)[spec.part]
        found = model.get_parameter(name).grad
        # The exact gradient of a bias of keys is 0: it cancels in the softmax.
        assert found is not None and float((found - part).abs().max()) < 2e-5 * float(part.abs().max()) + 2e-6, name
        compared += found.numel()
    assert compared == config.num_parameters()


@pytest.mark.parametrize(
    ("kind", "size", "parameters"),
    [
        (BertConfig, "base", 109_514_298),
        (BertConfig, "large", 335_174_458),
        (ModernBertConfig, "base", 149_655_232),
        (ModernBertConfig, "large", 395_881_664),
    ],
)
def test_published_sizes(kind: Any, size: str, parameters: int) -> None:
    config = kind(size=size, **kind.sizes[size])
    values = config.to_hugging_face()
    with torch.device("meta"):
        reference = AutoModelForMaskedLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert sum(parameter.numel() for parameter in reference.parameters()) == config.num_parameters() == parameters
    assert kind.from_hugging_face(config.to_hugging_face()) == config


def test_a_published_folder_of_bert(tmp_path: Path) -> None:
    """It has the names of the first version, the pooler, the head of the next sentence, and a copy of the tied decoder."""
    config = ENCODERS["BERT"]
    model = model_of(config)
    folder = export_model(model, config, tmp_path / "hf")
    (folder / "model.safetensors.index.json").unlink()

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("weight", "gamma").replace("bias", "beta")] = tensors.pop(name)
        tensors["bert.pooler.dense.weight"] = torch.zeros(64, 64)
        tensors["cls.seq_relationship.bias"] = torch.zeros(2)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()

    changed_tensors(folder, as_published)
    [file] = folder.glob("*.safetensors")
    file.rename(folder / "model.safetensors")
    assert_equal_weights(folder, model, config)
    # A decoder that is not tied would be another model.
    changed_tensors(folder, lambda tensors: tensors["cls.predictions.decoder.weight"][3, 5].add_(1.0))
    with pytest.raises(
        UserError, match=r"but cls\.predictions\.decoder\.weight differs from bert\.embeddings\.word_emb"
    ):
        open_weights(folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"norm_bias": True}, "norm_bias = True is not supported; only False is"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types = .* has no fixed pattern"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "the RoPE type 'yarn' is not supported"),
    ],
)
def test_what_is_no_modernbert_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ModernBertConfig.from_hugging_face(ENCODERS["ModernBERT"].to_hugging_face() | change)


def test_a_folder_of_transformers_4_has_other_keys() -> None:
    config = ENCODERS["ModernBERT, pattern"]
    values = config.to_hugging_face()
    for key in ("layer_types", "rope_parameters"):
        del values[key]
    assert ModernBertConfig.from_hugging_face(values) == config
