"""The model that options of Megatron-LM describe, as a model section of a recipe. `megatron.py` calls it."""

import math
from typing import Any

from titanlike.config.base import UserError, shown
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import config_class
from titanlike.tools.migration.conversion import Conversion

# Vocabularies, before padding, of tokenizers that need no file to be known.
VOCABULARIES = {"GPT2BPETokenizer": 50257, "": 50257, "Llama2Tokenizer": 32000}
UNSUPPORTED = {
    "--multi-latent-attention": "such jobs are not converted; write a recipe with model.name = 'deepseek_v3'",
    "--squared-relu": "squared ReLU is no activation of this toolkit's models",
    "--quick-geglu": "jobs of GPT-OSS are not converted; write a recipe with model.name = 'gpt_oss'",
    "--enable-gpt-oss": "jobs of GPT-OSS are not converted; write a recipe with model.name = 'gpt_oss'",
    "--is-hybrid-model": "Mamba is no model of this toolkit",
    "--hybrid-override-pattern": "Mamba is no model of this toolkit",
    "--hybrid-layer-pattern": "Mamba is no model of this toolkit",
    "--mtp-num-layers": "multi-token prediction is an option of deepseek_v3 only",
    "--window-size": "a model like Llama with sliding-window attention is none of this toolkit's",
    "--heterogeneous-layers-config-path": "blocks of different shapes are no model of this toolkit",
    "--heterogeneous-layers-config-encoded-json": "blocks of different shapes are no model of this toolkit",
    "--retro-add-retriever": "RETRO is no model of this toolkit",
    "--apply-residual-connection-post-layernorm": "norms after the residual connection are no model of this toolkit",
}
INITIAL_STD = 0.02


def model_section(job: Conversion) -> TransformerConfig:
    """Sets the model of a job, and returns its config. Raises `UserError` if this toolkit does not have it."""
    for key, reason in UNSUPPORTED.items():
        if key in job.given and job.given[key] is not False:
            raise UserError(f"{job.source}: {key}: {reason}")
    for key in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        if not job[key]:
            raise UserError(f"{job.source}: {key} is missing")
    name = _family(job)
    dim, heads = job["--hidden-size"], job["--num-attention-heads"]
    fields: dict[str, Any] = {}

    def put(field: str, value: Any, *keys: str, comment: str = "") -> None:
        fields[field] = value
        job.set(f"model.{field}", value, *keys, comment=comment)

    put(
        "name",
        name,
        "--swiglu",
        "--normalization",
        "--position-embedding-type",
        "--num-experts",
        "--qk-layernorm",
        "--add-qkv-bias",
    )
    put("dim", dim, "--hidden-size")
    put("num_layers", job["--num-layers"], "--num-layers")
    put("num_heads", heads, "--num-attention-heads")
    put("vocab_size", *_vocabulary(job))
    put("max_seq_len", max(job["--max-position-embeddings"] or 0, job["--seq-length"]), "--max-position-embeddings")
    job.set("training.seq_len", job["--seq-length"], "--seq-length")
    ffn = job["--ffn-hidden-size"] or (int(4 * dim * 2 / 3 / 64) * 64 if job["--swiglu"] else 4 * dim)
    kv_heads = (job["--num-query-groups"] or 1) if job["--group-query-attention"] else heads
    head_dim = job["--kv-channels"] or dim // heads
    if name == "gpt":
        _gpt(job, put, ffn, kv_heads, head_dim)
    else:
        _llama(job, put, ffn, kv_heads, head_dim)
    if job["--attention-dropout"]:
        job.lack("--attention-dropout", "attention has no dropout here")
    if not job["--num-experts"]:
        for key in [key for key in job.given if key.startswith("--moe-")]:
            job.leave(key, "there are no experts", changes=False)
    if job["--init-method-std"] != INITIAL_STD:
        job.leave("--init-method-std", f"initial weights have a standard deviation of {INITIAL_STD} here")
    config = job.checked(config_class(name), fields)
    epsilon = job["--norm-epsilon"]
    if config.has_field("norm_eps"):
        job.set("model.norm_eps", epsilon, "--norm-epsilon")
    elif epsilon != config.norm_eps:
        job.lack("--norm-epsilon", f"{config.norm_eps:g} in {config.name}")
    return config


def _family(job: Conversion) -> str:
    """Returns the family that has these parts. Raises `UserError` if none does."""
    positions = "rope" if job["--use-rotary-position-embeddings"] else job["--position-embedding-type"]
    parts = (
        "SwiGLU" if job["--swiglu"] else "GELU",
        job["--normalization"],
        {"rope": "RoPE", "learned_absolute": "learned positions"}.get(positions, positions),
    )
    experts, qk_norm, qkv_bias = job["--num-experts"], job["--qk-layernorm"], job["--add-qkv-bias"]
    if parts == ("SwiGLU", "RMSNorm", "RoPE"):
        shared = job["--moe-shared-expert-intermediate-size"]
        if experts:
            return "qwen3_moe" if qk_norm or shared or job["--moe-router-pre-softmax"] else "mixtral"
        return "qwen3" if qk_norm else "qwen2" if qkv_bias else "llama"
    if parts == ("GELU", "LayerNorm", "learned positions") and not experts and not qk_norm:
        return "gpt"
    more = [text for text, holds in (("experts", experts), ("QK-norm", qk_norm)) if holds]
    raise UserError(
        f"{job.source}: {', '.join([*parts, *more])}: no model of this toolkit has these parts; those like Llama have SwiGLU, "
        "RMSNorm and "
        "RoPE, and gpt has GELU, LayerNorm and learned positions"
    )


def _vocabulary(job: Conversion) -> tuple[Any, ...]:
    """Returns the padded vocabulary, its options and a comment, as arguments of `put`."""
    if job["--padded-vocab-size"]:
        return (job["--padded-vocab-size"], "--padded-vocab-size")
    kind, size = job["--tokenizer-type"], job["--vocab-size"]
    if size and kind == "NullTokenizer":
        size += 1  # the end of a document
    if not size and kind in VOCABULARIES:
        size = VOCABULARIES[kind]
    if not size:
        raise UserError(
            f"{job.source}: the vocabulary of --tokenizer-type {shown(kind)} is not in the script; add --vocab-size to its options"
        )
    multiple = job["--make-vocab-size-divisible-by"] * job["--tensor-model-parallel-size"]
    return (math.ceil(size / multiple) * multiple, "--vocab-size", "--tokenizer-type", "--make-vocab-size-divisible-by")


def _gpt(job: Conversion, put: Any, ffn: int, kv_heads: int, head_dim: int) -> None:
    dim, heads = job["--hidden-size"], job["--num-attention-heads"]
    for key, value, only in (
        ("--ffn-hidden-size", ffn, 4 * dim),
        ("--num-query-groups", kv_heads, heads),
        ("--kv-channels", head_dim, dim // heads),
    ):
        if value != only:
            raise UserError(f"{job.source}: {key} = {value}, but gpt of this toolkit has {only}")
    put("dropout", job["--hidden-dropout"], "--hidden-dropout")
    if job["--untie-embeddings-and-output-weights"]:
        job.leave(
            "--untie-embeddings-and-output-weights",
            "the head of gpt is tied to the embedding here, which takes fewer parameters",
        )
    if job["--disable-bias-linear"]:
        job.leave("--disable-bias-linear", "the linear layers of gpt have biases here")


def _llama(job: Conversion, put: Any, ffn: int, kv_heads: int, head_dim: int) -> None:
    name, dim, heads = job.tables["model"]["name"], job["--hidden-size"], job["--num-attention-heads"]
    cls: Any = config_class(name)
    put("num_kv_heads", kv_heads, "--num-query-groups", "--group-query-attention")
    if cls.has_field("head_dim"):
        put("head_dim", head_dim, "--kv-channels")
    elif head_dim * heads != dim:
        raise UserError(
            f"{job.source}: --kv-channels = {head_dim}, but a head of {name} has {dim // heads} here; qwen3 has such heads"
        )
    put("rope_theta", float(job["--rotary-base"]), "--rotary-base")
    if job["--rotary-percent"] != 1.0:
        raise UserError(
            f"{job.source}: --rotary-percent = {job['--rotary-percent']:g}: RoPE rotates the whole head here"
        )
    if job["--use-rope-scaling"] and cls.has_field("rope_scaling"):
        put("rope_scaling", job["--rope-scaling-factor"], "--use-rope-scaling", "--rope-scaling-factor")
    elif job["--use-rope-scaling"]:
        job.leave("--use-rope-scaling", f"{name} has no RoPE scaling here")
    tied = not job["--untie-embeddings-and-output-weights"]
    if cls.has_field("tied_head"):
        put("tied_head", tied, "--untie-embeddings-and-output-weights")
    elif tied != cls.tied_head:
        job.differ(f"--untie-embeddings-and-output-weights is not set; the head of {name} is never tied here")
    if job["--hidden-dropout"]:
        job.lack("--hidden-dropout", f"{name} has no dropout here")
    if not job["--disable-bias-linear"]:
        job.differ(
            f"--disable-bias-linear is not set, so that all linear layers have biases; those of {name} have none here"
        )
    if job["--num-experts"]:
        _experts(job, put, ffn, cls)
    else:
        put("ffn_dim", ffn, "--ffn-hidden-size")


def _experts(job: Conversion, put: Any, ffn: int, cls: Any) -> None:
    if str(job["--moe-layer-freq"]) not in ("1", "([1]*1)"):
        raise UserError(f"{job.source}: --moe-layer-freq = {job['--moe-layer-freq']}: every block has experts here")
    width = job["--moe-ffn-hidden-size"] or ffn
    put("ffn_dim", width, "--moe-ffn-hidden-size", "--ffn-hidden-size")
    put("num_experts", job["--num-experts"], "--num-experts")
    put("experts_per_token", job["--moe-router-topk"], "--moe-router-topk")
    kind = job["--moe-router-load-balancing-type"]
    if kind in ("aux_loss", "seq_aux_loss"):
        # Megatron-LM adds a loss for each block, of loads that sum to 1; here it is one of all blocks, of loads that sum to topk.
        factor = job["--num-layers"] / job["--moe-router-topk"]
        span = "sequence" if kind == "seq_aux_loss" else "micro-batch"
        put(
            "balance_loss",
            job["--moe-aux-loss-coeff"] * factor,
            "--moe-aux-loss-coeff",
            "--moe-router-load-balancing-type",
            comment=f"{job['--moe-aux-loss-coeff']:g} x num_layers / topk: one loss of all blocks and each sequence, there "
            f"of each block and {span}",
        )
    elif kind != "none":
        job.leave(
            "--moe-router-load-balancing-type",
            "the load is balanced by model.balance_loss or model.balance_bias_rate here",
        )
    if not cls.has_field("router_score"):
        for key in (
            "--moe-router-score-function",
            "--moe-router-topk-scaling-factor",
            "--moe-router-enable-expert-bias",
        ):
            if key in job.given and job[key] not in ("softmax", None, False):
                job.leave(key, 'mixtral has no such router; model.name = "qwen3_moe" has')
        return
    put("router_score", job["--moe-router-score-function"], "--moe-router-score-function")
    put("normalize_router", not job["--moe-router-pre-softmax"], "--moe-router-pre-softmax")
    put("router_scale", job["--moe-router-topk-scaling-factor"] or 1.0, "--moe-router-topk-scaling-factor")
    rate = job["--moe-router-bias-update-rate"] if job["--moe-router-enable-expert-bias"] else 0.0
    put("balance_bias_rate", rate, "--moe-router-bias-update-rate", "--moe-router-enable-expert-bias")
    shared = job["--moe-shared-expert-intermediate-size"] or 0
    if shared % width:
        raise UserError(
            f"{job.source}: --moe-shared-expert-intermediate-size = {shared} is no multiple of the {width} of an expert, as "
            "it is here"
        )
    put("num_shared_experts", shared // width, "--moe-shared-expert-intermediate-size")
