"""Published sizes in transformers, and folders of encoders. test_transformers.py compares logits and gradients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.models import CONFIGS, ENCODERS, T5, assert_equal_weights, changed_tensors, export_model, model_of
from tests.interop.reference import num_parameters
from titanlike.config import UserError
from titanlike.interop.weights import open_weights
from titanlike.models.bert.config import BertConfig
from titanlike.models.modernbert.config import ModernBertConfig
from titanlike.models.t5.config import T5Config

MODERNBERT = ENCODERS["ModernBERT"]

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours


@pytest.mark.parametrize(
    ("kind", "size", "parameters"),
    [
        (BertConfig, "base", 109_514_298),
        (ModernBertConfig, "base", 149_655_232),
        (T5Config, "small", 76_961_152),
        (T5Config, "base", 247_577_856),
        (T5Config, "large", 783_150_080),
        (T5Config, "xl", 2_849_757_184),
        (T5Config, "xxl", 11_135_332_352),
    ],
)
def test_published_sizes(kind: Any, size: str, parameters: int) -> None:
    config = kind(**{"size": size, **kind.sizes[size]})
    assert num_parameters(config) == config.num_parameters() == parameters
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
    with pytest.raises(UserError, match=r"but cls\.predictions\.decoder\.weight differs from"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("config", "change", "problem"),
    [
        # The first three are keys that an export does not have, or has as an empty list.
        (CONFIGS["Qwen2"], {"use_mrope": True}, "use_mrope = True is not supported; only False is"),
        (CONFIGS["Qwen3-MoE"], {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
        (CONFIGS["Gemma 3"], {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (MODERNBERT, {"layer_types": ["sliding_attention"] * 5}, "layer_types = .* has no fixed pattern"),
        (MODERNBERT, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "the RoPE type 'yarn' is not supported"),
        (T5, {"feed_forward_proj": "relu"}, "feed_forward_proj = 'relu' is not supported; only 'gated-gelu' is"),
        (T5, {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported; only False is"),
    ],
)  # fmt: skip
def test_what_is_of_no_family_is_refused(config: Any, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        config.from_hugging_face(config.to_hugging_face() | change)


def test_a_folder_of_transformers_4_has_other_keys() -> None:
    config = ENCODERS["ModernBERT, pattern"]
    values = config.to_hugging_face()
    for key in ("layer_types", "rope_parameters"):
        del values[key]
    assert ModernBertConfig.from_hugging_face(values) == config
    del values["local_attention"]  # transformers' default
    assert replace(config, sliding_window=128) == ModernBertConfig.from_hugging_face(values)
