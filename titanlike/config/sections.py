"""The sections of a recipe: every field with its unit, default and effect. Does not import torch.

A custom training program extends `PretrainRecipe` with its own sections:

    @section
    class Ema:
        decay: float = 0.999
        '''Weight of the previous average in each update.'''

    @section
    class MyRecipe(PretrainRecipe):
        ema: Ema = Ema()
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from titanlike.config.base import (
    LIMIT,
    FilePath,
    Fraction,
    Name,
    NonNegative,
    NonNegativeFloat,
    OnlyWith,
    Positive,
    PositiveFloat,
    only_from,
    only_if,
    only_with,
    section,
    show_value,
    shown,
)
from titanlike.config.layout import (
    DIMENSIONS,
    SCHEDULES,
    BatchSizes,
    SplittableConfig,
    infer_shard,
    num_microbatches,
    split_blocks,
)

DType = Literal["float32", "bfloat16"]
ComputeDType = Literal[DType, "float16"]
GENERATED = ("python_stdlib", "synthetic", "synthetic_chat", "synthetic_preference")  # sources that read no named files
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of an element
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Seconds = Annotated[int, Field(ge=1, le=1_000_000)]

# Conditions of several fields. A program may define a source of its own, which may read all of them.
READS_FILES = OnlyWith(
    ("source",), lambda source: source not in GENERATED, values=("text", "shards", "stream", "chat", "preference")
)
READS_TEXT = OnlyWith(
    ("source", "validation_path", "evaluation.data"),
    lambda source, validation, evaluation: (
        bool(evaluation) or (not is_chat_source(source) and (source not in ("shards", *GENERATED) or bool(validation)))
    ),
    values=("text", "stream"),
)
READS_PROMPTS = OnlyWith(  # shards contain what excludes prompts from the loss
    READS_TEXT.keys,
    lambda source, *others: source != "shards" and READS_TEXT.holds(source, *others),
    remedy='set {0} = "text", or use `titanlike data prepare --prompt-field`',
)
READS_RECORDS = OnlyWith(
    READS_TEXT.keys,
    lambda source, *others: source not in ("shards", *GENERATED) or any(others),
    values=("text", "stream", "chat", "preference"),
)
STREAMS = OnlyWith(
    ("source",),
    lambda source: source not in ("text", "shards", *GENERATED) and not is_chat_source(source),
    values=("stream",),
)
PACKS_TEXT = OnlyWith(("source",), lambda source: not is_chat_source(source), values=("text", "shards"))
MASKS = OnlyWith(
    ("source", "evaluation.data"),
    lambda source, evaluation: not is_chat_source(source) or bool(evaluation),
    values=("text", "shards", "stream"),
)
HOLDS_OUT = only_with("validation_path", "")
HAS_SEQUENCES = OnlyWith(
    ("source",), lambda source: source != "stream", values=("text", "shards", "chat", "preference")
)
CACHES = OnlyWith(
    ("source", "validation_path", "evaluation.data", "distillation.top_k"),
    lambda source, *others: source not in ("shards", "stream", "synthetic") or any(others),
    values=("text", "chat", "preference"),
)
IS_FLOAT8 = only_with("scaling", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
SAVES = only_with("enabled", True)
SKIPS = only_with("non_finite", "skip")


def is_chat_source(source: str) -> bool:
    """Whether a value of `data.source` of any program stands for conversations."""
    return "chat" in source or "preference" in source


def tracks_with(*trackers: TrackerName) -> OnlyWith:
    """The field has an effect with one of these trackers only."""
    return only_if(
        lambda chosen: not set(trackers).isdisjoint(chosen),
        "trackers",
        remedy=f"add {show_value(trackers[0])} to {{0}}",
    )


@section
class Run:
    """Run directory, seed, device and timeouts."""

    name: Name = ""
    """Name of the run directory. Starting a run of the same name again resumes it. Default: the recipe's file name and the
    current time, which starts a new run; in a SageMaker job the recipe's file name, so that the next job resumes the run, and in
    a job of a tuner the job's name, too."""
    dir: FilePath = "runs"
    """Directory that contains the run directories, relative to the working directory. Default in a SageMaker job:
    `/opt/ml/checkpoints`."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, the data shuffling, dropout, stochastic rounding and sampling. Python's, NumPy's and
    torch's global generators are seeded with it as well."""
    deterministic: bool = False
    """Use deterministic algorithms only (`torch.use_deterministic_algorithms`). Slower on a GPU; a CPU is deterministic
    anyway."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on. `auto` uses the GPUs if there are any. `mps` is an Apple GPU, for one process."""
    hang_timeout: Seconds = 600
    """Seconds without progress after which the watchdog reports the missing rank and exits with code 3. Must be longer than
    the longest step. While all ranks send heartbeats, the first step, checkpointing, and each forward pass of validation and
    evaluation may take at least 600 seconds."""
    shutdown_timeout: Seconds = 300
    """Seconds between a stop signal and SIGKILL: the time available for two steps and a last checkpoint. SageMaker allows 120.
    After a rank has failed, the others have at most 30."""

    @property
    def allows_cuda(self) -> bool:
        """Whether training uses CUDA if it is available."""
        return self.device in ("auto", "cuda")


@section
class Tokenizer:
    """Conversion of text to tokens."""

    encoding: FilePath = "bytes"
    """`bytes` (built in, 257 tokens, no download), the name of a tiktoken encoding such as `gpt2`, or the path of a file: a
    tiktoken rank file such as Llama 3's `tokenizer.model`, or Hugging Face's `tokenizer.json`."""
    special: Literal["eos", "bos", "both"] = "eos"
    """Special tokens that delimit a document: `eos` appends one, `bos` prepends one, `both` does both. Token shards contain
    them and must have been prepared with the same value."""
    eos: Annotated[str, only_with("special", "eos", "both")] = ""
    """End-of-sequence token. Default: the one that the tokenizer defines, or a common one."""
    bos: Annotated[str, only_with("special", "bos", "both")] = ""
    """Beginning-of-sequence token. Default: the one that the tokenizer defines, or a common one."""


@section
class Data:
    """Training and validation data."""

    source: Literal["python_stdlib", "text", "shards", "stream", "synthetic"] = "python_stdlib"
    """`shards`: token shards from `titanlike data prepare`, recommended for all but small runs, or token files of other programs.
    `text`: text files, tokenized at the first start and cached. `stream`: text files, tokenized during training. `python_stdlib`:
    the source code of Python's standard library, available on every machine. `synthetic`: random tokens, for benchmarks."""
    path: Annotated[FilePath, READS_FILES] = ""
    """For `shards`: their directory, or `.bin` files of Megatron-LM (also their prefix), llm.c or nanoGPT. For other files: a file,
    a directory (read recursively) or a glob pattern such as `corpus/*.jsonl.gz`. Each may be an fsspec URL without credentials:
    `s3://`, `gs://`, `az://`, `https://`, `hf://datasets/`. A document is a text file, a line of `.jsonl`, an element or a line of
    `.json`, or a row of `.csv`, `.tsv`, `.arrow` or `.parquet`; files may be compressed as `.gz` or `.zst`. A SageMaker job's
    channel `train` takes precedence over the recipe."""
    mixture: Annotated[tuple[FilePath, ...], READS_FILES] = ()
    """Several paths to mix, instead of `path`."""
    weights: Annotated[tuple[PositiveFloat, ...], only_if(bool, "mixture", remedy="set {0}")] = ()
    """Sampling weights of the `mixture`, in its order, in sequences. They are normalized to sum to 1. Default: equal
    weights."""
    text_field: Annotated[str, READS_TEXT] = "text"
    """Field of a JSON object or column of a table that contains the text."""
    prompt_field: Annotated[str, READS_PROMPTS] = ""
    """Field that contains a prompt, which precedes the text and is excluded from the loss. With `program = "seq2seq"`, it is the
    input of the encoder, and the text the target. Default: no prompt."""
    bad_records: Annotated[Literal["stop", "skip"], READS_RECORDS] = "stop"
    """How to handle a record that cannot be read: `stop` the run, or `skip` the record and log a warning."""
    document_masks: Annotated[bool, MASKS] = False
    """Mask attention between documents in a packed sequence, and restart position ids at each document. On GPUs, attention is
    FlexAttention then, unless `training.attention` is `efficient` or `math`."""
    packing: Annotated[Literal["concatenate", "best_fit"], PACKS_TEXT] = "concatenate"
    """How documents become sequences. `concatenate`: one after the other, cut wherever a sequence ends; every token is read.
    `best_fit`: documents of up to `training.seq_len` tokens stay whole, longer ones are cut into full sequences and a rest, and
    sequences are padded. For `shards`, `text` and `python_stdlib`; chats are always packed so."""
    holdout_every: Annotated[NonNegative, HOLDS_OUT, HAS_SEQUENCES] = 50
    """Hold out one of every `holdout_every` sequences, evenly spaced, for validation. 0 holds out none and
    requires `validation.interval = 0`. Not used for shards that have a validation split."""
    validation_path: FilePath = ""
    """Shards or text for validation. If set, no training data is held out."""
    cache: Annotated[FilePath, CACHES] = ""
    """Directory that caches the tokens of `text`. Default: `~/.cache/titanlike`."""
    prefetch: NonNegative = 2
    """Batches to prepare ahead of the training loop, in a thread. 0 prepares each batch when it is needed."""
    workers: Annotated[int, Field(ge=1, le=1024), STREAMS] = 4
    """Threads that read a `stream`. The number does not change the batches."""

    @property
    def reads_paths(self) -> bool:
        """Whether the source reads files that the recipe names."""
        return self.source not in GENERATED

    @property
    def masks_documents(self) -> str:
        """The key that masks attention between documents, with its value; "" if none does."""
        return "data.document_masks = true" if self.document_masks else ""

    def missing_files(self) -> Iterator[str]:
        """Yields a sentence for each file that the section names and that this machine lacks, besides the data."""
        yield from ()

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        if self.holdout_every == 1:
            yield "data.holdout_every = 1 holds out every sequence; use 2 or more, or 0 to hold out none"
        if self.reads_paths and not self.path and not self.mixture:
            yield f"data.source = '{self.source}' requires data.path, which is empty; set it, or data.mixture"
        if "" in self.mixture:
            yield "data.mixture contains an empty path; remove it"
        if self.path and self.mixture:
            yield "data.path and data.mixture are both set; remove one of them"
        if self.weights and self.mixture and len(self.weights) != len(self.mixture):
            numbers = f"{len(self.weights)} numbers for the {len(self.mixture)} paths of data.mixture"
            yield f"data.weights has {numbers}; give one each"
        if self.packing == "best_fit" and self.source in ("stream", "synthetic"):
            yield (
                f"data.packing = 'best_fit' needs to know all documents, which data.source = '{self.source}' does not; use "
                "'shards' or 'text', or data.packing = 'concatenate'"
            )


@section
class Training:
    """Batch size, sequence length, precision and loss."""

    steps: Positive = 1000
    """Number of optimizer steps of the run."""
    seq_len: Annotated[int, Field(ge=2, le=LIMIT)] = 2048
    """Sequence length in tokens."""
    global_batch_size: Positive = 32
    """Sequences in an optimizer step, over all ranks. Independent of the number of ranks, so that the layout does not change
    the result."""
    batch_ramp: tuple[tuple[Positive, Positive], ...] = ()
    """Batch-size ramp: pairs of a number of steps and the sequences of each of them. `[[100, 8], [50, 16]]` trains 100 steps with
    8 sequences, then 50 with 16, and the others with `global_batch_size`. The sequences and their order are the same as
    without it; `schedule` and all intervals count steps. Every size must be a multiple of the micro-batches of all ranks."""
    local_batch_size: Positive = 4
    """Maximum number of sequences of a rank in one forward pass (the micro-batch size). Use the largest that fits in memory;
    gradients are accumulated over the rest."""
    max_norm: PositiveFloat = 1.0
    """Maximum global gradient norm. Larger gradients are scaled down to it."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the z-loss, which keeps the logits from growing: the square of their log-sum-exp, averaged over the tokens
    with a loss, is added to the training loss and to its logged value. PaLM uses 1e-4. Validation and evaluation exclude it. 0
    disables it."""
    compute_dtype: ComputeDType = "bfloat16"
    """Precision of the forward and backward pass. `float16` is for GPUs without bfloat16 (V100, T4): the loss is scaled, by a power
    of two that adapts, so that small gradients are not zero. A step whose gradients overflow is skipped and halves the scale."""
    master_dtype: DType = "float32"
    """Precision of the weights that the optimizer keeps and updates. Set `optimizer.stochastic_rounding` with `bfloat16`, which
    rounds away steps that are small beside a weight. The bias that balances experts is in float32."""
    reduce_dtype: DType = "float32"
    """Precision of gradient reduction across ranks, and of what is accumulated before it: the micro-batches of a pipeline and
    of replicas. `bfloat16` halves the traffic. A rank that shares its parameters with no other one accumulates in
    `master_dtype`."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matmuls (`torch.set_float32_matmul_precision`). `high` enables TF32 on GPUs, `medium` enables
    bfloat16 on CPUs that support it. Both are faster and less accurate with `compute_dtype = "float32"`."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "flash3", "flash4"] = "auto"
    """Backend of scaled dot product attention. `auto` uses the first one available of `cudnn`, `flash`, `efficient` and `math`;
    on GPUs before Hopper, `flash` is the first. `flash3` and `flash4` are FlashAttention 3 and 4, if their packages are installed.
    With `data.document_masks` on GPUs, `auto` uses FlexAttention, and `efficient` and `math` take a mask of seq_len x seq_len."""
    loss_chunk: NonNegative = 4096
    """Tokens per chunk of the chunked linear cross-entropy: logits exist for one chunk at a time. Saves memory with large
    vocabularies. Each chunk reads and writes the float32 gradient of the LM head: smaller values are slower, those below a few
    hundred by far. 0 disables chunking."""
    non_finite: Literal["stop", "skip"] = "stop"
    """How to handle a non-finite loss or gradient: `stop` the run, or `skip` the optimizer update of that step. `skip`
    synchronizes the host with the GPU at every step."""
    skip_limit: Annotated[int, Field(ge=1, le=99), SKIPS] = 3
    """Maximum number of skipped steps among any 100 consecutive steps, counted across resumes. One more stops the run."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks, after the batch-size ramp."""
        return self.global_batch_size * self.seq_len

    @property
    def batch_sizes(self) -> BatchSizes:
        """The number of sequences of each step."""
        return BatchSizes(self.global_batch_size, self.batch_ramp)

    def num_tokens(self, step: int) -> int:
        """Returns the tokens of all steps up to and including this one."""
        return self.batch_sizes.through(step) * self.seq_len

    def num_microbatches(self, num_data_ranks: int) -> int:
        """Returns the number of forward and backward passes of one rank in a step."""
        return num_microbatches(self.global_batch_size, self.local_batch_size, num_data_ranks)


@section
class Parallelism:
    """Sizes of the parallel dimensions. Their product, without `expert`, is the number of processes; none changes the result."""

    replicate: Positive = 1
    """Model replicas (the outer dimension of HSDP). With `shard = 1` this is data parallelism as in DDP."""
    shard: Annotated[int, Field(le=LIMIT)] = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2, equivalent to ZeRO-3). -1 uses all
    ranks that the other dimensions leave."""
    context: Positive = 1
    """Context parallelism: ranks over which each sequence is sharded, for long sequences."""
    tensor: Positive = 1
    """Tensor parallelism: ranks over which each weight matrix is sharded, with sequence parallelism in between. Communicates
    several times per block: keep it within one node."""
    async_tensor_parallel: bool = False
    """Overlap tensor-parallel collectives with matmuls. Requires GPUs with peer access and `compile.mode = "block"`."""
    expert: Positive = 1
    """Expert parallelism: ranks over which the experts of a block are distributed. They are ranks of `shard` and `context`, so
    they add none. Each token is sent to the ranks of its experts and back."""
    pipeline: Positive = 1
    """Pipeline parallelism: ranks over which the blocks are distributed. Communicates least: use it across nodes."""
    pipeline_schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"], only_from("pipeline", 2)
    ] = "1f1b"
    """Pipeline schedule. `1f1b` holds fewer activations than `gpipe`. The others have several stages per rank, and the last
    three also compute weight gradients separately; both reduce the pipeline bubble."""
    pipeline_stages: Annotated[NonNegative, only_from("pipeline", 2)] = 0
    """Stages per rank. 0: the schedule's default, one or two."""
    pipeline_split: Annotated[tuple[Positive, ...], only_from("pipeline", 2)] = ()
    """Number of blocks of each stage, in order, such as `[7, 8, 8, 9]`. Default: balanced, counting the LM head as the
    equivalent number of blocks."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether FSDP frees the gathered parameters of a block after its forward pass. `auto`: yes, except for the LM head,
    which the backward pass uses first, and with a pipeline. `never` gathers once per forward and backward pass (as
    ZeRO-2 does) and keeps the whole model in memory in `compute_dtype`."""
    gradient_sync: Annotated[Literal["each_microbatch", "last_microbatch"], only_with("pipeline", 1)] = (
        "each_microbatch"
    )
    """When FSDP reduce-scatters gradients, if a step has several micro-batches. `each_microbatch` needs the least memory: a
    rank accumulates its shard of the gradients. `last_microbatch` communicates least, once per step: a rank accumulates all
    gradients in `training.reduce_dtype`, which in float32 takes 4 bytes for each parameter of its tensor-parallel shard.
    Pipeline schedules always wait for the last micro-batch."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory. Fits larger models; much slower."""

    def resolve(self, world_size: int) -> "Parallelism":
        """Returns the section with `shard = -1` replaced by its size. Raises `UserError` if the sizes do not divide evenly."""
        return replace(self, shard=infer_shard(self.dimensions(), world_size))

    def dimensions(self) -> dict[str, int]:
        """Returns the sizes of the five dimensions by name, outermost first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def problems(self) -> Iterator[str]:
        """Yields a sentence about the first contradiction among the keys of the pipeline."""
        pipeline, stages, split = self.pipeline, self.pipeline_stages, self.pipeline_split
        if split and stages and len(split) != stages * pipeline:
            yield (
                f"parallelism.pipeline_split has {len(split)} stages, but pipeline_stages x pipeline = {stages} x {pipeline}; "
                "remove pipeline_stages"
            )
        elif len(split) % pipeline:
            yield (
                f"parallelism.pipeline_split has {len(split)} stages, which pipeline = {pipeline} ranks cannot share equally; "
                f"give {pipeline} or a multiple"
            )
        elif (
            pipeline > 1
            and self.reshard_after_forward == "always"
            and SCHEDULES[self.pipeline_schedule].splits_backward
        ):
            # FSDP would free weights between the two parts of a backward pass, and lose gradients.
            yield (
                f"parallelism.reshard_after_forward = 'always' loses gradients with pipeline_schedule = "
                f"'{self.pipeline_schedule}', which computes weight gradients separately; use 'auto', or another schedule such as "
                "'interleaved_1f1b'"
            )

    def split(self, model: SplittableConfig) -> list[int]:
        """Returns the number of the model's blocks in each pipeline stage."""
        if self.pipeline_split:
            return list(self.pipeline_split)
        stages_per_rank = self.pipeline_stages or SCHEDULES[self.pipeline_schedule].stages_per_rank
        num_stages = self.pipeline * stages_per_rank if self.pipeline > 1 else 1
        return split_blocks(model.num_layers + model.num_mtp_layers, num_stages, model.lm_head_cost())


@section
class Float8:
    """Float8 matmuls: faster on GPUs of compute capability 8.9 or later, with torch.compile."""

    scaling: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "none"
    """Granularity of the scales. `tensorwise`: one per tensor, the fastest. `rowwise`: one per row, more accurate.
    `rowwise_with_gw_hp`: the same with weight gradients in `compute_dtype`, the most accurate. `mxfp8`: one per 32 elements,
    for Blackwell GPUs. `none` disables float8."""
    all_gather: Annotated[bool, IS_FLOAT8] = False
    """Run FSDP's all-gather of the converted weights in float8: a quarter of float32's traffic and memory, half of
    bfloat16's. Requires `tensorwise`."""
    layers: Annotated[tuple[str, ...], IS_FLOAT8] = ()
    """Linear layers to convert, by parts of their names: `feed_forward`, `wq`, `layers.0`, `layers.*.attention`, or `*` for all.
    Default: those linear layers of the blocks that are large enough for the faster matmul to outweigh the cost of the casts."""
    skip: Annotated[tuple[str, ...], IS_FLOAT8] = ()
    """Linear layers not to convert, named in the same way."""
    head: Annotated[bool, IS_FLOAT8] = False
    """Convert the LM head too. Logits are more sensitive to rounding than hidden layers. Disables the chunked loss."""
    emulate: Annotated[bool, IS_FLOAT8] = False
    """Round to float8 but multiply in float32, to measure the effect of float8 on the loss on any machine. Slower than
    float32."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        if self.all_gather and self.scaling not in ("none", "tensorwise"):
            yield (
                f"float8.all_gather = true requires one scale per matrix, but float8.scaling = {self.scaling!r} has many; "
                "set float8.scaling = 'tensorwise', or all_gather = false"
            )

    def hardware_problem(self, device: str, capability: tuple[int, int] | None) -> str:
        """Returns why a device of this compute capability (None: a CPU) does not support the scaling; "" if it does."""
        minimum, names = ((10, 0), "Blackwell") if self.scaling == "mxfp8" else ((8, 9), "Ada, Hopper, Blackwell")
        if self.scaling == "none" or self.emulate or (capability or (0, 0)) >= minimum:
            return ""
        actual = "has no float8" if capability is None else f"has {capability[0]}.{capability[1]}"
        return (
            f"float8.scaling = {self.scaling!r} requires a GPU of compute capability {minimum[0]}.{minimum[1]} or later ({names}), "
            f"but {device} {actual}; set float8.scaling = 'none', or float8.emulate = true to measure its effect on the loss (slow)"
        )


@section
class Compile:
    """torch.compile."""

    mode: Literal["block", "none"] = "block"
    """`block` compiles one block and reuses the code for all, for a fast start. `none` disables compilation: on a CPU the first
    compilation takes about half a minute, too long for short runs. With `parallelism.expert`, `block` compiles what is before
    and after the experts of a block."""
    backend: Annotated[str, only_with("mode", "block")] = "inductor"
    """Backend of torch.compile: one of torch, or one that an installed package registers with the entry point
    `torch_dynamo_backends`. `aot_eager` reproduces compilation errors without code generation."""


@section
class ActivationCheckpoint:
    """Activation checkpointing: recompute activations in the backward pass to save memory."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """`selective` keeps the outputs of attention, of collectives and of every second matmul of a block, `full` recomputes
    every block, and `memory_budget` lets the compiler choose what to keep. `none` disables it."""
    memory_budget: Annotated[Fraction, only_with("mode", "memory_budget")] = 0.5
    """For `memory_budget`: fraction of a block's activations to keep. 0 is like `full`; 1 keeps everything that the compiler
    would."""
    offload: Annotated[
        bool,
        only_if(
            lambda mode, compile_mode: (mode, compile_mode) != ("selective", "none"),
            "mode",
            "compile.mode",
            remedy='set {1} = "block", or {0} = "full"',
        ),
    ] = False
    """Copy what `mode` keeps to host memory, and back ahead of the backward pass, while the GPU computes. The activations of two
    blocks are on the GPU at a time. PCIe limits the speed: worthwhile for long sequences with `mode = "full"`, which keeps
    little."""


@section
class Checkpoint:
    """Checkpointing and resuming."""

    enabled: bool = True
    """Save checkpoints. Disable it to measure speed."""
    interval: Annotated[NonNegative, SAVES] = 500
    """Steps between checkpoints. The last step is always saved. 0 saves the last step only."""
    mode: Annotated[Literal["async", "sync"], SAVES] = "async"
    """`async` blocks training while the state is copied to host memory, and writes it in a thread. `sync` blocks until it is
    written."""
    keep: Annotated[Positive, SAVES] = 2
    """Number of most recent checkpoints to keep. Older ones are deleted after a newer one is committed."""
    keep_every: Annotated[NonNegative, SAVES] = 0
    """Also keep every checkpoint whose step is a multiple of this. 0 disables it."""
    dir: FilePath = ""
    """Directory or fsspec URL, such as `s3://bucket/runs`, in which each run has a directory for its checkpoints. It belongs to
    one run directory: another run of the same name is refused. Default: the run directory."""
    max_failures: Annotated[Positive, SAVES] = 3
    """Consecutive failed saves, on a full disk for example, after which the run stops. 1 stops at the first."""
    verify: Literal["content", "size"] = "content"
    """Verification before loading: `content` compares the hash of every file, `size` only its size, which avoids reading a
    very large checkpoint twice. From remote storage, `content` downloads files to the directory that TMPDIR names."""
    export: Literal["none", "float32", "bfloat16"] = "none"
    """Precision in which to export the model as a Hugging Face folder after the last step: `hf` in the run directory, or in
    `SM_MODEL_DIR` in a SageMaker job. Requires checkpoints in a local directory. `titanlike export` exports any checkpoint.
    `none` disables it."""
    initial: FilePath = ""
    """Weights to start a new run from: a Hugging Face folder, a run directory (its newest checkpoint) or a checkpoint.
    Training starts at step 1 with a new optimizer state. `titanlike import` writes a recipe for a Hugging Face folder.
    Default: random weights."""
    resume_from: NonNegative = 0
    """Step to resume from. Default: the newest checkpoint. Later checkpoints are archived. The key is not written to the recipe
    in the run directory, so the next start resumes from the newest checkpoint again."""
    allow_changed: tuple[str, ...] = ()
    """Keys that may differ from the checkpoint's recipe although they change training, such as `["optimizer.lr"]`. The resumed
    run is then not the run that the recipe describes. `["run.dir"]` takes over the checkpoints of another run directory, and
    `["model.rope_theta"]` changes what `initial` has."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        scheme, separator, _ = self.dir.partition("://")
        if self.export != "none" and not self.enabled:
            yield "checkpoint.export exports the last checkpoint, but checkpoint.enabled = false"
        if separator and scheme in ("memory", "http", "https", "data"):
            lost = "is lost when the process ends" if scheme == "memory" else "cannot be written"
            yield f"checkpoint.dir = {self.dir!r} {lost}; use a directory, or a store such as s3://bucket/runs"
        if self.export != "none" and separator:
            yield (
                f"checkpoint.export requires a local checkpoint.dir, but it is the URL {self.dir!r}; set checkpoint.export = "
                "'none', and use `titanlike export` on a copy"
            )
        if "://" in self.initial:
            yield f"checkpoint.initial = {self.initial!r} is a URL; download the folder, and give its path"


@section
class Validation:
    """Validation loss during training."""

    interval: NonNegative = 250
    """Steps between validations. 0 disables validation."""
    batches: Annotated[Positive, only_from("interval", 1)] = 8
    """Global batches in a validation: always the same ones, and equally many on every rank. Fewer if less data is held out; no
    batch is used twice."""


@section
class Evaluation:
    """Evaluation during training: tasks from local files, and the loss of text. `titanlike evaluate` does the same for a
    checkpoint."""

    interval: NonNegative = 0
    """Steps between evaluations. The last step is always evaluated. 0 disables evaluation."""
    tasks: Annotated[tuple[FilePath, ...], only_from("interval", 1)] = ()
    """JSON lines files, each with the items of a task in the format of HellaSwag, ARC, PIQA or LAMBADA, which their fields tell.
    Its metrics have the name of the file."""
    data: Annotated[tuple[FilePath, ...], only_from("interval", 1)] = ()
    """Text or token shards, each as `data.validation_path`, of which to compute loss, perplexity and bits per byte. Of shards, the
    test split is read if they have one, or else the validation split."""
    limit: Annotated[NonNegative, only_from("interval", 1)] = 0
    """Number of items of each task, and of sequences of `data`, from the first. 0: all."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        names = Counter(map(metrics_name, (*self.tasks, *self.data)))
        for name, count in names.items():
            if count > 1:
                yield f"{count} files of evaluation have the name {name!r}, which names their metrics; rename one"
        if self.interval and not names:
            yield "evaluation.interval is set, but there is nothing to evaluate; set evaluation.tasks or evaluation.data"


def metrics_name(path: str) -> str:
    """Returns the name of a task or text of an evaluation in metrics: its file name without the suffix."""
    return Path(path).name.partition(".")[0]


@section
class Sample:
    """Text generated by the model at the end of the run, and during training."""

    tokens: NonNegative = 0
    """Number of tokens to generate. 0 disables sampling."""
    interval: Annotated[NonNegative, only_from("tokens", 1)] = 0
    """Steps between samples during training, which are recorded with the metrics. 0: at the end of the run only."""
    prompt: Annotated[str, only_from("tokens", 1)] = "def "
    """Prompt to continue."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0), only_from("tokens", 1)] = 0.7
    """Sampling temperature. Values below 1 favor likely tokens; values above 1 increase randomness. 0 always chooses the most
    likely token."""


@section
class Metrics:
    """Logging of metrics."""

    interval: Positive = 10
    """Steps between records in `metrics.jsonl`, and between log lines if the output is not a terminal."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Experiment trackers that receive the records as well, each in a thread of its own: `tensorboard`, `wandb` (needs
    `pip install "titanlike[wandb]"`) and `mlflow` (`"titanlike[mlflow]"`). `[]` writes `metrics.jsonl` only."""
    project: Annotated[str, Field(min_length=1, max_length=100), tracks_with("wandb", "mlflow")] = "titanlike"
    """W&B project and MLflow experiment of the run."""
    tensorboard_dir: Annotated[str, tracks_with("tensorboard")] = ""
    """Folder, or address such as `s3://bucket/tensorboard`, that receives TensorBoard's events in a subfolder with the run's name.
    They are copied to an address every 30 seconds. Default: `tensorboard/` of the run directory, and in a SageMaker job with a
    TensorBoardOutputConfig its local path."""
    prometheus: str = ""
    """Address and port, such as `127.0.0.1:9401`, at which rank 0 serves the latest values to Prometheus, at `/metrics`. A port is
    for one run of a machine only. `0.0.0.0:9401` serves all interfaces, without authentication. Default: none."""
    hardware: Annotated[str, Field(max_length=4096)] = ""
    """Name of a hardware file, such as `ml.p5.48xlarge`, or the path of your own, to which MFU and the plan of `--check` refer.
    Default: the file of the run's GPU; for the plan, `h100`."""
    layer_interval: NonNegative = 0
    """Steps between records of each parameter's gradient norm, weight norm and update-to-weight ratio. They are not printed.
    0 disables them."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        for name in sorted(set(self.trackers)):
            if self.trackers.count(name) > 1:
                yield f"metrics.trackers names {name!r} twice; name it once"
        address, _, port = self.prometheus.rpartition(":")
        if self.prometheus and not (address and port.isdecimal() and 0 < int(port) < 2**16):
            yield (
                f"metrics.prometheus = {shown(self.prometheus)!r} is not an address and a port from 1 to 65535; use such as "
                "'127.0.0.1:9401'"
            )


@section
class Profiling:
    """Traces of training steps. `titanlike profile` prints where their time goes; Perfetto (ui.perfetto.dev) shows them."""

    steps: Annotated[
        tuple[Positive, ...],
        only_if(
            lambda steps, last: min(steps, default=0) <= last,
            "steps",
            "training.steps",
            remedy="set {0} to at least the first of them",
        ),
    ] = ()
    """Steps at which to begin a trace, such as `[10, 1000]`. Default: no traces, at no cost."""
    num_steps: Annotated[Positive, only_if(bool, "steps", remedy="set {0}")] = 3
    """Number of consecutive steps in a trace."""
    ranks: Annotated[
        tuple[NonNegative, ...], only_if(lambda steps, memory: steps or memory, "steps", "memory", remedy="set {0}")
    ] = (0,)
    """Ranks that are traced."""
    memory: bool = False
    """On GPUs, also record all allocations, and write a memory snapshot with each trace and at an out-of-memory error, for
    pytorch.org/memory_viz. Recording slows down the host."""
