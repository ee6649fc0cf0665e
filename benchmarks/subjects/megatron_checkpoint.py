"""Megatron-Core: builds a small GPT model, computes logits on the CPU, and saves the model in Megatron-LM's format `torch_dist`.

    python -m benchmarks.subjects.megatron_checkpoint KIND FOLDER

KIND is "llama" or "gpt". FOLDER/iter_0000010 is the checkpoint, FOLDER/tokens.npy and
FOLDER/logits.npy are tokens and their logits.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig


def build(kind: str) -> GPTModel:
    """Returns a model with random weights, also in norms and biases."""
    is_llama = kind == "llama"
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2 if is_llama else 4,
        ffn_hidden_size=96 if is_llama else 256, use_cpu_initialization=True, gated_linear_unit=is_llama,
        activation_func=torch.nn.functional.silu if is_llama else lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        add_bias_linear=not is_llama, normalization="RMSNorm" if is_llama else "LayerNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False, pipeline_dtype=torch.float32,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization=config.normalization), vocab_size=320, max_sequence_length=128,
        position_embedding_type="rope" if is_llama else "learned_absolute", rotary_base=500000,
        share_embeddings_and_output_weights=not is_llama,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def main() -> None:
    """Saves a model and its logits."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29611")
    # Without a GPU: it has no dropout, so that its generators are not needed.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model = build(kind)
    tokens = torch.arange(2 * 32).view(2, 32) * 7 % 320
    position_ids = torch.arange(32).expand(2, 32)
    mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, position_ids, mask)
    np.save(folder / "tokens.npy", tokens.numpy())
    np.save(folder / "logits.npy", logits.float().numpy())
    checkpoint = folder / "iter_0000010"
    checkpoint.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(checkpoint))


if __name__ == "__main__":
    main()
