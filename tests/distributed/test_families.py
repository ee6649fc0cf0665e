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

from tests.parity import COMPILED, FULL, LORA, MUON, SELECTIVE, Parity, parallelism_of, tiers
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
    full_tensor,
    mesh_of,
    tiny,
    train,
)
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.models.common.init import initialize
from titanlike.models.common.layers import set_loss
from titanlike.models.registry import build_model
from titanlike.parallelisms.tensor import apply_tensor

DOCUMENTS: dict[str, Any] = {"data": dict(source="synthetic", document_masks=True)}
# Each option by itself.
PLAIN = replace(GEMMA2, logit_soft_cap=0.0, attention_soft_cap=0.0, sliding_window=0)
OPTIONS: dict[str, Any] = {
    name: replace(PLAIN, **{name: value})
    for name, value in {"logit_soft_cap": 0.1, "attention_soft_cap": 0.02, "sliding_window": 11}.items()
}
ENCODERS: dict[str, Any] = {"BERT": BERT, "ModernBERT": MODERNBERT}
MODELS = {
    "Mistral": MISTRAL,
    "SmolLM3": SMOLLM3,
    "OLMo-2": OLMO2,
    "Phi-3": PHI3,
    "Qwen2": QWEN2,
    "Qwen3": QWEN3,
    "Gemma 2": GEMMA2,
    "Gemma 3": GEMMA3,
    **ENCODERS,
    **OPTIONS,
}
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

# The layout, the number of sequences in a micro-batch, and other sections of a recipe.
LAYOUTS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "TP": (dict(tensor=2), 4, {}),
    "FSDP": (dict(shard=2), 2, {}),
    "CP": (dict(context=2), 4, {}),
    "CP, documents": (dict(context=2), 4, DOCUMENTS),
    "CP x TP": (dict(context=2, tensor=2), 4, {}),
    "PP 1f1b": (dict(pipeline=2), 2, {}),
    "PP 1f1b x FSDP": (dict(pipeline=2, shard=2), 1, {}),
    "PP 1f1b x TP x FSDP": (dict(pipeline=2, tensor=2, shard=2), 1, {}),
    "PP zbv x TP": (dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "TP x FSDP": (dict(tensor=2, shard=2), 2, {}),
    "TP x FSDP, documents, full checkpointing": (dict(tensor=2, shard=2), 2, DOCUMENTS | FULL),
    "TP x FSDP, compiled, selective": (dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "CP x FSDP, compiled": (dict(context=2, shard=2), 2, COMPILED),
    "TP x FSDP, Muon": (dict(tensor=2, shard=2), 2, {"optimizer": MUON}),
    "TP x FSDP, LoRA": (dict(tensor=2, shard=2), 2, LORA),
}
QUICK = (
    "OLMo-2, TP",
    "Qwen2, TP",
    "Qwen3, TP",
    "Gemma 2, CP",
    "BERT, TP",
    "ModernBERT, FSDP",
    "ModernBERT, CP, documents",
)
SLOW = (
    "SmolLM3, PP zbv x TP", "SmolLM3, TP x FSDP, compiled, selective",
    "Mistral, CP x TP", "Mistral, TP x FSDP, compiled, selective",
    "Phi-3, CP x TP", "OLMo-2, CP x TP", "OLMo-2, PP zbv x TP", "OLMo-2, TP x FSDP, compiled, selective",
    "Qwen2, TP x FSDP, compiled, selective", "Qwen3, PP zbv x TP", "Qwen3, TP x FSDP, Muon", "Gemma 2, CP, documents",
    "Gemma 2, CP x TP", "Gemma 2, PP 1f1b x TP x FSDP", "Gemma 2, TP x FSDP, compiled, selective", "Gemma 3, PP zbv x TP",
    "Gemma 3, TP", "BERT, CP", "BERT, PP zbv x TP", "BERT, TP x FSDP, documents, full checkpointing", "ModernBERT, CP x TP",
    "ModernBERT, PP 1f1b x TP x FSDP", "ModernBERT, TP x FSDP, compiled, selective", "ModernBERT, TP x FSDP, Muon",
)  # fmt: skip
CASES = [f"{model}, {layout}" for model in MODELS if model not in OPTIONS for layout in LAYOUTS]
CASES = [case for case in CASES if not case.endswith("BERT, TP x FSDP, LoRA")]  # a key of another program
CASES += [f"{option}, {layout}" for option in OPTIONS for layout in ("CP x TP", "PP 1f1b x FSDP")]


@pytest.mark.parametrize("case", tiers(CASES, QUICK, SLOW))
def test_layout_matches_one_process(parity: Parity, tmp_path: Path, case: str) -> None:
    family, _, name = case.partition(", ")
    layout, size, sections = LAYOUTS[name]
    model: Any = MODELS[family]
    training = dict(steps=2, local_batch_size=size)
    recipe = tiny(tmp_path, "run", model=model, parallelism=parallelism_of(layout), training=training, **sections)
    # The norms of OLMo-2 multiply outputs that are small at first, and their rounding errors.
    limits = {"weights": 2e-4} if case == "OLMo-2, TP x FSDP, LoRA" else {}
    found = parity(recipe, **limits)
    names = next(names for prefix, names in OWN.items() if model.name.startswith(prefix))
    own = [value for name, value in found.state["model"].items() if name.endswith(names)]
    assert len(own) == len(names) * (model.num_layers if model.causal else 1)
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


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_gemma_changes_the_loss(ranks: Ranks, tmp_path: Path, option: str) -> None:
    """Otherwise the parity above would hold for an option that does nothing."""
    training = dict(steps=1, local_batch_size=8)
    plain, found = (
        train(ranks(1), tiny(tmp_path, name, model=model, training=training))
        for name, model in (("plain", PLAIN), (option, MODELS[option]))
    )
    assert abs(found.losses[0] - plain.losses[0]) > 1e-6 * plain.losses[0]
