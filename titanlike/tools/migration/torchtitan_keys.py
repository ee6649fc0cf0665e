"""Keys of torchtitan's job configs: their defaults, and why some have no counterpart. `torchtitan.py` and `torchtitan_config.py`
read it."""

from titanlike.tools.migration.conversion import Key, without_effect

CODE = "code of your own: copy a program and change it (docs/extending.md)"
DEBUG = "for debugging torchtitan"
FT = "torchft; MAX_RESTARTS=n restarts a job from its newest checkpoint"

# All keys of the dataclasses of torchtitan 0.2.0, 0.2.1 and 0.2.2, with their defaults.
KEYS: dict[str, Key] = {
    "job.dump_folder": Key("./outputs", ours="run.dir"),
    "job.custom_config_module": Key("", reason=CODE, changes=True),
    "profiling.enable_profiling": Key(False),
    "profiling.profile_freq": Key(10, least=1),
    "profiling.profiler_active": Key(1, least=1),
    "profiling.enable_memory_snapshot": Key(False, ours="profiling.memory"),
    "metrics.log_freq": Key(10, ours="metrics.interval", least=1),
    "metrics.enable_tensorboard": Key(False),
    "metrics.enable_wandb": Key(False),
    "model.name": Key("llama3"),
    "model.flavor": Key("debugmodel"),
    "model.hf_assets_path": Key("./tests/assets/tokenizer"),
    "model.converters": Key([]),
    "optimizer.name": Key("AdamW"),
    "optimizer.lr": Key(8e-4, ours="optimizer.lr"),
    "optimizer.beta1": Key(0.9, ours="optimizer.beta1"),
    "optimizer.beta2": Key(0.95, ours="optimizer.beta2"),
    "optimizer.eps": Key(1e-8, ours="optimizer.eps"),
    "optimizer.weight_decay": Key(0.1),
    "optimizer.early_step_in_backward": Key(
        False, reason="gradients are kept and clipped before the step", changes=True
    ),
    "lr_scheduler.warmup_steps": Key(200),
    "lr_scheduler.total_steps": Key(None, types=(int,)),
    "lr_scheduler.decay_ratio": Key(None, types=(float,)),
    "lr_scheduler.decay_type": Key("linear"),
    "lr_scheduler.min_lr_factor": Key(0.0),
    "training.dataset": Key("c4_test"),
    "training.dataset_path": Key(""),
    "training.local_batch_size": Key(8, least=1),
    "training.global_batch_size": Key(-1),
    "training.seq_len": Key(2048, ours="training.seq_len", least=1),
    "training.max_norm": Key(1.0, ours="training.max_norm"),
    "training.steps": Key(10000, ours="training.steps", least=1),
    "training.enable_cpu_offload": Key(False, ours="parallelism.cpu_offload"),
    "training.dtype": Key("float32", ours="training.master_dtype"),
    "training.mixed_precision_param": Key("bfloat16", ours="training.compute_dtype"),
    "training.mixed_precision_reduce": Key("float32", ours="training.reduce_dtype"),
    "training.seed": Key(None, types=(int,)),
    "training.deterministic": Key(False),
    "training.debug_moe_force_load_balance": Key(False, reason=DEBUG, changes=True),
    "parallelism.data_parallel_replicate_degree": Key(1, ours="parallelism.replicate", least=1),
    "parallelism.data_parallel_shard_degree": Key(-1, ours="parallelism.shard"),
    "parallelism.fsdp_reshard_after_forward": Key("default"),
    "parallelism.tensor_parallel_degree": Key(1, ours="parallelism.tensor", least=1),
    "parallelism.enable_async_tensor_parallel": Key(False),
    "parallelism.enable_compiled_autograd": Key(False, reason="backward is compiled by block", changes=True),
    "parallelism.pipeline_parallel_degree": Key(1, ours="parallelism.pipeline", least=1),
    "parallelism.module_fqns_per_model_part": Key([]),
    "parallelism.pipeline_parallel_first_stage_less_layers": Key(1),
    "parallelism.pipeline_parallel_last_stage_less_layers": Key(1),
    "parallelism.pipeline_parallel_layers_per_stage": Key(None, types=(int,)),
    "parallelism.pipeline_parallel_schedule": Key("1F1B"),
    "parallelism.pipeline_parallel_schedule_csv": Key("", reason="only schedules of torch are supported", changes=True),
    "parallelism.pipeline_parallel_microbatch_size": Key(1, least=1),
    "parallelism.context_parallel_degree": Key(1, ours="parallelism.context", least=1),
    "parallelism.expert_parallel_degree": Key(1, ours="parallelism.expert", least=1),
    "parallelism.expert_tensor_parallel_degree": Key(1),
    "checkpoint.enable": Key(False),
    "checkpoint.interval": Key(500, ours="checkpoint.interval"),
    "checkpoint.initial_load_path": Key(""),
    "checkpoint.initial_load_model_only": Key(True, reason="checkpoint.initial has weights only", changes=True),
    "checkpoint.initial_load_in_hf": Key(False),
    "checkpoint.initial_load_in_hf_quantized": Key(False, reason="quantized weights are not read", changes=True),
    "checkpoint.last_save_in_hf": Key(False),
    "checkpoint.export_dtype": Key("float32"),
    "checkpoint.async_mode": Key("disabled"),
    "checkpoint.keep_latest_k": Key(10),
    "checkpoint.load_step": Key(-1),
    "checkpoint.exclude_from_loading": Key([], reason="a checkpoint is loaded whole", changes=True),
    "checkpoint.enable_first_step_checkpoint": Key(False, reason="see checkpoint.interval", changes=True),
    "checkpoint.load_only": Key(False),
    "activation_checkpoint.mode": Key("selective"),
    "activation_checkpoint.selective_ac_option": Key("2"),
    "activation_checkpoint.memory_budget": Key(0.5, ours="activation_checkpoint.memory_budget"),
    "compile.enable": Key(False),
    "compile.components": Key(["model", "loss"]),
    "compile.backend": Key("inductor", ours="compile.backend"),
    "comm.mode": Key("default", reason="--check and `titanlike verify` need no GPU", changes=True),
    "fault_tolerance.enable": Key(False, reason=FT, changes=True),
    "fault_tolerance.semi_sync_method": Key("", reason="gradients are synchronized in every step", changes=True),
    "experimental.custom_import": Key("", reason=CODE, changes=True),
    "experimental.custom_args_module": Key("", reason=CODE, changes=True),
    "validation.enable": Key(False),
    "validation.dataset": Key("c4_validation"),
    "validation.dataset_path": Key(""),
    "validation.local_batch_size": Key(8, least=1),
    "validation.seq_len": Key(2048, least=1),
    "validation.freq": Key(10, least=1),
    "validation.steps": Key(-1),
    "debug.seed": Key(None, types=(int,)),
    "debug.deterministic": Key(False),
    "debug.moe_force_load_balance": Key(False, reason=DEBUG, changes=True),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Key(False),
    "quantize.linear.float8.recipe_name": Key(""),
    "quantize.linear.float8.filter_fqns": Key([]),
    "quantize.linear.float8.emulate": Key(False),
    "quantize.linear.mx.recipe_name": Key("mxfp8_cublas"),
    "quantize.linear.mx.filter_fqns": Key(["output"]),
}
KEYS |= without_effect(
    {
        FT: """checkpoint.enable_ft_dataloader_checkpoints fault_tolerance.process_group fault_tolerance.process_group_timeout_ms
            fault_tolerance.replica_id fault_tolerance.group_size fault_tolerance.min_replica_size""",
        DEBUG: """training.gc_debug activation_checkpoint.visualize_memory_budget_pareto activation_checkpoint.determinism_check
            activation_checkpoint.debug""",
        "the recipe is the first argument of the command, and --resolved prints it": "job.config_file job.print_config",
        "a description": "job.description",
        "the run directory has all files of a run": """job.save_config_file profiling.save_traces_folder metrics.save_tb_folder
            profiling.save_memory_snapshot_folder comm.save_traces_folder comm.save_traces_file_prefix checkpoint.folder""",
        "a trace here begins after one step of warmup": "profiling.profiler_warmup",
        "NO_COLOR=1 disables colors": "metrics.disable_color_printing",
        "rank 0 records metrics of all ranks": "metrics.save_for_all_ranks",
        "the start of a run prints what is converted": "model.print_after_conversion",
        "the optimizer is always fused": "optimizer.implementation",
        "every 50 steps here": "training.gc_freq",
        "a thread prepares data.prefetch batches here, and memory is pinned on GPUs": """training.dataloader.num_workers
            training.dataloader.persistent_workers training.dataloader.prefetch_factor training.dataloader.pin_memory
            validation.dataloader.num_workers validation.dataloader.persistent_workers validation.dataloader.prefetch_factor
            validation.dataloader.pin_memory""",
        "how ranks communicate; the result is the same": """parallelism.disable_loss_parallel
            parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method
            parallelism.expert_parallel_comm_backend parallelism.pipeline_parallel_expert_parallel_overlap""",
        "the last checkpoint is a whole one too; `titanlike export` writes weights": "checkpoint.last_save_model_only",
        "initial weights do not depend on the layout": "checkpoint.create_seed_checkpoint",
        "a detail of torchtitan's selective checkpointing, which keeps other outputs": """activation_checkpoint.early_stop
            activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns""",
        "random numbers are functions of their position here": "activation_checkpoint.preserve_rng_state",
        "of one collective; run.hang_timeout is for a whole step": "comm.init_timeout_seconds comm.train_timeout_seconds",
        "the watchdog names the missing rank": "comm.trace_buf_size",
        "`titanlike plan` computes memory": "memory_estimation.enable memory_estimation.disable_fake_mode",
        "an operation without a deterministic implementation is an error": "debug.deterministic_warn_only",
        "experts are not quantized here": """quantize.grouped_mm.float8.fqns quantize.grouped_mm.mx.fqns
            quantize.grouped_mm.mx.recipe_name""",
        "the scales of all weights are computed together": """
            quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp""",
        "the kernel is chosen by torch.compile": "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
    }
)

# What 0.3 calls the keys that begin so.
RENAMED = {
    "job.dump_folder": "dump_folder",
    "job.": "debug.",
    "model.hf_assets_path": "hf_assets_path",
    "model.converters": "converters",
    "profiling.": "profiler.",
    "training.dataloader.": "dataloader.",
    "training.dataset": "dataloader.dataset",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.": "validator.",
    "optimizer.implementation": "optimizer.implementation",
    "optimizer.": "optimizer.param_groups.",
    "activation_checkpoint.mode": "activation_checkpoint",
    "activation_checkpoint.per_op_sac_": "activation_checkpoint.",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "parallelism.expert_tensor_parallel_degree": "tensor parallelism of experts",
    "quantize.linear.float8.": "Float8LinearConverter.",
    "quantize.linear.mx.": "MXFP8LinearConverter.",
}
# What 0.3 has besides, or has another default of.
KEYS_0_3 = KEYS | {
    "model_spec.model": Key(types=(str,)),
    "model_spec.model.layers.attention.inner_attention": Key("FlexAttention"),
    "training.disable_cuda_graphs": Key(False),
    "training.dataloader.infinite": Key(True, reason="data is repeated here", changes=True),
    "training.dataloader.sources": Key([], reason="set data.mixture and data.weights to their files", changes=True),
    "optimizer.implementation": Key("fused"),
    "loss": Key("ChunkedLossWrapper"),
    "loss.num_chunks": Key(8, least=1),
    "activation_checkpoint.selective_ac_option": Key("op"),
    "parallelism.enable_sequence_parallel": Key(True, reason="tensor parallelism always has it here", changes=True),
    "parallelism.enable_fsdp_symm_mem": Key(False, reason="FSDP's collectives are NCCL's here", changes=True),
    "tp_gemm_backend": Key("default", reason="parallelism.async_tensor_parallel is for compiled blocks", changes=True),
    "override.imports": Key([], reason=CODE, changes=True),
    "debug.detect_anomaly": Key(False, reason=DEBUG, changes=True),
}
KEYS_0_3 |= without_effect(
    {
        "how ranks communicate; the result is the same": """parallelism.spmd_backend parallelism.context_parallel_ptrr_mask_key
            model_spec.model.layers.moe.routed_experts.token_dispatcher""",
        "for debugging torchtitan": "debug.spmd_typechecking debug.enable_structured_logging",
        "follows from model.vocab_size": "loss.global_vocab_size loss.loss_fn.global_vocab_size",
        "validation.batches is the number of batches": "validation.dataloader.infinite",
        "profiling.steps has all steps": """profiling.profiler_repeat profiling.profiler_skip_first
            profiling.profiler_skip_first_wait""",
        "training.attention chooses the kernel": "model_spec.model.layers.attention.inner_attention.kernel_options.BACKEND",
    }
)
MODEL = "model_spec.model"
# Of a model; those of a block, which all its blocks have, are below `layers`.
NUMBERS = {
    "dim": Key(types=(int,), ours="model.dim"),
    "vocab_size": Key(types=(int,), ours="model.vocab_size"),
    "enable_weight_tying": Key(types=(bool,), ours="model.tied_head"),
    "norm.eps": Key(types=(float,), ours="model.norm_eps"),
    "num_layers": Key(types=(int,), ours="model.num_layers"),
    "layers.attention.n_heads": Key(types=(int,), ours="model.num_heads"),
    "layers.attention.n_kv_heads": Key(types=(int,), ours="model.num_kv_heads"),
    "layers.attention.head_dim": Key(types=(int,), ours="model.head_dim"),
    "layers.attention.rope.max_seq_len": Key(types=(int,), ours="model.max_seq_len"),
    "layers.attention.rope.theta": Key(types=(float,), ours="model.rope_theta"),
    "layers.attention.rope.scaling_factor": Key(types=(float,), ours="model.rope_scaling"),
    "layers.attention.rope.original_max_position_embeddings": Key(types=(int,), ours="model.rope_original_seq_len"),
    "layers.feed_forward.w1.out_features": Key(types=(int,), ours="model.ffn_dim"),
    "layers.moe.routed_experts.inner_experts.hidden_dim": Key(types=(int,), ours="model.ffn_dim"),
    "layers.moe.num_experts": Key(types=(int,), ours="model.num_experts"),
    "layers.moe.router.top_k": Key(types=(int,), ours="model.experts_per_token"),
    "layers.moe.router.score_func": Key(types=(str,), ours="model.router_score"),
    "layers.moe.router.route_norm": Key(types=(bool,), ours="model.normalize_router"),
    "layers.moe.router.route_scale": Key(types=(float,), ours="model.router_scale"),
    "layers.moe.load_balance_coeff": Key(types=(float,), ours="model.balance_bias_rate"),
}
KEYS_0_3 |= {f"{MODEL}.{path}": known for path, known in NUMBERS.items()}
NAMES_0_3 = {
    key: new + key.removeprefix(old)
    for old, new in reversed(RENAMED.items())
    for key in KEYS_0_3
    if key.startswith(old)
}
