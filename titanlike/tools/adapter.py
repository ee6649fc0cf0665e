"""Export of LoRA adapters in the format of PEFT."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from titanlike.checkpoint.format import write_tensors
from titanlike.config import UserError
from titanlike.interop.export import whole_folder
from titanlike.interop.hf_parameters import hf_parameters
from titanlike.interop.weights import CheckpointWeights, Weights
from titanlike.models.common.lora import A, B
from titanlike.tools.output_files import refuse_existing
from titanlike.utils.atomic_write import atomic_write_text


def export_adapter(weights: Weights, folder: Path) -> int:
    """Writes the adapters of a checkpoint as `adapter_model.safetensors` and `adapter_config.json`. The folder appears whole or not
    at all. Returns the size of the adapters in bytes."""
    refuse_existing(folder)
    layers = sorted(weights.adapted_layers) if isinstance(weights, CheckpointWeights) else []
    if not layers or not isinstance(weights, CheckpointWeights):
        raise UserError(f"{weights.path} has no LoRA adapters; omit --adapter to export the model")
    plan = hf_parameters(weights.config)
    tensors = [plan[f"{layer}.weight"] for layer in layers]
    fused = [layer for layer, tensor in zip(layers, tensors, strict=True) if tensor.parts]
    if fused:
        raise UserError(
            f"{fused[0]} is a part of a larger matrix in {weights.config.hf_architecture}, for which PEFT has one adapter; omit "
            "--adapter to export the merged model"
        )
    matrices: dict[str, Tensor] = {}
    for layer, tensor in zip(layers, tensors, strict=True):
        for name in (A, B):
            key = f"base_model.model.{tensor.hf_name.removesuffix('.weight')}.{name}.weight"
            matrices[key] = weights.matrix(f"{layer}.{name}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": weights.metadata.recipe.get("checkpoint", {}).get("initial") or None,
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": tensors[0].transposed,
        "inference_mode": True,
        "target_modules": [tensor.hf_name.removesuffix(".weight") for tensor in tensors],
    }
    specs = {name: torch.empty(matrix.shape, dtype=matrix.dtype, device="meta") for name, matrix in matrices.items()}
    with whole_folder(folder) as partial:
        atomic_write_text(partial / "adapter_config.json", json.dumps(config, indent=2) + "\n")
        with (partial / "adapter_model.safetensors").open("xb", buffering=0) as stream:
            write_tensors(stream, specs, matrices.__getitem__, {"format": "pt"})
            os.fsync(stream.fileno())
    return sum(matrix.nbytes for matrix in matrices.values())
