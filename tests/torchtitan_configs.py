"""Configs of torchtitan 0.3 as `torchtitan_dump.py` prints them: of a small Llama, and of a small Qwen3 with experts."""

from typing import Any

COMMON = "torchtitan.models.common"


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    return {"class": f"{COMMON}.linear.Linear.Config", "in_features": inputs, "out_features": outputs, "bias": False}


def norm(size: int, eps: float) -> dict[str, Any]:
    config = {"class": f"{COMMON}.nn_modules.RMSNorm.Config", "normalized_shape": size}
    return config | {"eps": eps, "elementwise_affine": True}


def attention(heads: int, kv_heads: int | None, qk_norm: dict[str, Any] | None, rope: dict[str, Any]) -> dict[str, Any]:
    width = heads * rope["dim"]
    fused = linear(64, width + 2 * (kv_heads or heads) * rope["dim"])
    kernel = {"class": f"{COMMON}.attention.FlexAttention.Config", "block_size": 128, "kernel_options": {}}
    return {
        "class": f"{COMMON}.attention.GQAttention.Config", "dim": 64, "n_heads": heads, "n_kv_heads": kv_heads,
        "head_dim": None if qk_norm is None else rope["dim"], "inner_attention": kernel, "qk_norm": qk_norm,
        "qkv_linear": {"class": f"{COMMON}.attention.FusedQKVLinear.Config", "wqkv": fused}, "wo": linear(width, 64),
        "rope": rope,
    }  # fmt: skip


def rope(dim: int, theta: float, scaling: str) -> dict[str, Any]:
    return {
        "class": f"{COMMON}.rope.ComplexRoPE.Config", "dim": dim, "max_seq_len": 4096, "theta": theta, "scaling": scaling,
        "scaling_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
    }  # fmt: skip


def llama_block() -> dict[str, Any]:
    ffn = {
        "class": f"{COMMON}.feed_forward.FeedForward.Config",
        "w1": linear(64, 96),
        "w2": linear(96, 64),
        "w3": linear(64, 96),
    }
    return {
        "class": "torchtitan.models.llama3.model.Llama3TransformerBlock.Config",
        "attention": attention(4, None, None, rope(16, 500000, "llama")), "feed_forward": ffn, "moe": None,
        "attention_norm": norm(64, 1e-5), "ffn_norm": norm(64, 1e-5),
    }  # fmt: skip


def moe_block() -> dict[str, Any]:
    experts = {"class": f"{COMMON}.moe.GroupedExperts.Config", "dim": 64, "hidden_dim": 32, "num_experts": 8}
    dispatcher = {"class": f"{COMMON}.token_dispatcher.DeepEPTokenDispatcher.Config", "num_experts": 8, "top_k": 2}
    moe = {
        "class": f"{COMMON}.moe.MoE.Config", "num_experts": 8, "load_balance_coeff": 1e-3, "shared_experts": None,
        "routed_experts": {"class": f"{COMMON}.moe.RoutedExperts.Config", "inner_experts": experts, "token_dispatcher": dispatcher},
        "router": {"class": f"{COMMON}.moe.TokenChoiceTopKRouter.Config", "gate": linear(64, 8), "top_k": 2,
                   "score_func": "softmax", "route_norm": True, "route_scale": 1.0, "_debug_force_load_balance": False},
    }  # fmt: skip
    return {
        "class": "torchtitan.models.qwen3.model.Qwen3TransformerBlock.Config",
        "attention": attention(4, 2, norm(32, 1e-6), rope(32, 1e6, "none")), "feed_forward": None, "moe": moe,
        "attention_norm": norm(64, 1e-6), "ffn_norm": norm(64, 1e-6),
    }  # fmt: skip


def group(pattern: str, name: str = "AdamW", **options: Any) -> dict[str, Any]:
    values = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1} | options
    return {"class": "x.ParamGroupConfig", "pattern": pattern, "optimizer_name": name, "optimizer_kwargs": values}


def config(name: str = "llama3", num_layers: int = 3) -> dict[str, Any]:
    """Returns a config of `llama3` or, with experts, `qwen3`."""
    is_llama = name == "llama3"
    model = {
        "class": f"torchtitan.models.{name}.model.{'Llama3' if is_llama else 'Qwen3'}Model.Config", "dim": 64,
        "vocab_size": 256, "enable_weight_tying": False, "norm": norm(64, 1e-5 if is_llama else 1e-6), "lm_head": linear(64, 256),
        "tok_embeddings": {"class": f"{COMMON}.embedding.Embedding.Config", "num_embeddings": 256, "embedding_dim": 64},
        "layers": [llama_block() if is_llama else moe_block() for _ in range(num_layers)],
    }  # fmt: skip
    loader = "torchtitan.hf_datasets.text_datasets.HuggingFaceTextDataLoader.Config"
    return {
        "class": "torchtitan.trainer.Trainer.Config",
        "model_spec": {"class": "torchtitan.protocols.model_spec.ModelSpec", "name": name, "flavor": "small", "model": model},
        "hf_assets_path": "assets",
        "training": {"class": "torchtitan.config.configs.TrainingConfig", "local_batch_size": 2, "seq_len": 1024, "steps": 100},
        "dataloader": {"class": loader, "dataset": "c4"},
        "validator": {"class": "torchtitan.components.validate.Validator.Config", "dataloader": {
            "class": loader, "dataset": "c4_validation", "infinite": False}},
        "optimizer": {"class": "torchtitan.components.optimizer.optimizer.OptimizersContainer.Config",
                      "param_groups": [group(".*")]},
        "activation_checkpoint": {"class": "torchtitan.distributed.activation_checkpoint.SelectiveAC.Config"},
        "loss": {"class": "torchtitan.components.loss.ChunkedLossWrapper.Config", "loss_fn": {
            "class": "torchtitan.components.loss.CrossEntropyLoss.Config", "global_vocab_size": 256}},
    }  # fmt: skip
