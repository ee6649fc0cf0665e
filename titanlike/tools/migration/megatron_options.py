"""Options of Megatron-LM's pretrain_gpt.py: their defaults, and why some have no counterpart. `megatron.py` reads it.

The options are for pre-training of language models, in Megatron-LM 2.5 to core 0.19.
"""

from titanlike.tools.migration.conversion import Key, without_effect

SPEED = "an option of Megatron-LM's kernels or communication, without effect on results"
LOGS = "logs: metrics.jsonl in the run directory has what is measured"
FILES = "where or how Megatron-LM's files are written"
CLUSTER = "the launcher and the watchdog of this toolkit do this in their own way"
MOE_SPEED = "how tokens are sent to experts; no token is dropped here"

NOT_CONVERTED = "the recipe is right for a new run, but a checkpoint of this job must not be imported"

INT, FLOAT = (int,), (float,)

KEYS: dict[str, Key] = {
    # The model.
    "--num-layers": Key(0, least=1),
    "--hidden-size": Key(0, least=1),
    "--ffn-hidden-size": Key(None, types=INT),
    "--num-attention-heads": Key(0, least=1),
    "--group-query-attention": Key(False),
    "--num-query-groups": Key(None, types=INT, least=1),
    "--kv-channels": Key(None, types=INT, least=1),
    "--max-position-embeddings": Key(None, types=INT),
    "--position-embedding-type": Key("learned_absolute"),
    "--use-rotary-position-embeddings": Key(False),
    "--rotary-base": Key(10000, types=FLOAT),
    "--rotary-percent": Key(1.0),
    "--rotary-interleaved": Key(False, reason=f"the same function of permuted weights; {NOT_CONVERTED}", changes=True),
    "--rotary-seq-len-interpolation-factor": Key(None, types=INT, reason="RoPE has no interpolation here", changes=True),
    "--use-rope-scaling": Key(False),
    "--rope-scaling-factor": Key(8.0),
    "--normalization": Key("LayerNorm"),
    "--norm-epsilon": Key(1e-5),
    "--apply-layernorm-1p": Key(False, reason=f"the same function of weights around 0; {NOT_CONVERTED}", changes=True),
    "--swiglu": Key(False),
    "--disable-bias-linear": Key(False),
    "--add-qkv-bias": Key(False),
    "--untie-embeddings-and-output-weights": Key(False),
    "--qk-layernorm": Key(False),
    "--hidden-dropout": Key(0.1),
    "--attention-dropout": Key(0.1),
    "--init-method-std": Key(0.02),
    "--init-method-xavier-uniform": Key(False, reason="initial weights are normal here", changes=True),
    "--embedding-init-method-std": Key(None, types=FLOAT, reason="initial weights have a std of 0.02 here", changes=True),
    "--make-vocab-size-divisible-by": Key(128, least=1),
    "--vocab-size": Key(None, types=INT),
    "--padded-vocab-size": Key(None, types=INT),
    "--fp32-residual-connection": Key(False, reason="the residual stream has training.compute_dtype", changes=True),
    "--apply-query-key-layer-scaling": Key(False, reason="the kernels accumulate scores in float32"),
    "--openai-gelu": Key(False, reason="the GELU of gpt is its tanh approximation here too"),
    "--use-checkpoint-args": Key(False, reason="the model is what the options say", changes=True),
    "--transformer-impl": Key("transformer_engine", reason=SPEED),
    "--num-experts": Key(None, types=INT, least=1),
    "--moe-router-topk": Key(2, least=1),
    "--moe-ffn-hidden-size": Key(None, types=INT),
    "--moe-shared-expert-intermediate-size": Key(None, types=INT),
    "--moe-layer-freq": Key("1"),
    "--moe-router-score-function": Key("softmax"),
    "--moe-router-pre-softmax": Key(False),
    "--moe-router-topk-scaling-factor": Key(None, types=FLOAT),
    "--moe-router-enable-expert-bias": Key(False),
    "--moe-router-bias-update-rate": Key(1e-3),
    "--moe-router-load-balancing-type": Key("aux_loss"),
    "--moe-aux-loss-coeff": Key(0.0),
    "--moe-z-loss-coeff": Key(None, types=FLOAT, reason="the logits of the router have no z-loss here", changes=True),
    "--moe-input-jitter-eps": Key(None, types=FLOAT, reason="the router has no jitter here", changes=True),
    "--moe-router-num-groups": Key(None, types=INT, reason="experts have no groups here", changes=True),
    "--moe-router-group-topk": Key(None, types=INT, reason="experts have no groups here", changes=True),
    "--moe-expert-capacity-factor": Key(None, types=FLOAT, reason="no token is dropped here", changes=True),
    "--moe-pad-expert-input-to-capacity": Key(False, reason="no token is dropped here", changes=True),
    "--moe-token-drop-policy": Key("probs", reason="no token is dropped here"),
    "--moe-router-dtype": Key("", reason="the router computes in float32 here"),
    # The batch and the run.
    "--seq-length": Key(0, least=1),
    "--micro-batch-size": Key(0),
    "--global-batch-size": Key(None, types=INT),
    "--rampup-batch-size": Key([]),
    "--step-batch-size-schedule": Key(""),
    "--train-iters": Key(None, types=INT),
    "--train-samples": Key(None, types=INT),
    "--seed": Key(1234, ours="run.seed"),
    "--deterministic-mode": Key(False, ours="run.deterministic"),
    "--exit-interval": Key(None, types=INT, reason="training.steps ends a run", changes=True),
    "--exit-duration-in-mins": Key(None, types=INT, reason="the scheduler's signal saves a checkpoint and ends the run"),
    "--calculate-per-token-loss": Key(False, reason="the loss is always a mean over the tokens of a step"),
    "--eod-mask-loss": Key(False, reason="the loss includes ends of documents here", changes=True),
    # Optimizer and schedule.
    "--optimizer": Key("adam"),
    "--lr": Key(None, types=FLOAT),
    "--min-lr": Key(0.0),
    "--lr-decay-style": Key("linear"),
    "--lr-decay-iters": Key(None, types=INT),
    "--lr-decay-samples": Key(None, types=INT),
    "--lr-warmup-iters": Key(0),
    "--lr-warmup-samples": Key(0),
    "--lr-warmup-fraction": Key(None, types=FLOAT),
    "--lr-warmup-init": Key(0.0, reason="a warmup begins at 0", changes=True),
    "--lr-wsd-decay-iters": Key(None, types=INT),
    "--lr-wsd-decay-samples": Key(None, types=INT),
    "--lr-wsd-decay-style": Key("exponential"),
    "--decoupled-lr": Key(None, types=FLOAT),
    "--decoupled-min-lr": Key(None, types=FLOAT),
    "--weight-decay": Key(0.01, ours="optimizer.weight_decay"),
    "--start-weight-decay": Key(None, types=FLOAT, reason="weight decay is constant here", changes=True),
    "--end-weight-decay": Key(None, types=FLOAT, reason="weight decay is constant here", changes=True),
    "--weight-decay-incr-style": Key("constant", reason="weight decay is constant here", changes=True),
    "--adam-beta1": Key(0.9, ours="optimizer.beta1"),
    "--adam-beta2": Key(0.999, ours="optimizer.beta2"),
    "--adam-eps": Key(1e-8, ours="optimizer.eps"),
    "--clip-grad": Key(1.0),
    "--use-precision-aware-optimizer": Key(False, reason="see optimizer.state_dtype", changes=True),
    "--main-grads-dtype": Key("fp32", reason="gradients have training.master_dtype", changes=True),
    "--main-params-dtype": Key("fp32", reason="see training.master_dtype", changes=True),
    "--exp-avg-dtype": Key("fp32", reason="see optimizer.state_dtype", changes=True),
    "--exp-avg-sq-dtype": Key("fp32", reason="see optimizer.state_dtype", changes=True),
    "--optimizer-cpu-offload": Key(False, reason="see parallelism.cpu_offload, which offloads more", changes=True),
    "--optimizer-offload-fraction": Key(1.0, reason="see parallelism.cpu_offload", changes=True),
    # Precision and recomputation.
    "--bf16": Key(False),
    "--fp16": Key(False),
    "--grad-reduce-in-bf16": Key(False),
    "--accumulate-allreduce-grads-in-fp32": Key(False),
    "--loss-scale": Key(None, types=FLOAT, reason="the loss scale of float16 always adapts"),
    "--initial-loss-scale": Key(None, types=FLOAT, reason="the loss scale of float16 has no settings"),
    "--min-loss-scale": Key(None, types=FLOAT, reason="the loss scale of float16 has no settings"),
    "--loss-scale-window": Key(None, types=FLOAT, reason="the loss scale of float16 has no settings"),
    "--hysteresis": Key(2, reason="the loss scale of float16 has no settings"),
    "--fp16-lm-cross-entropy": Key(False, reason="the loss is in float32 here", changes=True),
    "--attention-softmax-in-fp32": Key(False, reason="attention kernels compute the softmax in float32"),
    "--disable-bf16-reduced-precision-matmul": Key(False, reason="matmuls accumulate in float32"),
    "--fp8-format": Key(""),
    "--fp8-recipe": Key("delayed"),
    "--fp8-param-gather": Key(False),
    "--fp8-param": Key(False),
    "--fp8-margin": Key(0, reason="of delayed scaling"),
    "--fp8-interval": Key(1, reason="of delayed scaling"),
    "--fp8-amax-history-len": Key(1, reason="of delayed scaling"),
    "--fp8-amax-compute-algo": Key("most_recent", reason="of delayed scaling"),
    "--no-fp8-wgrad": Key(False, reason="see float8.scaling = 'rowwise_with_gw_hp'", changes=True),
    "--first-last-layers-bf16": Key(False, reason="see float8.skip", changes=True),
    "--num-layers-at-start-in-bf16": Key(1, reason="see float8.skip", changes=True),
    "--num-layers-at-end-in-bf16": Key(1, reason="see float8.skip", changes=True),
    "--recompute-activations": Key(False),
    "--recompute-granularity": Key(""),
    "--recompute-method": Key(""),
    "--recompute-num-layers": Key(None, types=INT),
    "--recompute-modules": Key([]),
    "--checkpoint-activations": Key(False),
    "--activations-checkpoint-method": Key(""),
    "--distribute-saved-activations": Key(False, reason="saved activations are sharded over parallelism.tensor"),
    # Layout.
    "--tensor-model-parallel-size": Key(1, least=1),
    "--pipeline-model-parallel-size": Key(1, least=1),
    "--context-parallel-size": Key(1, least=1),
    "--expert-model-parallel-size": Key(1, least=1),
    "--expert-tensor-parallel-size": Key(None, types=INT),
    "--sequence-parallel": Key(False),
    "--tp-comm-overlap": Key(False),
    "--num-layers-per-virtual-pipeline-stage": Key(None, types=INT, least=1),
    "--num-virtual-stages-per-pipeline-rank": Key(None, types=INT, least=1),
    "--decoder-first-pipeline-num-layers": Key(None, types=INT),
    "--decoder-last-pipeline-num-layers": Key(None, types=INT),
    "--pipeline-model-parallel-layout": Key("", reason="see parallelism.pipeline_split, the blocks of each stage", changes=True),
    "--account-for-embedding-in-pipeline-split": Key(False, reason="see parallelism.pipeline_split", changes=True),
    "--account-for-loss-in-pipeline-split": Key(False, reason="see parallelism.pipeline_split", changes=True),
    "--use-distributed-optimizer": Key(False),
    "--use-torch-fsdp2": Key(False),
    "--use-megatron-fsdp": Key(False),
    "--use-custom-fsdp": Key(False),
    "--data-parallel-sharding-strategy": Key("no_shard"),
    "--overlap-grad-reduce": Key(False),
    "--num-distributed-optimizer-instances": Key(1, reason="see parallelism.replicate", changes=True),
    "--outer-dp-sharding-strategy": Key("no_shard", reason="see parallelism.replicate", changes=True),
    "--cp-comm-type": Key(["p2p"], reason="keys and values are all-gathered; the result is the same"),
    "--hierarchical-context-parallel-sizes": Key([], reason="keys and values are all-gathered; the result is the same"),
    # Data.
    "--tokenizer-type": Key(""),
    "--tokenizer-model": Key(""),
    "--vocab-file": Key(""),
    "--data-path": Key([]),
    "--mock-data": Key(False),
    "--split": Key("969, 30, 1"),
    "--reset-position-ids": Key(False),
    "--reset-attention-mask": Key(False),
    "--train-data-path": Key([], reason="set data.path or data.mixture", changes=True),
    "--valid-data-path": Key([], reason="set data.validation_path", changes=True),
    "--test-data-path": Key([], reason="there is no test set"),
    "--data-args-path": Key("", reason="set data.path or data.mixture", changes=True),
    "--per-split-data-args-path": Key("", reason="set data.path or data.mixture", changes=True),
    "--dataloader-type": Key("", reason="the order of the data is a function of seed and step"),
    # Checkpoints, validation and logs.
    "--save": Key(""),
    "--load": Key(""),
    "--save-interval": Key(None, types=INT),
    "--persistent-save-interval": Key(None, types=INT),
    "--save-retain-interval": Key(None, types=INT),
    "--async-save": Key(False),
    "--finetune": Key(False),
    "--pretrained-checkpoint": Key(""),
    "--ckpt-step": Key(None, types=INT),
    "--eval-interval": Key(1000, least=1),
    "--eval-iters": Key(100),
    "--log-interval": Key(100, ours="metrics.interval", least=1),
    "--tensorboard-dir": Key(""),
    "--wandb-project": Key(""),
    "--profile": Key(False),
    "--profile-step-start": Key(10),
    "--profile-step-end": Key(12),
    "--profile-ranks": Key([], reason="see profiling.ranks"),
    "--attention-backend": Key("auto", reason="training.attention = 'auto' takes the fastest kernel"),
}  # fmt: skip
OPTIONS = {
    SPEED: """use-mcore-models use-legacy-models use-flash-attn no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
        no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion
        cross-entropy-fusion-impl no-async-tensor-model-parallel-allreduce manual-gc manual-gc-interval no-manual-gc-eval
        empty-unused-memory-level tp-comm-overlap-cfg disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
        disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad tp-comm-bootstrap-backend disable-tp-comm-split-ag
        disable-tp-comm-split-rs use-cpu-initialization init-model-with-meta-device no-overlap-p2p-communication
        overlap-p2p-communication-warmup-flush defer-embedding-wgrad-compute wgrad-deferral-limit no-align-grad-reduce
        ddp-num-buckets ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective
        overlap-param-gather-with-optimizer-step no-align-param-gather align-param-gather no-scatter-gather-tensors-in-pipeline
        use-ring-exchange-p2p enable-cuda-graph cuda-graph-warmup-steps cuda-graph-impl cuda-graph-scope external-cuda-graph
        te-rng-tracker use-nccl-ub fsdp-double-buffer fsdp-manual-registration suggested-communication-unit-size
        no-gradient-reduce-div-fusion keep-fp8-transpose-cache-when-using-custom-fsdp use-tp-pp-dp-mapping
        nccl-communicator-config-path microbatch-group-size-per-virtual-pipeline-stage train-sync-interval DDP-impl
        no-contiguous-buffers-in-local-ddp delay-wgrad-compute high-priority-stream-groups num-workers no-mmap-bin-files
        no-create-attention-mask-in-dataloader
        data-cache-path data-impl num-dataset-builder-threads tiktoken-pattern tiktoken-num-special-tokens rope-type
        overlap-param-gather grad-reduce-div-fusion no-clone-scatter-output-in-embedding""",
    LOGS: """log-params-norm log-num-zeros-in-grad log-throughput log-progress timing-log-level timing-log-option
        no-barrier-with-level-1-timing tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard
        no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard
        wandb-exp-name wandb-save-dir logging-level moe-per-layer-logging log-straggler disable-straggler-on-startup
        straggler-ctrlr-port straggler-minmax-count no-one-logger one-logger-project one-logger-run-name one-logger-async
        record-memory-history memory-snapshot-path config-logger-dir app-tag-run-name app-tag-run-version""",
    FILES: """ckpt-format dist-ckpt-format use-dist-ckpt ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness auto-detect-ckpt-format no-save-optim
        no-save-rng no-load-optim no-load-rng non-persistent-save-interval non-persistent-ckpt-type use-persistent-ckpt-worker
        exit-on-missing-checkpoint override-opt_param-scheduler override-opt-param-scheduler use-checkpoint-opt_param-scheduler
        use-checkpoint-opt-param-scheduler no-initialization""",
    CLUSTER: """distributed-backend distributed-timeout-minutes exit-signal-handler enable-ft-package calc-ft-timeouts local-rank
        adlr-autoresume adlr-autoresume-interval check-for-spiky-loss check-for-large-grads no-check-for-nan-in-loss-and-grad
        rerun-mode error-injection-rate disable-gloo-process-groups lazy-mpu-init""",
    "positions are those of --position-embedding-type": "no-position-embedding",
    "tiktoken has GPT-2's merges": "merge-file",
    "torch.profiler is the only profiler": "use-pytorch-profiler",
    MOE_SPEED: """moe-grouped-gemm moe-use-legacy-grouped-gemm moe-token-dispatcher-type moe-enable-deepep moe-permute-fusion
        moe-shared-expert-overlap moe-router-fusion moe-extended-tp""",
}
KEYS |= {f"--{name}": key for name, key in without_effect(OPTIONS).items()}
