"""Keys of torchtitan's job configs: their defaults, and why some have no counterpart. `torchtitan.py` reads it."""

from titanlike.tools.migration.conversion import Key

OPTIONAL_TEXT, OPTIONAL_INT = (str,), (int,)

LOGS = "the run directory has all files of a run"
CODE = "code of your own: copy a program and change it (docs/copy.md)"
ALWAYS = "always on here"
TIMEOUT = "of one collective; run.hang_timeout is for a whole step"
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
    "profiling.profile_freq": Key(10, least=1),
    "profiling.profiler_active": Key(1, least=1),
    "profiling.profiler_warmup": Key(3, reason="a trace here begins after one step of warmup"),
    "profiling.enable_memory_snapshot": Key(False, ours="profiling.memory"),
    "profiling.save_memory_snapshot_folder": Key("memory_snapshot", reason=LOGS),
    "metrics.log_freq": Key(10, ours="metrics.interval", least=1),
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
        reason="the step follows the backward pass, and gradients are clipped; they take memory",
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
    "training.local_batch_size": Key(8, least=1),
    "training.global_batch_size": Key(-1),
    "training.seq_len": Key(2048, ours="training.seq_len", least=1),
    "training.max_norm": Key(1.0, ours="training.max_norm"),
    "training.steps": Key(10000, ours="training.steps", least=1),
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
    "parallelism.data_parallel_replicate_degree": Key(1, ours="parallelism.replicate", least=1),
    "parallelism.data_parallel_shard_degree": Key(-1, ours="parallelism.shard"),
    "parallelism.fsdp_reshard_after_forward": Key("default"),
    "parallelism.tensor_parallel_degree": Key(1, ours="parallelism.tensor", least=1),
    "parallelism.disable_loss_parallel": Key(
        False, reason="the loss is always parallel; the result is the same", changes=True
    ),
    "parallelism.enable_async_tensor_parallel": Key(False),
    "parallelism.enable_compiled_autograd": Key(
        False, reason="the backward pass of each block is compiled", changes=True
    ),
    "parallelism.pipeline_parallel_degree": Key(1, ours="parallelism.pipeline", least=1),
    "parallelism.pipeline_parallel_split_points": Key([]),
    "parallelism.module_fqns_per_model_part": Key([]),
    "parallelism.pipeline_parallel_first_stage_less_layers": Key(1),
    "parallelism.pipeline_parallel_last_stage_less_layers": Key(1),
    "parallelism.pipeline_parallel_layers_per_stage": Key(None, types=OPTIONAL_INT),
    "parallelism.pipeline_parallel_schedule": Key("1F1B"),
    "parallelism.pipeline_parallel_schedule_csv": Key("", reason="only schedules of torch are supported", changes=True),
    "parallelism.pipeline_parallel_microbatch_size": Key(1, least=1),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Key(True, reason="not overlapped here", changes=False),
    "parallelism.context_parallel_degree": Key(1, ours="parallelism.context", least=1),
    "parallelism.context_parallel_load_balancer": Key(
        "headtail", reason="sequences are always balanced by head and tail; the result is the same", changes=True
    ),
    "parallelism.context_parallel_rotate_method": Key(
        "allgather", reason="keys and values are always all-gathered; the result is the same", changes=True
    ),
    "parallelism.expert_parallel_degree": Key(1, ours="parallelism.expert", least=1),
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
    "validation.local_batch_size": Key(8, least=1),
    "validation.seq_len": Key(2048, least=1),
    "validation.freq": Key(10, least=1),
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
