"""Configs of torchtitan 0.3, which are Python: run in torchtitan's environment, or printed there as JSON, and converted by the keys
that they share with 0.2. `formats.py` calls it for `titanlike import` and `titanlike plan`."""

import json
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlike.config.base import UserError, show_value, shown
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import config_class
from titanlike.tools.migration.conversion import Conversion, Key
from titanlike.tools.migration.torchtitan import INITIALIZATION, convert_keys, flat
from titanlike.tools.migration.torchtitan_keys import CODE, KEYS_0_3, MODEL, NAMES_0_3, NUMBERS
from titanlike.tools.migration.torchtitan_models import UNSUPPORTED, name_in_0_3

DUMP = Path(__file__).with_name("torchtitan_dump.py")
MAX_SECONDS = 600

BLOCK = f"{MODEL}.layers"
FAMILIES = {"Llama3Model": "llama", "Qwen3Model": "qwen3"}
CHECKPOINTING = {"": "none", "SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
MASKED = {"FlexAttention": True, "VarlenAttention": True, "ScaledDotProductAttention": False}
FLOAT8 = {"Float8Linear": "quantize.linear.float8", "MXFP8Linear": "quantize.linear.mx"}
# What converters replace layers by.
CONVERTED = {
    **dict.fromkeys([*FLOAT8, "NVFP4Linear", "RowParallelLinear"], "Linear"),
    **dict.fromkeys(["Float8GroupedExperts", "MXFP8GroupedExperts"], "GroupedExperts"),
    "AllGatherFusedQKVLinear": "FusedQKVLinear",
    "AllGatherFusedFeedForward": "FeedForward",
}
DIST_GEMM = {"RowParallelLinear", "AllGatherFusedQKVLinear", "AllGatherFusedFeedForward"}
LAYERS = """Llama3Model Qwen3Model Llama3TransformerBlock Qwen3TransformerBlock Embedding Linear RMSNorm GQAttention QKVLinear
    FusedQKVLinear ComplexRoPE CosSinRoPE FeedForward FlexAttention VarlenAttention ScaledDotProductAttention MoE
    TokenChoiceTopKRouter RoutedExperts GroupedExperts"""
DISPATCHERS = ("", "LocalTokenDispatcher", "AllToAllTokenDispatcher")
# Of any layer: the only value that is supported, and what follows from `NUMBERS`, is of the kernels, or of YaRN.
FIXED = {
    "bias": False,
    "elementwise_affine": True,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "window_size": [-1, 0],
    "_debug_force_load_balance": False,
}
IMPLIED = """class dim in_features out_features normalized_shape num_embeddings embedding_dim head_dim n_heads n_kv_heads eps
    num_experts top_k hidden_dim scaling rope_factor beta_fast beta_slow original_seq_len truncate block_size cudagraphable
    num_max_tokens_per_rank pad_multiple"""
SCALING = ("scaling_factor", "original_max_position_embeddings")
CUDA_GRAPHS = "CUDA graphs: torchtitan captures forward and backward in one; here the host launches each kernel"
QWEN3_INITIALIZATION = (
    "initial weights: 0.02, and for wo and w2 of models with experts 0.02 / sqrt(2 * num_layers); here the latter for wo and w2 of "
    "all models"
)
DATA_ORDER = (
    "data: each rank reads its part of the stream, and the last token of a document is a label only; here the order is a function "
    "of seed and step, whatever the layout"
)


def read_config(python: str, words: Sequence[str]) -> dict[str, Any]:
    """Returns the config that a command line of `torchtitan.train` names, which the Python of its environment builds."""
    try:
        # As text, since modules beside the file have the names of others.
        command = [python, "-c", DUMP.read_text(), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--python {shown(python)} cannot be run: {shown(str(error))}") from None
    if done.returncode or not done.stdout:
        box = re.search(r"^╭.*\n│ *(.*?) *│\n│ *(.*?) *│$", done.stderr, re.MULTILINE)  # of the parser of options
        reason = done.stderr.strip().rpartition("\n")[2]
        if box:
            reason = f"{box[1]} {box[2]}" if box[1].endswith(":") else box[1]
        raise UserError(f"{shown(python)} does not build the config: {shown(reason)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def convert(name: str, values: Mapping[str, Any], num_gpus: int | None) -> Conversion:
    """Returns the recipe of a config, as `torchtitan_dump.py` prints it. Raises `UserError` for a model or data that this toolkit
    does not have."""
    if reason := UNSUPPORTED.get(str(values["model_spec"]["name"])):
        raise UserError(f'{name}: model_spec.name = "{values["model_spec"]["name"]}": {reason}')
    layers: dict[str, tuple[str, Any]] = {}
    given = _sections(name, values) | _model(name, values["model_spec"]["model"], layers) | _converters(layers)
    groups = given.pop("optimizer.param_groups", [])
    base = max((index for index, group in enumerate(groups) if group["optimizer_name"].startswith("Adam")), default=-1)
    if base < 0:
        raise UserError(f"{name}: optimizer.param_groups: no group has AdamW, which embeddings and norms have here")
    given |= _group_keys(groups[base])
    own_classes = {path: Key(reason=CODE, changes=True) for path in given if path.endswith("class")}
    sizes = {f"validation.{key}": Key(given.get(f"training.{key}", KEYS_0_3[f"training.{key}"].default), least=1)
             for key in ("seq_len", "local_batch_size")}  # fmt: skip
    keys = KEYS_0_3 | own_classes | sizes
    job = Conversion("torchtitan 0.3", name, given, keys, num_gpus, planned_as="torchtitan", names=NAMES_0_3)
    model = _model_section(job)
    is_fused = all(kind != "QKVLinear" for kind, _ in layers.values())
    convert_keys(job, model, _other_groups(job, model, groups, base, is_fused=is_fused))
    _loss(job)
    modes = job.tables["activation_checkpoint"]["mode"], job.tables["compile"]["mode"]
    if modes == ("selective", "none") and job.tables["data"].get("document_masks"):
        job.set("compile.mode", "block", "compile.enable", comment="for activation_checkpoint.mode, with FlexAttention")
        job.differ("compile: blocks are compiled here, as FlexAttention and selective activation checkpointing require")
    if job["optimizer.implementation"] == "fused_opt_states_bf16":
        job.set("optimizer.state_dtype", "bfloat16", "optimizer.implementation")
    else:
        job.leave("optimizer.implementation", "the optimizer is always fused", changes=False)
    if not job["training.disable_cuda_graphs"]:
        job.differ(CUDA_GRAPHS)
    job.differ(INITIALIZATION if model.name == "llama" else QWEN3_INITIALIZATION)
    job.differ(DATA_ORDER)
    job.finish()
    return job


def _kind(node: Any) -> str:
    """Returns the class that a config is of, without its module."""
    text = node.get("class", "") if isinstance(node, dict) else node or ""
    return str(text).removesuffix(".Config").rpartition(".")[2]


def _sections(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of everything but the model by their names in `KEYS_0_3`, and classes of a user's own."""
    old = {new: key for key, new in NAMES_0_3.items()}
    found: dict[str, Any] = {}
    for path, value in flat({key: value for key, value in values.items() if key != "model_spec"}).items():
        if path.rpartition(".")[2] != "class":
            found[old.get(path, path)] = value
        elif not re.match(r"torchtitan\.(?!experiments)", value):
            found[path] = _kind(value)
    loader = _kind(values.get("dataloader"))
    if loader == "ChatDataLoader":
        raise UserError(
            f"{name}: dataloader = {loader}: fine-tuning is not converted, because a function reads its chats; `titanlike import` "
            "takes the folder of the model instead"
        )
    if loader != "HuggingFaceTextDataLoader":
        found["training.dataset"] = loader
    found["loss"] = _kind(values.get("loss"))
    found["activation_checkpoint.mode"] = CHECKPOINTING.get(_kind(values.get("activation_checkpoint")), "full")
    return found


def _original(node: Any, path: str, layers: dict[str, tuple[str, Any]]) -> Any:
    """Returns a config before converters. `layers` gets the classes of all layers by name, and how torchao converts them."""
    if not isinstance(node, dict):
        return node
    kind = _kind(node)
    layers[path] = kind, node.get("_torchao_config")
    return {
        key: CONVERTED.get(kind, kind) if key == "class" else _original(value, f"{path}.{key}".strip("."), layers)
        for key, value in node.items()
        if key not in ("_torchao_config", "recipe_name")
    }


def _model(name: str, model: Mapping[str, Any], layers: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Returns the keys of a model, in which those of a block stand for all blocks."""
    first, *others = (_original(block, f"layers.{index}", layers) for index, block in enumerate(model["layers"]))
    if any(block != first for block in others):
        raise UserError(f"{name}: {BLOCK}: models whose blocks differ are not converted")
    ends = {key: value for key, value in model.items() if key != "layers"}
    values = flat(_original(ends, "", layers) | {"layers": first})
    kinds = {path.rpartition(".")[0]: value for path, value in values.items() if path.rpartition(".")[2] == "class"}
    dispatcher = kinds.pop("layers.moe.routed_experts.token_dispatcher", "")
    if unknown := sorted({*kinds.values()} - {*LAYERS.split()}):
        reason = "such layers are those of no model of this toolkit"
        if any("LoRA" in kind for kind in unknown):
            reason = "adapters are not converted"
        raise UserError(f"{name}: {MODEL} has {shown(', '.join(unknown))}: {reason}")
    rope = "layers.attention.rope"
    if values[f"{rope}.scaling"] == "none":
        values = {path: value for path, value in values.items() if path.removeprefix(f"{rope}.") not in SCALING}
    elif values[f"{rope}.scaling"] != "llama":
        raise UserError(f"{name}: {MODEL}.{rope}.scaling = {show_value(values[f'{rope}.scaling'])} is not converted")
    if len({value for path, value in values.items() if path.endswith(".eps")}) > 1:
        raise UserError(f"{name}: {MODEL}: its norms have different eps, which no model of this toolkit has")
    values["layers.attention.n_kv_heads"] = values["layers.attention.n_kv_heads"] or values["layers.attention.n_heads"]
    found: dict[str, Any] = {MODEL: kinds[""], f"{MODEL}.num_layers": len(model["layers"])}
    found[f"{BLOCK}.attention.inner_attention"] = kinds["layers.attention.inner_attention"]
    if dispatcher not in DISPATCHERS:
        found[f"{BLOCK}.moe.routed_experts.token_dispatcher"] = dispatcher
    for path, value in values.items():
        key = path.rpartition(".")[2]
        if value is None:
            continue
        if path in NUMBERS or "kernel_options" in path:
            found[f"{MODEL}.{path}"] = value
        elif key not in IMPLIED.split() and value != FIXED.get(key, []):
            raise UserError(f"{name}: {MODEL}.{shown(path)} = {show_value(value)}: no model of this toolkit has it")
    return found


def _converters(layers: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Returns the keys of 0.2 that describe what converters replaced."""
    kinds = {kind for kind, _ in layers.values()}
    replaced = sorted((kinds & CONVERTED.keys()) - DIST_GEMM)
    found: dict[str, Any] = {"model.converters": [FLOAT8.get(kind, kind) for kind in replaced]} if replaced else {}
    if kinds & DIST_GEMM:
        found["tp_gemm_backend"] = "dist_gemm"
    linears = {
        name: (kind, config)
        for path, (kind, config) in layers.items()
        if CONVERTED.get(kind, kind) == "Linear"
        for name in _names(path)
    }
    for kind in kinds & FLOAT8.keys():
        others = [name for name, (its_kind, _) in linears.items() if its_kind != kind]
        found[f"{FLOAT8[kind]}.filter_fqns"] = _patterns(others, linears)
    if "Float8Linear" in kinds:
        config = next(config for kind, config in linears.values() if kind == "Float8Linear") or {}
        values = flat(config)
        recipe = "rowwise"
        if values.get("cast_config_input.scaling_granularity") == "tensorwise":
            recipe = "tensorwise"
        elif values.get("cast_config_input_for_grad_weight.scaling_type") == "disabled":
            recipe = "rowwise_with_gw_hp"
        found["quantize.linear.float8.recipe_name"] = recipe
        found["quantize.linear.float8.emulate"] = bool(values.get("emulate"))
    return found


def _names(path: str) -> list[str]:
    """Returns this toolkit's names of a linear layer, which may be several in one."""
    block, _, fused = path.rpartition("qkv_linear.")
    if block:
        return [f"{block}{part}" for part in ("wq", "wk", "wv") if part[1] in fused]
    return ["output" if path == "lm_head" else path]


def _patterns(names: Collection[str], all_names: Collection[str]) -> list[str]:
    """Returns parts of names that only these have: of all blocks, of whole blocks, or the names themselves."""
    shared = {part for name in set(all_names) - set(names) for part in _parts(name)}
    return list(dict.fromkeys(next(part for part in _parts(name) if part not in shared) for name in names))


def _parts(name: str) -> list[str]:
    """Returns what a name shares with those of other blocks, and with those of its block, if it is in one, and itself."""
    block = re.fullmatch(r"(layers\.\d+)\.(.+)", name)
    return [block[2], block[1], name] if block else [name]


def _group_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of 0.2 of a group of parameters, with the defaults of torch."""
    name = group["optimizer_name"]
    options: dict[str, Any] = {
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01 if name == "AdamW" else 0.0,
    }
    options |= group["optimizer_kwargs"]
    beta1, beta2 = options.pop("betas")
    if name == "Adam" and not options["weight_decay"]:
        name = "AdamW"  # which differ in it only
    return {
        f"optimizer.{key}": value for key, value in {"name": name, "beta1": beta1, "beta2": beta2, **options}.items()
    }


def _other_groups(
    job: Conversion, model: TransformerConfig, groups: Sequence[Mapping[str, Any]], base: int, *, is_fused: bool
) -> list[dict[str, Any]]:
    """Returns `optimizer.groups` for parameters outside of the base group: the first pattern that matches a name decides."""
    owners: dict[str, int] = {}
    for name, spec in model.parameters().items():
        if spec.keeps_float32:  # a bias of experts, which no optimizer updates
            continue
        theirs = name_in_0_3(name, is_fused=is_fused)
        owners[name] = next((index for index, group in enumerate(groups) if re.search(group["pattern"], theirs)), base)
    found = []
    for index in sorted(set(owners.values()) - {base}):
        options = _group_keys(groups[index])
        table = {
            "optimizer": "muon" if options["optimizer.name"] == "DistMuon" else "adamw",
            "lr_scale": options["optimizer.lr"] / job["optimizer.lr"],
            "weight_decay": options["optimizer.weight_decay"],
        }
        names = [name for name, owner in owners.items() if owner == index]
        found += [{"pattern": pattern.removesuffix(".weight"), **table} for pattern in _patterns(names, owners)]
        for key in ("beta1", "beta2", "eps"):
            if options[f"optimizer.{key}"] != job[f"optimizer.{key}"]:
                value = show_value(options[f"optimizer.{key}"])
                job.differ(f"optimizer.param_groups.{index}: {key} = {value}; all parameters have optimizer.{key} here")
    return found


def _model_section(job: Conversion) -> TransformerConfig:
    """Sets the model of a job by its numbers, and returns its config."""
    family = FAMILIES.get(job[MODEL], "")
    if f"{BLOCK}.moe.num_experts" in job.given:
        family = {"qwen3": "qwen3_moe"}.get(family, "")
    if not family:
        raise UserError(f"{job.source}: {MODEL} = {shown(str(job[MODEL]))} is no model that is converted")
    cls = config_class(family)
    job.set("model.name", family, MODEL)
    fields: dict[str, Any] = {"name": family}
    for key, known in NUMBERS.items():
        path, field = f"{MODEL}.{key}", known.ours.removeprefix("model.")
        if path not in job.given:
            continue
        value = job[path]
        if field == "max_seq_len":
            value = max(value, job["training.seq_len"])
        if not cls.has_field(field) and value == getattr(cls, field, None):
            job.leave(path, f"every {family} has it", changes=False)
            continue
        fields[field] = value
        job.set(known.ours, value, path)
    kernel = f"{BLOCK}.attention.inner_attention"
    if job[kernel] in MASKED:
        job.set("data.document_masks", MASKED[job[kernel]], kernel, comment="position ids restart at each document")
        job.plan_changes["attention"] = ""  # the recipe's
    return job.checked(cls, fields)


def _loss(job: Conversion) -> None:
    if job["loss"] != "ChunkedLossWrapper":
        job.set("training.loss_chunk", 0, "loss")
        return
    chunks, context = job["loss.num_chunks"], job["parallelism.context_parallel_degree"]
    tokens = job.tables["training"]["local_batch_size"] * job["training.seq_len"] // (chunks * context)
    comment = f"tokens: {chunks} chunks of a micro-batch"
    job.set("training.loss_chunk", max(1, tokens), "loss.num_chunks", comment=comment)
    job.plan_changes |= {"eager_loss": False, "logit_bytes": 0}
