"""Where the parameters of a model lie in the checkpoints of torchtitan and Megatron-LM."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlike.config import UserError
from titanlike.models.common.config import TransformerConfig
from titanlike.tools.migration.torchtitan_models import name_in_0_3


@dataclass(frozen=True)
class Part:
    """The place of a parameter in a tensor of another program's checkpoint."""

    key: str
    shape: tuple[int, ...]  # of that tensor
    layer: int | None = None  # index in its first dimension, if it is a stack of all layers
    rows: Tensor | None = None  # the row in that tensor (of the layer) of each row of the parameter; None: the same


def torchtitan_parts(
    config: TransformerConfig, found: Collection[str], *, is_state: bool = False, is_0_2: bool = False
) -> dict[str, Part]:
    """Returns the place of each parameter or, if `is_state`, of its optimizer state, in which queries, keys and values may be one
    tensor. torchtitan's Llama rotates adjacent elements of queries and keys, and this library, like Transformers, the two halves of
    a head. `found` are the keys of the checkpoint."""
    if config.name not in ("llama", "qwen3"):
        raise UserError(f"model.name = {config.name!r}: checkpoints of torchtitan are supported for llama and qwen3")
    is_fused = is_state and not is_0_2 and not any("qkv_linear.wq.weight.exp_avg" in key for key in found)
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    parts = {}
    for name, spec in config.parameters().items():
        key = name if is_0_2 else name_in_0_3(name, is_fused=is_fused)
        which = re.search(r"attention\.w([qkv])\.", name)
        rows, shape = None, spec.shape
        if config.name == "llama" and which and which[1] != "v":
            rows = _halves_from_pairs(spec.shape[0], size)
        if which and is_fused:
            own, shape = _fused_rows(which[1], heads, groups, size), ((heads + 2 * groups) * size, *spec.shape[1:])
            rows = own if rows is None else own[rows]
        parts[name] = Part(key, shape, rows=rows)
    return parts


def megatron_parts(config: TransformerConfig, found: Collection[str]) -> dict[str, Part]:
    """Returns the place of each parameter in a checkpoint of Megatron-LM's format `torch_dist`. Queries, keys and values are one
    tensor, as are the two matrices of SwiGLU, and each tensor is a stack of all layers, unless they differ. `found` are the keys
    of the checkpoint."""
    if config.name not in ("llama", "gpt"):
        raise UserError(f"model.name = {config.name!r}: checkpoints of Megatron-LM are supported for llama and gpt")
    is_stacked = not any(key.startswith("decoder.layers.0.") for key in found)
    norms = {"attention_norm": "self_attention.linear_qkv.layer_norm_", "ffn_norm": "mlp.linear_fc1.layer_norm_"}
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    fused_rows = (heads + 2 * groups) * size
    gated = config.parameters().get("layers.0.feed_forward.w3.weight")
    ffn_dim = gated.shape[0] if gated else 0
    ends = {
        "tok_embeddings": "embedding.word_embeddings",
        "pos_embeddings": "embedding.position_embeddings",
        "norm": "decoder.final_layernorm",
        "output": "output_layer",
    }
    parts = {}
    for name, spec in config.parameters().items():
        module, _, kind = name.rpartition(".")
        if module in ends:
            parts[name] = Part(f"{ends[module]}.{kind}", spec.shape)
            continue
        _, index, module = module.split(".", 2)
        rows, num_rows = None, spec.shape[0]
        if module in norms:
            key = norms[module] + kind
        elif module in ("attention.wq", "attention.wk", "attention.wv"):
            key, num_rows, rows = (
                f"self_attention.linear_qkv.{kind}",
                fused_rows,
                _fused_rows(module[-1], heads, groups, size),
            )
        elif module == "attention.wo":
            key = f"self_attention.linear_proj.{kind}"
        elif module == "feed_forward.w2":
            key = f"mlp.linear_fc2.{kind}"
        else:
            key = f"mlp.linear_fc1.{kind}"
            if gated:  # the gate, then the other
                num_rows, rows = 2 * ffn_dim, torch.arange(ffn_dim) + (ffn_dim if module == "feed_forward.w3" else 0)
        shape = (num_rows, *spec.shape[1:])
        if is_stacked:
            parts[name] = Part(f"decoder.layers.{key}", (config.num_layers, *shape), int(index), rows)
        else:
            parts[name] = Part(f"decoder.layers.{index}.{key}", shape, rows=rows)
    return parts


def _halves_from_pairs(num_rows: int, head_dim: int) -> Tensor:
    """Returns the rows of interleaved pairs in the order of two halves, for each head."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _fused_rows(which: str, num_heads: int, num_groups: int, head_dim: int) -> Tensor:
    """Returns the rows of queries, keys or values in the fused matrix, in which the query heads of a group are followed by its
    key and its value."""
    per_group = num_heads // num_groups
    rows = torch.arange((num_heads + 2 * num_groups) * head_dim).view(num_groups, per_group + 2, head_dim)
    heads: Mapping[str, slice] = {
        "q": slice(0, per_group),
        "k": slice(per_group, per_group + 1),
        "v": slice(per_group + 1, per_group + 2),
    }
    return rows[:, heads[which]].flatten()
