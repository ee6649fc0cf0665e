"""Families with parts of their own under every kind of layout: parity with one process.

OLMo-2 has norms over all queries and keys of a token, of which tensor-parallel ranks have a part. Qwen2 has biases of queries,
keys and values. Qwen3 has norms of queries and keys, which are replicated over tensor-parallel ranks. Gemma has post-norms, soft
caps of scores and logits, and sliding windows, which are shorter than the sequences here. The encoders
have bidirectional attention, a head with a transform and a bias, and masked tokens; ModernBERT has windows on both sides.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import (
    COMPILED,
    DEFAULT,
    DOCUMENTS,
    EVERY,
    FULL,
    LORA,
    MUON,
    SELECTIVE,
    SLOW,
    Parity,
    Row,
    parallelism_of,
    rows_of,
)
from tests.pool import Ranks
from tests.training import (
    BERT,
    DEEPSEEK_V3,
    GEMMA2,
    GEMMA3,
    GPT_,
    GPT_OSS,
    MISTRAL,
    MODERNBERT,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SHARED_EXPERTS,
    SMOLLM3,
    deep,
    full_tensor,
    mesh_of,
    tiny,
)
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.models.common.init import initialize
from titanlike.models.common.layers import set_loss
from titanlike.models.registry import build_model
from titanlike.parallelisms.tensor import apply_tensor

# The parameters of each block, or of an encoder's head, that only these families have. They are constants before the first step.
OWN: dict[str, tuple[str, ...]] = {
    "mistral": (),
    "smollm3": (),
    "olmo2": ("q_norm.weight", "k_norm.weight"),
    "phi3": (),
    "qwen2": ("wq.bias", "wk.bias", "wv.bias"),
    "qwen3": ("q_norm.weight", "k_norm.weight"),
    "gemma": ("post_attention_norm.weight", "post_ffn_norm.weight"),
    "bert": ("embedding_norm.bias", "transform_norm.bias", "transform.bias", "output.bias"),
    "modernbert": ("embedding_norm.weight", "transform_norm.weight", "output.bias"),
}

TP, CP, CP_TP, TP_FSDP = dict(tensor=2), dict(context=2), dict(context=2, tensor=2), dict(tensor=2, shard=2)
PP_TP_FSDP, ZBV_TP = dict(pipeline=2, tensor=2, shard=2), dict(pipeline=2, pipeline_schedule="zbv", tensor=2)
# Each option of Gemma 2 by itself.
PLAIN = replace(GEMMA2, logit_soft_cap=0.0, attention_soft_cap=0.0, sliding_window=0)

CASES: dict[str, Row] = {
    "Mistral, CP x TP": (SLOW, MISTRAL, CP_TP, 4, {}),
    "Mistral, TP x FSDP, compiled, selective": (EVERY, MISTRAL, TP_FSDP, 2, COMPILED | SELECTIVE),
    "SmolLM3, PP zbv x TP": (SLOW, SMOLLM3, ZBV_TP, 2, {}),
    "SmolLM3, TP x FSDP, compiled, selective": (EVERY, SMOLLM3, TP_FSDP, 2, COMPILED | SELECTIVE),
    "OLMo-2, TP": (DEFAULT, OLMO2, TP, 4, {}),
    "OLMo-2, TP, compiled, selective": (SLOW, OLMO2, TP, 4, COMPILED | SELECTIVE),
    "OLMo-2, TP x FSDP, LoRA": (EVERY, OLMO2, TP_FSDP, 2, LORA),
    "Phi-3, CP x TP": (SLOW, PHI3, CP_TP, 4, {}),
    "Phi-3, TP x FSDP, Muon": (EVERY, PHI3, TP_FSDP, 2, {"optimizer": MUON}),
    "Qwen2, TP": (DEFAULT, QWEN2, TP, 4, {}),
    "Qwen2, TP x FSDP, compiled, selective": (EVERY, QWEN2, TP_FSDP, 2, COMPILED | SELECTIVE),
    "Qwen2, TP x FSDP, LoRA": (EVERY, QWEN2, TP_FSDP, 2, LORA),
    "Qwen3, TP": (DEFAULT, QWEN3, TP, 4, {}),
    "Qwen3, TP x FSDP, Muon": (SLOW, QWEN3, TP_FSDP, 2, {"optimizer": MUON}),
    "Gemma 2, CP": (DEFAULT, GEMMA2, CP, 4, {}),
    "Gemma 2, PP 1f1b x TP x FSDP": (SLOW, GEMMA2, PP_TP_FSDP, 1, {}),
    "Gemma 2, TP, compiled, selective": (SLOW, GEMMA2, TP, 4, COMPILED | SELECTIVE),
    "Gemma 2 with capped logits, CP x TP": (EVERY, replace(PLAIN, logit_soft_cap=0.1), CP_TP, 4, {}),
    "Gemma 2 with capped scores, CP x TP": (EVERY, replace(PLAIN, attention_soft_cap=0.02), CP_TP, 4, {}),
    "Gemma 2 with windows, CP x TP": (EVERY, replace(PLAIN, sliding_window=11), CP_TP, 4, {}),
    "Gemma 3, PP zbv x TP": (SLOW, GEMMA3, ZBV_TP, 2, {}),
    "BERT, TP": (DEFAULT, BERT, TP, 4, {}),
    "BERT, CP": (EVERY, BERT, CP, 4, {}),
    "BERT, PP zbv x TP": (SLOW, BERT, ZBV_TP, 2, {}),
    "BERT, TP x FSDP, documents, full checkpointing": (SLOW, BERT, TP_FSDP, 2, DOCUMENTS | FULL),
    "ModernBERT, FSDP": (DEFAULT, MODERNBERT, dict(shard=2), 2, {}),
    "ModernBERT, CP, documents": (DEFAULT, MODERNBERT, CP, 4, DOCUMENTS),
    "ModernBERT, PP 1f1b x TP x FSDP": (SLOW, MODERNBERT, PP_TP_FSDP, 1, {}),
    "ModernBERT, TP, compiled, selective": (SLOW, MODERNBERT, TP, 4, COMPILED | SELECTIVE),
    "ModernBERT, TP x FSDP, Muon": (EVERY, MODERNBERT, TP_FSDP, 2, {"optimizer": MUON}),
}


@pytest.mark.parametrize(("model", "layout", "size", "sections"), rows_of(CASES))
def test_layout_matches_one_process(
    parity: Parity, tmp_path: Path, model: Any, layout: dict[str, Any], size: int, sections: dict[str, Any]
) -> None:
    training = dict(steps=2, local_batch_size=size)
    shape = deep(model) if "pipeline" in layout else model
    recipe = tiny(tmp_path, "run", model=shape, parallelism=parallelism_of(layout), training=training, **sections)
    # The norms of OLMo-2 multiply outputs that are small at first, and their rounding errors.
    limits = {"weights": 2e-4} if model is OLMO2 and "lora" in sections else {}
    found = parity(recipe, **limits)
    names = next(names for prefix, names in OWN.items() if model.name.startswith(prefix))
    own = [value for name, value in found.state["model"].items() if name.endswith(names)]
    assert len(own) == len(names) * (shape.num_layers if model.causal else 1)
    assert {bool(value.std() > 0) for value in own} <= {"lora" not in sections}


@pytest.mark.parametrize(
    "config", (GPT_, OLMO2, QWEN3, BERT, SHARED_EXPERTS, DEEPSEEK_V3, GPT_OSS), ids=lambda config: config.name
)
def test_gradients_of_tensor_parallelism_without_sequence_parallelism(ranks: Ranks, config: Any) -> None:
    for errors in ranks(2).run(_errors_without_sequence_parallelism, config):
        assert {name: error for name, error in errors.items() if error > 1e-5} == {}


def _errors_without_sequence_parallelism(config: Any) -> dict[str, float]:
    """Returns the errors of the gradients of a step, relative to the largest one of the parameter."""
    model: Any = build_model(config)
    initialize(model, torch.device("cpu"), 0)
    reference, mesh = copy.deepcopy(model), mesh_of("cpu", tensor=2).tensor
    apply_tensor(model, model.tensor_plan, mesh, blocks=model.layers, sequence_parallel=False)
    set_loss(model, CrossEntropy(vocab_group=mesh.get_group()))
    tokens = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(0))
    for one in (model, reference):
        one(tokens, labels=tokens.roll(-1, 1)).backward()
    errors = {}
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            error = (full_tensor(model.get_parameter(name).grad) - parameter.grad).abs().max()
            errors[name] = (error / parameter.grad.abs().max().clamp(min=1e-3)).item()
    return errors
