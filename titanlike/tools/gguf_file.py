"""GGUF files, which llama.cpp and the programs built on it read: `titanlike export --format gguf`."""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlike.config import UserError
from titanlike.data.tokens.chat_template import BUILT_IN_NAME
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.export import check_tokenizer
from titanlike.interop.generation_config import chat_template, generation_config
from titanlike.interop.hf_parameters import whole
from titanlike.interop.tokenizer_files import tokenizer_files
from titanlike.interop.weights import Weights
from titanlike.models.common.rope import scaled_frequencies
from titanlike.models.gemma.config import GemmaConfig
from titanlike.tools.gguf_vocabulary import vocabulary
from titanlike.tools.output_files import refuse_existing, writing

# Precisions of matrices: the name of the type in GGUF, and the number of a file with this type.
FILE_TYPES = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
Q8_BLOCK = 32  # elements of a row that share a scale

NAMES = {
    "tok_embeddings": "token_embd", "pos_embeddings": "position_embd", "norm": "output_norm", "output": "output",
    "attention_norm": "attn_norm", "post_attention_norm": "post_attention_norm", "ffn_norm": "ffn_norm",
    "post_ffn_norm": "post_ffw_norm", "attention.sinks": "attn_sinks",
    "attention.wq": "attn_q", "attention.wk": "attn_k", "attention.wv": "attn_v", "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm",
    "attention.wq_a": "attn_q_a", "attention.wq_b": "attn_q_b", "attention.wkv_a": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.router": "ffn_gate_inp", "feed_forward.router.expert": "exp_probs_b",
    "feed_forward.experts.w1": "ffn_gate_exps", "feed_forward.experts.w2": "ffn_down_exps",
    "feed_forward.experts.w3": "ffn_up_exps", "feed_forward.shared.w1": "ffn_gate_shexp",
    "feed_forward.shared.w2": "ffn_down_shexp", "feed_forward.shared.w3": "ffn_up_shexp",
}  # fmt: skip
LATENT = {"attention.q_norm": "attn_q_a_norm"}


class Architecture(NamedTuple):
    """An architecture of llama.cpp."""

    name: str
    neighbors: bool = False
    """Whether RoPE rotates pairs of neighboring channels, and not of the two halves of a head."""
    only: Mapping[str, Any] = {}
    """Keys of a model, with the only value that llama.cpp computes."""
    names: Mapping[str, str] = {}
    """What differs from `NAMES`."""


# By the class of transformers that computes the same as a model.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", neighbors=True),
    "MistralForCausalLM": Architecture("llama", neighbors=True, only={"sliding_window": 0}),
    "Phi3ForCausalLM": Architecture("llama", neighbors=True, only={"sliding_window": 0}),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", names={"attention_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}
    ),
    "MixtralForCausalLM": Architecture("llama", neighbors=True),
    "SmolLM3ForCausalLM": Architecture("smollm3", neighbors=True, only={"no_rope_every": 4}),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3"),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", only={"normalize_router": True}),
    "Gemma2ForCausalLM": Architecture("gemma2", only={"sliding_window_pattern": 2}),
    "Gemma3ForCausalLM": Architecture("gemma3", only={"sliding_window_pattern": 6}),
    "GptOssForCausalLM": Architecture("gpt-oss", names={"ffn_norm": "post_attention_norm"}),
    "DeepseekV2ForCausalLM": Architecture("deepseek2", only={"num_expert_groups": 1}, names=LATENT),
    "DeepseekV3ForCausalLM": Architecture("deepseek2", only={"norm_eps": 1e-6}, names=LATENT),
    "GPT2LMHeadModel": Architecture("gpt2", names={"feed_forward.w1": "ffn_up"}),
}


class GGUFTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    parameters: tuple[str, ...]
    compute: Callable[..., Tensor]
    """Returns the tensor, given the parameters."""
    in_float32: bool = True


def export_gguf(weights: Weights, file: Path, *, dtype: str = "") -> int:
    """Writes a GGUF file, which appears whole or not at all. Returns its size in bytes.

    Args:
        dtype: precision of matrices, a key of `FILE_TYPES`. Default: as in the checkpoint. q8_0 has 8 bits for an element and a
            scale for 32 of a row; rows of another length are in float16. Vectors, routers and learned positions are in float32.
    """
    refuse_existing(file)
    config: Any = weights.config
    arch = _architecture(config)
    try:
        import gguf
    except ImportError:
        raise UserError('--format gguf requires the package gguf; run: pip install "titanlike[gguf]"') from None
    matrix_type, file_type = FILE_TYPES[dtype or str(weights.dtype("tok_embeddings.weight")).removeprefix("torch.")]
    name = config.label().replace(
        "phi3", "phi"
    )  # llama.cpp changes tokens, which it expects, of a model with that name
    keys = {"general.name": name, "general.file_type": file_type}
    keys |= {f"{arch.name}.{key}": value for key, value in _hyperparameters(config, arch).items()}
    keys |= {f"tokenizer.{key}": value for key, value in _tokenizer(weights).items()}
    types = gguf.GGUFValueType
    kinds = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING, list: types.ARRAY}
    partial_file = file.with_name(f"{file.name}.partial")
    writer = gguf.GGUFWriter(partial_file, arch.name)
    for key, value in keys.items():
        writer.add_key_value(key, value, kinds[type(value)])
    shapes = {name: spec.shape for name, spec in config.parameters().items()}
    tensors = {}
    for tensor in _tensors(config, arch):
        # Values are read later, one tensor at a time.
        shape = tensor.compute(*(torch.empty(shapes[name], device="meta") for name in tensor.parameters)).shape
        kind = "F32" if tensor.in_float32 else "F16" if matrix_type == "Q8_0" and shape[-1] % Q8_BLOCK else matrix_type
        tensors[tensor] = gguf.GGMLQuantizationType[kind]
        size = gguf.quant_shape_to_byte_shape(tuple(shape), tensors[tensor])
        writer.add_tensor_info(tensor.name, size, np.dtype(np.uint8), math.prod(size), tensors[tensor])
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, kind in tensors.items():
                values = tensor.compute(*(weights.read(name, whole(shapes[name])) for name in tensor.parameters))
                writer.write_tensor_data(_encoded(values, kind))
            for stream in writer.fout:
                stream.flush()
                os.fsync(stream.fileno())
            writer.close()
            partial_file.rename(file)
        finally:
            writer.close()
            partial_file.unlink(missing_ok=True)
    if not getattr(config, "rope_truncate", True) and config.rope_scaling != 1.0:
        _warn("llama.cpp rounds the bounds of YaRN, which this model does not: its probabilities differ")
    if keys.get("tokenizer.ggml.pre") == "gpt-4o":
        _warn("llama.cpp splits words with combining marks, or with capitals beyond ASCII inside, in another way")
    return file.stat().st_size


def _warn(difference: str) -> None:
    print(f"warning: {difference}", file=sys.stderr, flush=True)


def _encoded(values: Tensor, kind: Any) -> Any:
    """Returns the bytes of a tensor in a type of GGUF."""
    if kind.name == "Q8_0":
        from gguf import quants

        return quants.quantize(values.float().numpy(), kind)
    dtype = next(getattr(torch, name) for name, (found, _) in FILE_TYPES.items() if found == kind.name)
    return values.to(dtype).contiguous().view(torch.uint8).numpy()


def _architecture(config: Any) -> Architecture:
    """Returns the architecture of llama.cpp that computes the same as a model. Raises `UserError` if there is none."""
    arch = ARCHITECTURES.get(config.hf_architecture)
    if arch is None:
        raise UserError(f"model.name = {config.name!r} has no equivalent in GGUF; use --format hf")
    config.to_hugging_face()  # its error names an option that transformers does not have, which llama.cpp does not have either
    only, positive = dict(arch.only), []
    if isinstance(config, GemmaConfig):
        is_27b = (
            config.num_layers == {"gemma2": 46, "gemma3": 62}[arch.name]
        )  # from which llama.cpp concludes the scale
        only["query_scalar"] = config.dim // config.num_heads if is_27b else config.head_dim
        positive = ["sliding_window", "attention_soft_cap", "logit_soft_cap"]
    problems = {key: repr(value) for key, value in only.items() if getattr(config, key) != value}
    problems |= {key: "more than 0" for key in positive if config.has_field(key) and not getattr(config, key)}
    for key, supported in problems.items():
        raise UserError(
            f"model.{key} = {getattr(config, key)!r} has no equivalent in llama.cpp's {arch.name}, which has {supported}; use "
            "--format hf"
        )
    return arch


def _tensors(config: Any, arch: Architecture) -> Iterator[GGUFTensor]:
    """Yields the tensors of a file in order."""
    if getattr(config, "rope_scaling", 1.0) != 1.0 and config.rope_scaling_type == "llama3":
        yield GGUFTensor("rope_freqs.weight", (), partial(_llama3_divisors, config))
    heads = {"attention.wq": config.num_heads, "attention.wk": config.num_kv_heads} if arch.neighbors else {}
    for name, spec in config.parameters().items():
        match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+?)(?:[._](weight|bias))?", name)
        assert match
        number, stem, suffix = match[1], match[2], match[3] or "weight"
        if number and int(number) >= config.num_layers:
            continue  # of multi-token prediction, which llama.cpp does not compute
        block = f"blk.{number}." if number else ""
        if arch.name == "gpt2" and stem in ("attention.wq", "attention.wk", "attention.wv"):
            parts = tuple(f"layers.{number}.attention.{part}.{suffix}" for part in ("wq", "wk", "wv"))
            if name == parts[0]:
                yield GGUFTensor(f"{block}attn_qkv.{suffix}", parts, lambda *parts: torch.cat(parts), suffix == "bias")
        elif stem == "attention.wkv_b":
            for part in ("k", "v"):
                yield GGUFTensor(f"{block}attn_{part}_b.{suffix}", (name,), partial(_absorbed, config, part), False)
        else:
            compute: Callable[..., Tensor] = partial(_neighbors, heads[stem]) if stem in heads else _same
            if isinstance(config, GemmaConfig) and stem.endswith("norm"):
                compute = _plus_one
            in_float32 = len(spec.shape) == 1 or suffix == "bias" or stem in ("feed_forward.router", "pos_embeddings")
            gguf_name = f"{block}{arch.names.get(stem, NAMES[stem])}.{suffix}"
            yield GGUFTensor(gguf_name, (name,), compute, in_float32)


def _same(values: Tensor) -> Tensor:
    return values


def _plus_one(values: Tensor) -> Tensor:
    return values.float() + 1.0


def _neighbors(num_heads: int, values: Tensor) -> Tensor:
    """Returns the outputs of a matrix in an order in which pairs of the two halves of a head are neighbors."""
    return values.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _absorbed(config: Any, part: str, values: Tensor) -> Tensor:
    """Returns the part of keys or values, for each head, of the matrix that expands latent vectors. llama.cpp multiplies queries by
    the former, which is transposed, and outputs of attention by the latter."""
    expanded = values.unflatten(0, (config.num_heads, -1))
    size = config.qk_nope_head_dim
    return expanded[:, :size].transpose(1, 2) if part == "k" else expanded[:, size:]


def _llama3_divisors(config: Any) -> Tensor:
    """Returns what Llama 3.1's scaling divides each RoPE frequency by."""
    frequencies = config.rope_theta ** -(torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim)
    return frequencies / scaled_frequencies(frequencies, config.rope_theta, config)


def _hyperparameters(config: Any, arch: Architecture) -> dict[str, Any]:
    """Returns the keys that describe a model, without their prefix."""
    is_gpt2, is_latent = arch.name == "gpt2", arch.name == "deepseek2"
    hidden = 4 * config.dim if is_gpt2 else config.dense_ffn_dim if is_latent else config.ffn_dim
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "block_count": config.num_layers,
        "feed_forward_length": hidden,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": 1 if is_latent else config.num_kv_heads,
        f"attention.layer_norm_{'' if is_gpt2 else 'rms_'}epsilon": config.norm_eps,
    }
    if is_gpt2:
        return found
    found |= {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.rope_theta,
    }
    if config.rope_scaling != 1.0 and config.rope_scaling_type != "llama3":
        found |= {"rope.scaling.type": config.rope_scaling_type, "rope.scaling.factor": config.rope_scaling}
    if config.rope_scaling != 1.0 and config.rope_scaling_type == "yarn":
        found["rope.scaling.original_context_length"] = config.rope_original_seq_len
    if config.rope_local_theta:
        found["rope.freq_base_swa"] = config.rope_local_theta
    if config.sliding_window or arch.name == "gpt-oss":  # which has the key in any case
        found["attention.sliding_window"] = config.sliding_window or config.max_seq_len
    if config.attention_soft_cap:
        found["attn_logit_softcapping"] = config.attention_soft_cap
    if config.logit_soft_cap:
        found["final_logit_softcapping"] = config.logit_soft_cap
    if config.num_experts:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.ffn_dim,
        }
    if is_latent:
        rank, latent = config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
        found |= {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": rank,
            "attention.key_length": latent,
            "attention.value_length": rank,
            "attention.key_length_mla": config.head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_shared_count": config.num_shared_experts,
            "expert_weights_scale": config.router_scale,
            "expert_weights_norm": config.normalize_router,
            "expert_gating_func": 2 if config.router_score == "sigmoid" else 1,
            "expert_group_count": config.num_expert_groups,
            "expert_group_used_count": config.groups_per_token,
            "rope.scaling.yarn_log_multiplier": 0.1 * config.rope_mscale,
        }
    return found


def _tokenizer(weights: Weights) -> dict[str, Any]:
    """Returns the keys that describe the tokenizer, without their prefix."""
    tokenizer = build_tokenizer(weights.tokenizer, weights.config.vocab_size, str(weights.path))
    check_tokenizer(weights, tokenizer)
    content = json.loads(tokenizer_files(tokenizer, weights.config.max_seq_len)["tokenizer.json"])
    encoding = f"tokenizer.encoding = {weights.tokenizer.encoding!r}"
    found = vocabulary(content, weights.config.vocab_size, encoding)
    separator, special = tokenizer.separator.token, tokenizer.codec.special
    # A chat template may write both also where documents have only one of them.
    bos, eos = (
        special.get(name, separator) if token is None else token
        for token, name in ((tokenizer.bos, tokenizer.codec.bos), (tokenizer.eos, tokenizer.codec.eos))
    )
    found |= {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "add_bos_token": tokenizer.bos is not None,
        "add_eos_token": False,
    }
    ends = generation_config(weights, tokenizer)["eos_token_id"]
    others = [token for token in (ends if isinstance(ends, list) else [ends]) if token != eos]
    found |= zip(("eot_token_id", "eom_token_id"), others, strict=False)  # which end a text, too
    keys = {f"ggml.{key}": value for key, value in found.items()}
    template, is_known = chat_template(weights, tokenizer)
    if is_known or template.name != BUILT_IN_NAME:
        # Marks of the assistant's part become comments, which trim as they do.
        keys["chat_template"] = re.sub(r"{%(-?)\s*(?:end)?generation\s*(-?)%}", r"{#\1 \2#}", template.source)
    return keys
