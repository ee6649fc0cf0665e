"""Job configs of torchtitan 0.1 to 0.2.2 as recipes. `formats.py` calls it for `titanlike import` and `titanlike plan`."""

import math
from collections.abc import Mapping
from typing import Any

from titanlike.config.base import UserError
from titanlike.config.sections import Schedule
from titanlike.tools.migration.conversion import Conversion, Key, largest_difference, stage_sizes
from titanlike.tools.migration.torchtitan_models import SOURCE_C4, VALIDATION_C4, model_section

OPTIONAL_TEXT, OPTIONAL_INT = (str,), (int,)
MAX_COMPARED = 100_000  # steps of a schedule
MAX_TRACES = 10  # of a recipe; torchtitan has no limit

LOGS = "the run directory has all files of a run"
CODE = "code of your own: copy a program and change it (docs/copy.md)"
ALWAYS = "always on here"
TIMEOUT = "of one collective; run.hang_timeout is that of a whole step"
FT = "torchft; MAX_RESTARTS=n restarts a job from its newest checkpoint"
ESTIMATE = "`titanlike plan` computes memory"
DEBUG = "for debugging torchtitan"
LOADER = "of torch's DataLoader; a thread prepares data.prefetch batches here"
AC_DETAIL = "a detail of torchtitan's selective checkpointing, which keeps other outputs"
MX_KERNEL = "the kernel is chosen by torch.compile"

# All keys of the dataclasses of torchtitan v0.1.0, v0.2.0, v0.2.1 and v0.2.2, with their defaults.
KEYS: dict[str, Key] = {
    "job.config_file": Key("", reason="the recipe is the first argument of the command"),
    "job.dump_folder": Key("./outputs", ours="run.dir"),
    "job.description": Key("default job", reason="a description"),
    "job.use_for_integration_test": Key(False, reason=DEBUG),
    "job.print_args": Key(False, reason="--resolved prints the recipe"),
    "job.print_config": Key(False, reason="--resolved prints the recipe"),
    "job.save_config_file": Key("", reason="the run directory has the resolved recipe"),
    "job.custom_config_module": Key("", reason=CODE, changes=True),
    "profiling.enable_profiling": Key(False),
    "profiling.save_traces_folder": Key("profile_traces", reason=LOGS),
    "profiling.profile_freq": Key(10),
    "profiling.profiler_active": Key(1),
    "profiling.profiler_warmup": Key(3, reason="a trace here begins after one step of warmup"),
    "profiling.enable_memory_snapshot": Key(False, ours="profiling.memory"),
    "profiling.save_memory_snapshot_folder": Key("memory_snapshot", reason=LOGS),
    "metrics.log_freq": Key(10, ours="metrics.interval"),
    "metrics.enable_tensorboard": Key(False),
    "metrics.enable_wandb": Key(False),
    "metrics.disable_color_printing": Key(False, reason="NO_COLOR=1 disables colors"),
    "metrics.save_tb_folder": Key("tb", reason=LOGS),
    "metrics.save_for_all_ranks": Key(False, reason="rank 0 records metrics of all ranks"),
    "model.name": Key("llama3"),
    "model.flavor": Key("debugmodel"),
    "model.hf_assets_path": Key("./tests/assets/tokenizer"),
    "model.tokenizer_path": Key("", types=OPTIONAL_TEXT),
    "model.converters": Key([]),
    "model.print_after_conversion": Key(False, reason="the start of a run prints what is converted"),
    "optimizer.name": Key("AdamW"),
    "optimizer.lr": Key(8e-4, ours="optimizer.lr"),
    "optimizer.beta1": Key(0.9, ours="optimizer.beta1"),
    "optimizer.beta2": Key(0.95, ours="optimizer.beta2"),
    "optimizer.eps": Key(1e-8, ours="optimizer.eps"),
    "optimizer.weight_decay": Key(0.1),
    "optimizer.implementation": Key("fused", reason="the optimizer is always fused"),
    "optimizer.early_step_in_backward": Key(
        False,
        reason="the step follows the backward pass, as clipping needs; this takes memory for gradients",
        changes=True,
    ),
    "lr_scheduler.warmup_steps": Key(200),
    "lr_scheduler.total_steps": Key(None, types=OPTIONAL_INT),
    "lr_scheduler.decay_ratio": Key(None, types=(float,)),
    "lr_scheduler.decay_type": Key("linear"),
    "lr_scheduler.min_lr_factor": Key(0.0),
    "lr_scheduler.lr_min": Key(0.0),
    "training.dataset": Key("c4_test"),
    "training.dataset_path": Key("", types=OPTIONAL_TEXT),
    "training.local_batch_size": Key(8),
    "training.global_batch_size": Key(-1),
    "training.seq_len": Key(2048, ours="training.seq_len"),
    "training.max_norm": Key(1.0, ours="training.max_norm"),
    "training.steps": Key(10000, ours="training.steps"),
    "training.enable_cpu_offload": Key(False, ours="parallelism.cpu_offload"),
    "training.dtype": Key("float32", ours="training.master_dtype"),
    "training.mixed_precision_param": Key("bfloat16", ours="training.compute_dtype"),
    "training.mixed_precision_reduce": Key("float32", ours="training.reduce_dtype"),
    "training.compile": Key(False),
    "training.gc_freq": Key(50, reason="every 50 steps here"),
    "training.gc_debug": Key(False, reason=DEBUG),
    "training.seed": Key(None, types=OPTIONAL_INT),
    "training.deterministic": Key(False),
    "training.debug_moe_force_load_balance": Key(False, reason=DEBUG, changes=True),
    "training.dataloader.num_workers": Key(0, reason=LOADER),
    "training.dataloader.persistent_workers": Key(False, reason=LOADER),
    "training.dataloader.pin_memory": Key(False, reason="memory is pinned on GPUs"),
    "training.dataloader.prefetch_factor": Key(0, reason=LOADER),
    "parallelism.data_parallel_replicate_degree": Key(1, ours="parallelism.replicate"),
    "parallelism.data_parallel_shard_degree": Key(-1, ours="parallelism.shard"),
    "parallelism.fsdp_reshard_after_forward": Key("default"),
    "parallelism.tensor_parallel_degree": Key(1, ours="parallelism.tensor"),
    "parallelism.disable_loss_parallel": Key(
        False, reason="the loss is always parallel; the result is the same", changes=True
    ),
    "parallelism.enable_async_tensor_parallel": Key(False),
    "parallelism.enable_compiled_autograd": Key(
        False, reason="the backward pass of each block is compiled", changes=True
    ),
    "parallelism.pipeline_parallel_degree": Key(1, ours="parallelism.pipeline"),
    "parallelism.pipeline_parallel_split_points": Key([]),
    "parallelism.module_fqns_per_model_part": Key([]),
    "parallelism.pipeline_parallel_first_stage_less_layers": Key(1),
    "parallelism.pipeline_parallel_last_stage_less_layers": Key(1),
    "parallelism.pipeline_parallel_layers_per_stage": Key(None, types=OPTIONAL_INT),
    "parallelism.pipeline_parallel_schedule": Key("1F1B"),
    "parallelism.pipeline_parallel_schedule_csv": Key("", reason="only schedules of torch are supported", changes=True),
    "parallelism.pipeline_parallel_microbatch_size": Key(1),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Key(True, reason="not overlapped here", changes=False),
    "parallelism.context_parallel_degree": Key(1, ours="parallelism.context"),
    "parallelism.context_parallel_load_balancer": Key(
        "headtail", reason="sequences are always balanced by head and tail; the result is the same", changes=True
    ),
    "parallelism.context_parallel_rotate_method": Key(
        "allgather", reason="keys and values are always all-gathered; the result is the same", changes=True
    ),
    "parallelism.expert_parallel_degree": Key(1, ours="parallelism.expert"),
    "parallelism.expert_tensor_parallel_degree": Key(1),
    "parallelism.expert_parallel_comm_backend": Key(
        "standard", reason="tokens travel by torch's all-to-all", changes=True
    ),
    "checkpoint.enable": Key(False),
    "checkpoint.enable_checkpoint": Key(False),
    "checkpoint.enable_ft_dataloader_checkpoints": Key(True, reason=FT),
    "checkpoint.folder": Key(
        "checkpoint", reason="checkpoints are in the run directory; checkpoint.dir names another place"
    ),
    "checkpoint.interval": Key(500, ours="checkpoint.interval"),
    "checkpoint.initial_load_path": Key("", types=OPTIONAL_TEXT),
    "checkpoint.initial_load_model_only": Key(True),
    "checkpoint.initial_load_model_weights_only": Key(True),
    "checkpoint.initial_load_in_hf": Key(False),
    "checkpoint.initial_load_in_hf_quantized": Key(False, reason="quantized weights are not read", changes=True),
    "checkpoint.last_save_model_only": Key(
        True, reason="the last checkpoint is a whole one too; `titanlike export` writes weights"
    ),
    "checkpoint.last_save_model_weights_only": Key(
        False, reason="the last checkpoint is a whole one too; `titanlike export` writes weights"
    ),
    "checkpoint.last_save_in_hf": Key(False),
    "checkpoint.export_dtype": Key("float32"),
    "checkpoint.async_mode": Key("disabled"),
    "checkpoint.keep_latest_k": Key(10),
    "checkpoint.load_step": Key(-1),
    "checkpoint.exclude_from_loading": Key(
        [], reason="a checkpoint is loaded whole; checkpoint.initial loads weights", changes=True
    ),
    "checkpoint.enable_first_step_checkpoint": Key(
        False, reason="checkpoint.interval = 1 saves every step", changes=True
    ),
    "checkpoint.create_seed_checkpoint": Key(False, reason="initial weights do not depend on the layout"),
    "checkpoint.load_only": Key(False),
    "activation_checkpoint.mode": Key("selective"),
    "activation_checkpoint.selective_ac_option": Key("2"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Key(["moe.router.gate"], reason=AC_DETAIL),
    "activation_checkpoint.early_stop": Key(False, reason=AC_DETAIL),
    "activation_checkpoint.memory_budget": Key(0.5, ours="activation_checkpoint.memory_budget"),
    "activation_checkpoint.visualize_memory_budget_pareto": Key(False, reason=DEBUG),
    "activation_checkpoint.preserve_rng_state": Key(
        True, types=(bool,), reason="random numbers are functions of their position here"
    ),
    "activation_checkpoint.determinism_check": Key("default", reason=DEBUG),
    "activation_checkpoint.debug": Key(False, reason=DEBUG),
    "compile.enable": Key(False),
    "compile.components": Key(["model", "loss"]),
    "compile.backend": Key("inductor", ours="compile.backend"),
    "comm.init_timeout_seconds": Key(300, reason=TIMEOUT),
    "comm.train_timeout_seconds": Key(100, reason=TIMEOUT),
    "comm.trace_buf_size": Key(20000, reason="the watchdog names the missing rank"),
    "comm.save_traces_folder": Key("comm_traces", reason=LOGS),
    "comm.save_traces_file_prefix": Key("rank_", reason=LOGS),
    "comm.mode": Key("default", reason="--check and `titanlike verify` need no GPU", changes=True),
    "memory_estimation.enable": Key(False, reason=ESTIMATE),
    "memory_estimation.enabled": Key(False, reason=ESTIMATE),
    "memory_estimation.disable_fake_mode": Key(False, reason=ESTIMATE),
    "fault_tolerance.enable": Key(False, reason=FT, changes=True),
    "fault_tolerance.semi_sync_method": Key("", reason="gradients are synchronized in every step", changes=True),
    "experimental.custom_import": Key("", reason=CODE, changes=True),
    "experimental.custom_args_module": Key("", reason=CODE, changes=True),
    "validation.enable": Key(False),
    "validation.dataset": Key("c4_validation"),
    "validation.dataset_path": Key("", types=OPTIONAL_TEXT),
    "validation.local_batch_size": Key(8),
    "validation.seq_len": Key(2048),
    "validation.freq": Key(10),
    "validation.steps": Key(-1),
    "validation.dataloader.num_workers": Key(0, reason=LOADER),
    "validation.dataloader.persistent_workers": Key(False, reason=LOADER),
    "validation.dataloader.pin_memory": Key(False, reason="memory is pinned on GPUs"),
    "validation.dataloader.prefetch_factor": Key(0, reason=LOADER),
    "debug.seed": Key(None, types=OPTIONAL_INT),
    "debug.deterministic": Key(False),
    "debug.deterministic_warn_only": Key(
        False, reason="an operation without a deterministic implementation is an error"
    ),
    "debug.moe_force_load_balance": Key(False, reason=DEBUG, changes=True),
    "quantize.grouped_mm.float8.fqns": Key([], types=(list, str)),
    "quantize.grouped_mm.mx.fqns": Key([], types=(list, str)),
    "quantize.grouped_mm.mx.recipe_name": Key("mxfp8", reason="experts are not quantized"),
}
for _name in ("process_group", "process_group_timeout_ms", "replica_id", "group_size", "min_replica_size", "sync_steps",
              "should_quantize", "fragment_sync_delay", "fragment_update_alpha"):  # fmt: skip
    KEYS[f"fault_tolerance.{_name}"] = Key(reason=FT)
# The tables of float8 and MX were at the top in 0.1.
for _prefix in ("float8", "quantize.linear.float8"):
    KEYS |= {
        f"{_prefix}.enable_fsdp_float8_all_gather": Key(False),
        f"{_prefix}.precompute_float8_dynamic_scale_for_fsdp": Key(
            False, reason="the scales of all weights are computed together"
        ),
        f"{_prefix}.force_recompute_fp8_weight_in_bwd": Key(
            False, reason="FSDP gathers weights again for the backward pass"
        ),
        f"{_prefix}.recipe_name": Key("", types=OPTIONAL_TEXT),
        f"{_prefix}.filter_fqns": Key([]),
        f"{_prefix}.emulate": Key(False),
    }
for _prefix in ("mx", "quantize.linear.mx"):
    KEYS |= {
        f"{_prefix}.recipe_name": Key("mxfp8_cublas"),
        f"{_prefix}.filter_fqns": Key(["output"]),
        f"{_prefix}.use_fp8_dim1_cast_triton_kernel": Key(True, reason=MX_KERNEL),
        f"{_prefix}.mxfp8_dim1_cast_kernel_choice": Key("triton", reason=MX_KERNEL),
    }
# Keys that only one of the versions has, by which a file is told.
ONLY_0_1 = {
    *("job.print_args", "job.use_for_integration_test", "training.compile", "lr_scheduler.lr_min"),
    *("checkpoint.enable_checkpoint", "checkpoint.last_save_model_weights_only", "memory_estimation.enabled"),
    *("checkpoint.initial_load_model_weights_only", "parallelism.pipeline_parallel_split_points"),
    *(key for key in KEYS if key.startswith(("float8.", "mx."))),
}

# Keys of before 0.1 that change results if they are left out.
RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
}

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved_1f1b",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
INITIALIZATION = (
    "initial weights: normal with a standard deviation of 1 for the embedding, dim**-0.5 for the head, and for wo, w2 and w3 "
    "of block i "
    "0.02 / sqrt(2 * (i + 1)); here 0.02, and 0.02 / sqrt(2 * num_layers) for wo and w2"
)
DATA_ORDER = (
    "data: each rank reads its part of the stream and skips a token between sequences; here the order is a function of seed "
    "and step, "
    "whatever the layout"
)


def convert(name: str, values: Mapping[str, Any], num_gpus: int | None) -> Conversion:
    """Returns the recipe of a job config. Raises `UserError` for a model that this toolkit does not have.

    Args:
        num_gpus: of the job, which its batch size may depend on.
    """
    given = dict(_flat(values))
    if predecessors := sorted(RENAMED.keys() & given.keys()):
        raise UserError(
            f"{name}: {', '.join(predecessors)}: torchtitan 0.1 renamed it; write "
            f"{', '.join(RENAMED[key] for key in predecessors)} instead"
        )
    is_old = bool(ONLY_0_1 & given.keys()) or ("model.tokenizer_path" in given and "model.hf_assets_path" not in given)
    version = "0.1" if is_old else "0.2"
    job = Conversion(f"torchtitan {version}", name, given, KEYS, num_gpus, planned_as="torchtitan")
    model = model_section(job, is_old=is_old)
    _tokens(job)
    data_ranks = _batch(job)
    _optimizer(job)
    _schedule(job)
    _layout(job, model.num_layers)
    _float8(job, model.matrices())
    _compute(job, is_old=is_old)
    _checkpoint(job)
    _validation(job, data_ranks)
    _observation(job)
    job.differ(INITIALIZATION)
    job.differ(DATA_ORDER)
    job.finish()
    return job


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _tokens(job: Conversion) -> None:
    """Tokenizer and training data."""
    old, new = job["model.tokenizer_path"], job["model.hf_assets_path"]
    if old and "model.hf_assets_path" not in job.given:
        job.set("tokenizer.encoding", old, "model.tokenizer_path")
    else:
        job.leave("model.tokenizer_path", "model.hf_assets_path takes precedence", changes=False)
        job.set("tokenizer.encoding", new, "model.hf_assets_path")
    job.set("tokenizer.special", "both", comment="torchtitan delimits documents on both sides")
    name, path = job["training.dataset"].lower(), job["training.dataset_path"]
    job.use("training.dataset", "training.dataset_path")
    job.set("data.source", "text" if name == "c4_test" else "stream", "training.dataset")
    known = {"c4": SOURCE_C4, "c4_test": "tests/assets/c4_test", "c4_validation": VALIDATION_C4}
    if path:
        job.set("data.path", path, "training.dataset_path", comment="a folder or pattern of .jsonl or .parquet files")
    elif name in known:
        job.set("data.path", known[name], "training.dataset")
    else:
        job.set(
            "data.path", "", "training.dataset", comment="name its files here: the recipe does not run without them"
        )
        job.leave("training.dataset", "a data set of your own; set data.path to its files")


def _batch(job: Conversion) -> int:
    """Batch sizes. Returns the number of data-parallel ranks, 0 if the file does not tell it."""
    replicate, shard = job["parallelism.data_parallel_replicate_degree"], job["parallelism.data_parallel_shard_degree"]
    others = math.prod(job[f"parallelism.{name}_parallel_degree"] for name in ("tensor", "context", "pipeline"))
    if shard == -1 and job.num_gpus:
        shard = job.num_gpus // max(1, replicate * others)
        if shard * replicate * others != job.num_gpus or not shard:
            raise UserError(
                f"{job.source}: its layout needs a multiple of {replicate * others} GPUs, not {job.num_gpus}; give --gpus"
            )
    data_ranks = replicate * max(0, shard)
    local, total = job["training.local_batch_size"], job["training.global_batch_size"]
    if total > 0:
        job.set("training.global_batch_size", total, "training.global_batch_size")
    elif not data_ranks:
        raise UserError(
            f"{job.source}: training.global_batch_size is not set, so that the batch is training.local_batch_size = {local} "
            "sequences on "
            "each data-parallel rank; give the number of GPUs of the job, such as --gpus 8"
        )
    else:
        job.batch_grows = True
        comment = f"{local} on each of {data_ranks} data-parallel ranks; torchtitan's batch grows with the GPUs"
        keys = ("training.local_batch_size", "training.global_batch_size")
        job.set("training.global_batch_size", local * data_ranks, *keys, comment=comment)
    if job["parallelism.pipeline_parallel_degree"] > 1:
        job.use("training.local_batch_size")
        job.set(
            "training.local_batch_size",
            job["parallelism.pipeline_parallel_microbatch_size"],
            "parallelism.pipeline_parallel_microbatch_size",
            comment=f"the micro-batch of the pipeline, which torchtitan cuts out of {local} sequences",
        )
    else:
        job.leave("parallelism.pipeline_parallel_microbatch_size", "there is no pipeline", changes=False)
        job.set("training.local_batch_size", local, "training.local_batch_size")
    return data_ranks


def _optimizer(job: Conversion) -> None:
    decay = job["optimizer.weight_decay"]
    job.set("optimizer.weight_decay", decay, "optimizer.weight_decay")
    if decay:
        job.set(
            "optimizer.groups",
            [{"pattern": "*", "weight_decay": decay}],
            "optimizer.weight_decay",
            comment="norms too, as torchtitan decays them; without this line, matrices and embeddings only",
        )
    job.use("optimizer.name")
    if job["optimizer.name"] != "AdamW":
        job.leave("optimizer.name", "AdamW here; Adam adds weight decay to the gradient instead")


def _schedule(job: Conversion) -> None:
    steps, given_warmup = job["training.steps"], job["lr_scheduler.warmup_steps"]
    if job["lr_scheduler.total_steps"] not in (None, steps):
        job.leave(
            "lr_scheduler.total_steps",
            f"the schedule here ends at training.steps; set training.steps to it, and stop the run at step {steps}",
        )
    job.use("lr_scheduler.total_steps")
    warmup = min(given_warmup, steps)
    kind, ratio = job["lr_scheduler.decay_type"], job["lr_scheduler.decay_ratio"]
    factor_key = "lr_scheduler.lr_min" if "lr_scheduler.lr_min" in job.given else "lr_scheduler.min_lr_factor"
    job.use("lr_scheduler.min_lr_factor")
    length = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    comment = f"torchtitan limits {given_warmup} to all steps" if warmup != given_warmup else ""
    job.set("schedule.warmup_steps", warmup, "lr_scheduler.warmup_steps", comment=comment)
    job.set("schedule.decay", kind if length else "none", "lr_scheduler.decay_type")
    whole = ratio is None or not length or length == steps - warmup
    job.set("schedule.decay_ratio", 0.0 if whole else float(ratio), "lr_scheduler.decay_ratio",
            comment="0: all steps after the warmup" if whole else "")  # fmt: skip
    job.set("schedule.min_ratio", job[factor_key], factor_key)
    section = Schedule(warmup, kind if length else "none", 0.0 if whole else float(ratio), float(job[factor_key]))
    difference, step = schedule_difference(section, steps)
    if difference > 0:
        job.differ(
            "learning rate: the decay begins one step later and would reach its end one step after the last; the largest "
            "difference is "
            f"{difference:.2%} of the peak, at step {step}"
        )


def torchtitan_learning_rate(step: int, num_steps: int, section: Schedule) -> float:
    """Returns torchtitan's learning rate of a step, counted from 1, as a fraction of the peak."""
    if step <= section.warmup_steps:
        return step / section.warmup_steps
    length = section.num_decay_steps(num_steps) if section.decay != "none" else 0
    progress = (step - (num_steps + 1 - length)) / max(length, 1)  # a step behind this toolkit's
    if not length or progress <= 0:
        return 1.0
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "sqrt": 1.0 - math.sqrt(progress),
    }[section.decay]
    return section.min_ratio + (1.0 - section.min_ratio) * remaining


def schedule_difference(section: Schedule, num_steps: int) -> tuple[float, int]:
    """Returns the largest difference from torchtitan's learning rate, as a fraction of the peak, and its step."""
    from titanlike.optim.schedule import learning_rate  # imports torch

    steps = range(1, num_steps + 1, -(-num_steps // MAX_COMPARED))
    return largest_difference(
        [learning_rate(step, num_steps, 1.0, section) for step in steps],
        [torchtitan_learning_rate(step, num_steps, section) for step in steps],
        steps,
    )


def _layout(job: Conversion, num_layers: int) -> None:
    """FSDP and pipeline; sizes of dimensions have a key each."""
    reshard = job["parallelism.fsdp_reshard_after_forward"]
    job.set(
        "parallelism.reshard_after_forward",
        {"default": "auto"}.get(reshard, reshard),
        "parallelism.fsdp_reshard_after_forward",
    )
    asynchronous = job["parallelism.enable_async_tensor_parallel"]
    job.use("parallelism.enable_async_tensor_parallel")
    if asynchronous and job["parallelism.tensor_parallel_degree"] == 1:
        job.leave("parallelism.enable_async_tensor_parallel", "there is no tensor parallelism", changes=False)
    else:
        job.set("parallelism.async_tensor_parallel", asynchronous, "parallelism.enable_async_tensor_parallel")
    tensor, expert_tensor = job["parallelism.tensor_parallel_degree"], job["parallelism.expert_tensor_parallel_degree"]
    job.use("parallelism.expert_tensor_parallel_degree")
    if job["parallelism.expert_parallel_degree"] > 1 and expert_tensor != tensor:
        job.leave(
            "parallelism.expert_tensor_parallel_degree",
            f"parallelism.tensor = {tensor} shards every expert here as well",
        )
    stage_keys = [
        f"parallelism.{name}"
        for name in ("pipeline_parallel_split_points", "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
                     "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule")
    ]  # fmt: skip
    pipeline = job["parallelism.pipeline_parallel_degree"]
    if pipeline == 1:
        for key in stage_keys:
            job.leave(key, "there is no pipeline", changes=False)
        return
    points, modules, first, last, per_stage, name = (job[key] for key in stage_keys)
    job.use(*stage_keys)
    schedule = SCHEDULES.get(name.lower())
    if schedule is None:
        raise UserError(
            f"{job.source}: parallelism.pipeline_parallel_schedule = {name!r} is not supported; use one of 1F1B, GPipe, "
            "Interleaved1F1B, "
            "InterleavedZeroBubble, ZBVZeroBubble and DualPipeV"
        )
    job.set("parallelism.pipeline_schedule", schedule, stage_keys[-1])
    if modules:
        sizes = [sum(str(module).startswith("layers.") for module in part) for part in modules]
    elif points:
        ends = [int(str(point).rpartition(".")[2]) for point in points]
        sizes = [end - start for start, end in zip([0, *ends], [*ends, num_layers], strict=True)]
    elif per_stage:
        sizes = stage_sizes(num_layers, -(-(num_layers + first + last) // max(1, per_stage)), first, last)
    else:
        sizes = stage_sizes(num_layers, pipeline * (1 if schedule in ("1f1b", "gpipe") else 2), first, last)
    if min(sizes) < 1:
        job.differ(
            f"pipeline: torchtitan has stages of {sizes} blocks; each has at least one here, and parallelism.pipeline_split "
            "is left to its default"
        )
    else:
        job.set("parallelism.pipeline_split", sizes, *stage_keys[:5], comment="as torchtitan divides the blocks")


def _float8(job: Conversion, matrices: Mapping[str, Any]) -> None:
    converters = [str(name).removeprefix("quantize.") for name in job["model.converters"]]
    known = {"float8": "float8", "linear.float8": "float8", "mx": "mx", "linear.mx": "mx"}
    used = {known[name] for name in converters if name in known}
    job.use("model.converters")
    if unknown := [name for name in converters if name not in known]:
        job.leave("model.converters", f"{', '.join(unknown)}: experts and other layers are not converted here")
    for kind in ("grouped_mm.float8", "grouped_mm.mx"):
        job.leave(f"quantize.{kind}.fqns", "experts are not quantized here", changes=kind in converters)
    tables = {kind: [kind, f"quantize.linear.{kind}"] for kind in ("float8", "mx")}
    for kind in {"float8", "mx"} - used:
        for table in tables[kind]:
            for key in [key for key in job.given if key.startswith(f"{table}.")]:
                job.leave(key, f"model.converters does not name {kind}", changes=False)
    if len(used) != 1:
        if used:
            job.leave("model.converters", "float8 and MX exclude each other here")
        return
    kind = used.pop()
    table = next((one for one in tables[kind] if any(key.startswith(f"{one}.") for key in job.given)), tables[kind][-1])
    scaling = (job[f"{table}.recipe_name"] or "tensorwise") if kind == "float8" else "mxfp8"
    job.set("float8.scaling", scaling, f"{table}.recipe_name", "model.converters")
    if kind == "float8":
        job.set(
            "float8.all_gather", job[f"{table}.enable_fsdp_float8_all_gather"], f"{table}.enable_fsdp_float8_all_gather"
        )
        job.set("float8.emulate", job[f"{table}.emulate"], f"{table}.emulate")
    filters = [str(name) for name in job[f"{table}.filter_fqns"]]
    automatic = "auto_filter_small_kn" in filters
    job.set("float8.layers", [] if automatic else ["*"], f"{table}.filter_fqns",
            comment="those that are large enough" if automatic else "torchtitan converts small ones too")  # fmt: skip
    job.set("float8.head", "output" not in filters, f"{table}.filter_fqns")
    named = [name for name in filters if name not in ("output", "auto_filter_small_kn")]
    skip = [name for name in named if any(f".{name}." in f".{matrix}." for matrix in matrices)]
    job.set("float8.skip", skip, f"{table}.filter_fqns")
    if ignored := [name for name in named if name not in skip]:
        job.comments["float8.skip"] += f"; without {', '.join(ignored)}, which no layer is named after here"


def _compute(job: Conversion, *, is_old: bool) -> None:
    """torch.compile and activation checkpointing."""
    enabled = job["training.compile"] if is_old and "compile.enable" not in job.given else job["compile.enable"]
    components = job["compile.components"]
    job.use("training.compile", "compile.enable", "compile.components")
    compiled = enabled and "model" in components
    key = "training.compile" if "training.compile" in job.given else "compile.enable"
    job.set("compile.mode", "block" if compiled else "none", key, "compile.components")
    if enabled and "loss" in components:
        job.plan_changes["eager_loss"] = False
    mode, option = job["activation_checkpoint.mode"], job["activation_checkpoint.selective_ac_option"]
    job.use("activation_checkpoint.selective_ac_option")
    if mode == "selective" and option == "1":
        mode = "full"
    job.set(
        "activation_checkpoint.mode", mode, "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    )
    if mode == "selective" and option != "op":
        job.lack(
            "activation_checkpoint.selective_ac_option",
            f"every {option} blocks are recomputed whole there; here each keeps some outputs, which takes other memory and time",
        )
    seed = "debug.seed" if "debug.seed" in job.given else "training.seed"
    if (value := job[seed]) is not None:
        job.set("run.seed", value, seed)
    job.use("debug.seed", "training.seed", "debug.deterministic", "training.deterministic")
    deterministic = job["debug.deterministic"] or job["training.deterministic"]
    job.set("run.deterministic", deterministic, "debug.deterministic", "training.deterministic")


def _checkpoint(job: Conversion) -> None:
    key = "checkpoint.enable_checkpoint" if "checkpoint.enable_checkpoint" in job.given else "checkpoint.enable"
    job.use("checkpoint.enable", "checkpoint.enable_checkpoint", "checkpoint.load_only")
    job.set("checkpoint.enabled", job[key] and not job["checkpoint.load_only"], key, "checkpoint.load_only")
    mode, keep = job["checkpoint.async_mode"], job["checkpoint.keep_latest_k"]
    job.set("checkpoint.mode", "sync" if mode == "disabled" else "async", "checkpoint.async_mode")
    if keep > 0:
        job.set("checkpoint.keep", keep, "checkpoint.keep_latest_k")
    else:
        job.set("checkpoint.keep_every", 1, "checkpoint.keep_latest_k", comment="keeps all")
    job.use("checkpoint.load_step")
    if job["checkpoint.load_step"] > 0:
        job.leave(
            "checkpoint.load_step",
            "a checkpoint of torchtitan is imported with `titanlike import ... --from torchtitan`",
        )
    path, in_hf = job["checkpoint.initial_load_path"], job["checkpoint.initial_load_in_hf"]
    job.use("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf", "checkpoint.initial_load_model_only",
            "checkpoint.initial_load_model_weights_only")  # fmt: skip
    if path and in_hf:
        job.set("checkpoint.initial", path, "checkpoint.initial_load_path")
    elif path:
        job.leave(
            "checkpoint.initial_load_path",
            "a distributed checkpoint: `titanlike import ... --from torchtitan` converts it",
        )
    elif in_hf:
        job.set("checkpoint.initial", job["model.hf_assets_path"], "model.hf_assets_path")
    dtype = job["checkpoint.export_dtype"]
    job.use("checkpoint.last_save_in_hf", "checkpoint.export_dtype")
    if job["checkpoint.last_save_in_hf"] and dtype != "float16":
        job.set("checkpoint.export", dtype, "checkpoint.last_save_in_hf", "checkpoint.export_dtype")
    elif dtype == "float16":
        job.leave(
            "checkpoint.export_dtype",
            "`titanlike export RUN FOLDER --dtype float16` writes such weights",
            changes=False,
        )


def _validation(job: Conversion, data_ranks: int) -> None:
    keys = [
        f"validation.{name}"
        for name in ("enable", "freq", "steps", "local_batch_size", "dataset", "dataset_path", "seq_len")
    ]
    enabled, freq, steps, local, dataset, path, seq_len = (job[key] for key in keys)
    job.set("data.holdout_every", 0, comment="torchtitan holds out nothing of the training data")
    if not enabled:
        for key in keys[1:]:
            job.leave(key, "validation is off", changes=False)
        job.set("validation.interval", 0, keys[0])
        return
    job.use(*keys)
    job.set("validation.interval", freq, "validation.freq", "validation.enable")
    total = job.tables["training"]["global_batch_size"]
    sequences = steps * local * max(1, data_ranks)
    batches = max(1, -(-sequences // total)) if steps > 0 else 10**6
    comment = f"{steps} steps of {local} sequences on {max(1, data_ranks)} ranks" if steps > 0 else "all of the data"
    job.set("validation.batches", batches, "validation.steps", "validation.local_batch_size", comment=comment)
    job.set("data.validation_path", path or (VALIDATION_C4 if dataset == "c4_validation" else dataset),
            "validation.dataset_path", "validation.dataset")  # fmt: skip
    if seq_len != job["training.seq_len"]:
        job.lack("validation.seq_len", f"validation has sequences of training.seq_len = {job['training.seq_len']}")


def _observation(job: Conversion) -> None:
    """Metrics and traces."""
    trackers = [name for name in ("tensorboard", "wandb") if job[f"metrics.enable_{name}"]]
    job.set("metrics.trackers", trackers, "metrics.enable_tensorboard", "metrics.enable_wandb")
    keys = ("profiling.enable_profiling", "profiling.profile_freq", "profiling.profiler_active")
    enabled, freq, active = (job[key] for key in keys)
    if not enabled:
        job.use(keys[0])
        for key in keys[1:]:
            job.leave(key, "profiling is off", changes=False)
        return
    freq, active = max(1, freq), max(1, min(active, freq))
    starts = list(range(freq - active + 1, job["training.steps"] + 1, freq))
    comment = f"the first {MAX_TRACES} of {len(starts)}" if len(starts) > MAX_TRACES else ""
    job.set("profiling.steps", starts[:MAX_TRACES], *keys, comment=comment)
    job.set("profiling.num_steps", active, "profiling.profiler_active")
