"""Every section of a recipe on one page: the fields, their units, their defaults and the reason for each.

No torch here. A program of your own extends `PretrainRecipe` with sections of its own:

    @section
    class Ema:
        decay: float = 0.999
        '''Weight of the old average at each step.'''

    @section
    class MyRecipe(PretrainRecipe):
        ema: Ema = Ema()
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from titanlike.config.base import (
    Fraction,
    Name,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Share,
    section,
)
from titanlike.config.layout import DIMENSIONS, SCHEDULES, num_microbatches, ranks_left, split_blocks
from titanlike.config.model_configs import GPTConfig, LlamaConfig, TransformerConfig

DType = Literal["float32", "bfloat16"]


@section
class Run:
    """Where a run lives and what makes it repeatable."""

    name: Name = ""
    """Folder of the run. The same name again resumes it. Empty: the recipe's file name and the time, so a fresh run."""
    dir: str = "runs"
    """Folder that holds the runs, relative to where the command is given."""
    seed: NonNegative = 0
    """Decides the initial weights, the order of the data and the sample at the end, and nothing else."""
    deterministic: bool = False
    """Refuse operations that may differ from run to run on a GPU. Slower; a CPU is deterministic without it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. `auto` takes the GPUs if there are any."""
    hang_timeout: Positive = 600
    """Seconds without a step after which a run is taken to hang: it says which rank is missing, and ends with exit code 3. More
    than the longest step takes. The first step, validation and saving have ten minutes at least."""
    shutdown_timeout: Positive = 30
    """Seconds from a stop signal until the launcher kills the processes: the time available for a last checkpoint. torchrun's
    default is 30, SageMaker's 120."""


@section
class Tokenizer:
    """How text becomes tokens."""

    encoding: str = "bytes"
    """`bytes` (built in, 257 tokens, no download), the name of a tiktoken encoding such as `gpt2`, or the path of a file: a
    tiktoken rank file such as Llama 3's `tokenizer.model`, or Hugging Face's `tokenizer.json`."""
    special: Literal["eos", "bos", "both"] = "eos"
    """The special tokens of each document: `eos` closes it, `bos` opens it, `both`. Prepared data has them already, and has to
    have been prepared with the same."""
    eos: str = ""
    """The token that closes a document. Empty: the tokenizer's own, or the usual one."""
    bos: str = ""
    """The token that opens a document. Empty: the tokenizer's own, or the usual one."""


@section
class Data:
    """What the model reads."""

    source: Literal["python_stdlib", "text", "shards", "stream", "synthetic"] = "python_stdlib"
    """`shards`: tokens that `titanlike data prepare` has made, for all but small runs. `text`: files, made into tokens at the
    first start. `stream`: files, made into tokens while the run goes on. `python_stdlib`: the source of Python's own library,
    on every machine. `synthetic`: random tokens, to measure speed."""
    path: str = ""
    """For `shards`: their folder. For `text` and `stream`: a file, a folder (every file below it) or a pattern such as
    `corpus/*.jsonl.gz`. Each may be an address that fsspec knows: `s3://`, `https://`, `hf://datasets/`. A text file is a
    document; so is a line of `.jsonl` (or `.json`) and a row of `.parquet`, as they are or with `.gz` or `.zst`."""
    mixture: tuple[str, ...] = ()
    """In place of `path`, several of them."""
    weights: tuple[PositiveFloat, ...] = ()
    """Shares of the `mixture`, in its order, in sequences. They need not add up to 1. Empty: equal shares."""
    text_field: str = "text"
    """Where the text is in a line of JSON or a row of Parquet."""
    prompt_field: str = ""
    """Where a prompt is that comes before the text: read, and not learnt. Empty: there is none."""
    bad_records: Literal["stop", "skip"] = "stop"
    """What a record does that cannot be read: `stop` the run, or be left out, and told."""
    document_masks: bool = False
    """Keep the documents of a sequence apart: none sees another, and each has its positions counted from 0."""
    holdout_every: NonNegative = 50
    """One sequence in so many, evenly spread, is held out for validation and never trained on. 0 holds nothing out, and
    goes with `validation.interval = 0`. Shards with a validation split have that in its place."""
    validation_path: str = ""
    """Shards or text for validation alone: nothing of the training data is held out then."""
    cache: str = ""
    """A folder that keeps the tokens of `text` for later starts. Empty: `~/.cache/titanlike`."""
    prefetch: NonNegative = 2
    """BatchLoader that are made before they are asked for, beside the training. 0: none."""
    workers: Positive = 4
    """Threads that read a `stream`. They do not change what is read."""


@section
class Training:
    """The batch, its length, and the precision of the arithmetic."""

    steps: Positive = 1000
    """Optimizer steps of the whole run."""
    seq_len: Annotated[int, Field(ge=2)] = 2048
    """Tokens in a sequence."""
    global_batch_size: Positive = 32
    """Sequences in an optimizer step, over all ranks. Fixed by the recipe, so the result does not depend on the layout."""
    local_batch_size: Positive = 4
    """Sequences that one rank takes through the model at once, at most: as many as fit. The rest of its share is
    accumulated."""
    max_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    compute_dtype: DType = "bfloat16"
    """Precision of the forward and backward pass."""
    master_dtype: DType = "float32"
    """Precision in which the optimizer keeps and updates the weights."""
    reduce_dtype: DType = "float32"
    """Precision in which gradients are summed over ranks. bfloat16 halves the traffic."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Digits of products of float32 matrices. `high` lets GPUs take TF32, `medium` lets CPUs that can take bfloat16: faster
    with `compute_dtype = "float32"`, which then is no longer quite what it says."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """The kernel of attention. `auto` takes the first that can do it, in this order."""
    loss_chunk: NonNegative = 1024
    """Tokens whose logits are there at once: the loss and its gradient are found for so many, and the logits forgotten. Less
    memory, which a large vocabulary has need of; smaller than some hundred is slow. 0: all that a rank takes at once."""
    gc_interval: NonNegative = 50
    """Steps between garbage collections; one more, a whole one, follows the first step. Left to itself Python collects at a
    different step on each rank, and all wait. 0 leaves it to itself."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does: `stop` the run, or `skip` the step's update, which has to be known before
    the optimizer's turn: on a GPU the host then waits for each step."""
    skip_limit: Positive = 3
    """Steps to skip at most among any `skip_window` successive ones, across resumes. One more stops the run."""
    skip_window: Positive = 100
    """Steps among which the skipped ones are counted."""

    def num_microbatches(self, num_data_ranks: int) -> int:
        """Forward and backward passes that one rank makes in a step."""
        return num_microbatches(self.global_batch_size, self.local_batch_size, num_data_ranks)


@section
class Optimizer:
    """AdamW. Norms and biases are not decayed."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    beta1: Share = 0.9
    """Memory of the gradient's mean."""
    beta2: Share = 0.95
    """Memory of the gradient's square. 0.95 recovers from a loss spike sooner than Adam's usual 0.999."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square, against a division by zero."""
    weight_decay: NonNegativeFloat = 0.1
    """Share of a matrix, times the learning rate, taken off at each step."""
    fused: bool = True
    """One kernel for the whole update. Turn it off only to compare. For `state_dtype = "full"`."""
    state_dtype: Literal["full", "bfloat16", "8bit"] = "full"
    """Precision of Adam's two averages. `full`: that of the weights, 8 bytes a parameter in float32. `bfloat16`: 4 bytes.
    `8bit`: 2, in blocks that share a scale."""
    stochastic_rounding: bool = False
    """Round new weights up or down by chance, in proportion, so that small steps add up. For `master_dtype = "bfloat16"`."""


@section
class Schedule:
    """The learning rate over the steps: warm up, stay, decay."""

    warmup_steps: NonNegative = 100
    """Steps from 0 to the peak, in a straight line."""
    decay: Literal["linear", "cosine", "sqrt", "none"] = "cosine"
    """Form of the way down. `sqrt` falls fast at first: the usual end of a long stable phase."""
    decay_steps: NonNegative = 0
    """Length of the way down, counted from the last step. 0: all that is left after the warm-up, so no stable phase."""
    min_ratio: Fraction = 0.1
    """The floor, as a share of the peak."""


@section
class Parallelism:
    """How many ranks share the work, and how. The product of the five is the number of processes; none changes the result."""

    replicate: Positive = 1
    """Copies of the model (the outer dimension of HSDP). With `shard = 1` this is plain data parallelism."""
    shard: int = -1
    """Ranks over which weights, gradients and optimizer state are split (FSDP2). -1: all ranks that are left."""
    context: Positive = 1
    """Ranks that share each sequence: for sequences too long for one."""
    tensor: Positive = 1
    """Ranks that share each matrix, and between matrices the tokens of a sequence. They talk all the time: keep them on one
    machine."""
    async_tensor_parallel: bool = False
    """Overlap the talk of `tensor` with its products. Wants GPUs that reach each other's memory, and a compiled block."""
    pipeline: Positive = 1
    """Ranks that share the blocks, each holding whole ones. They talk least: for between machines."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"] = "1f1b"
    """The order of the passes. `1f1b` keeps fewer activations than `gpipe`; the others have more stages than ranks, and the last
    three put gradients of weights into the gaps, so each wastes less time waiting."""
    pipeline_stages: NonNegative = 0
    """Stages that each rank holds. 0: what the schedule is made for, one or two."""
    pipeline_split: tuple[Positive, ...] = ()
    """Number of blocks of each stage, in order, such as `[7, 8, 8, 9]`. Empty: balanced, the head counted as the blocks that
    it costs."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """When to let go of gathered weights. `auto`: after each block; the head keeps its own, which the backward pass needs at once.
    `never` gathers once a pass, for the memory of a whole model in `compute_dtype`."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory. Fits larger models; much slower."""

    def resolve(self, world_size: int) -> "Parallelism":
        """The same section with `shard = -1` replaced by its number, or an error if the ranks do not come out even."""
        return replace(self, shard=ranks_left(self.dimensions(), world_size))

    def dimensions(self) -> dict[str, int]:
        """The five dimensions by name, from the one whose ranks talk least to the one whose ranks talk most."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def split(self, model: TransformerConfig) -> list[int]:
        """How many of the model's blocks each stage of the pipeline has."""
        if self.pipeline_split:
            return list(self.pipeline_split)
        stages_per_rank = self.pipeline_stages or SCHEDULES[self.pipeline_schedule].stages_per_rank
        num_stages = self.pipeline * stages_per_rank if self.pipeline > 1 else 1
        return split_blocks(model.num_layers, num_stages, model.lm_head_cost())


@section
class Float8:
    """Matrix products of 8-bit floats: faster on GPUs that have them (compute capability 8.9 and later), with torch.compile."""

    scaling: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "none"
    """Numbers that share a scale. `tensorwise`: a whole tensor, the fastest. `rowwise`: a row, more accurate.
    `rowwise_with_gw_hp`: the same, with weights' gradients in `compute_dtype`, the most accurate. `mxfp8`: 32 neighbours,
    for Blackwell GPUs. `none` turns float8 off."""
    all_gather: bool = False
    """FSDP gathers these weights as float8: a quarter of float32's traffic and memory, half of bfloat16's. `tensorwise` only."""
    layers: tuple[str, ...] = ()
    """Matrices to convert, by a part of their names: `feed_forward`, `wq`, `layers.0`, `layers.*.attention`. Empty: all of the
    blocks'."""
    skip: tuple[str, ...] = ()
    """Matrices to leave as they are, named the same way."""
    skip_small: bool = True
    """Leave those as they are that are too small to gain more in the product than the casts cost."""
    head: bool = False
    """Convert the head too. Logits suffer more from rounding than what is inside the model, and are then there all at once."""
    emulate: bool = False
    """Round as float8 does, multiply in float32: to see on any machine what float8 does to the loss. Slower than without."""


@section
class Compile:
    """torch.compile."""

    mode: Literal["block", "model", "none"] = "block"
    """`block` compiles one block and reuses it for all: the fast start. `model` compiles everything at once, and shards it
    as one piece. On a CPU the first compile takes about half a minute, so short runs want `none`."""
    backend: str = "inductor"
    """The compiler's back end. `aot_eager` finds a fault without waiting for code generation."""
    cache: str = ""
    """A folder that keeps compiled code, for starts on other machines of the same kind: on storage that they share. Empty:
    this machine keeps its own."""


@section
class ActivationCheckpoint:
    """Recompute activations in the backward pass instead of keeping them: memory for time."""

    mode: Literal["none", "selective", "every_n", "full", "memory_budget"] = "none"
    """`selective` keeps attention and every second matrix product of a block, `every_n` recomputes every n-th block,
    `full` every block, and `memory_budget` lets the compiler choose what to keep."""
    every_n: Positive = 2
    """For `every_n`: recompute one block in so many."""
    memory_budget: Fraction = 0.5
    """For `memory_budget`: share of a block's activations to keep. 0 is like `full`, 1 keeps all that the compiler would."""


@section
class Checkpoint:
    """Saving, and with it resuming."""

    enabled: bool = True
    """Save at all. Turn it off to measure speed."""
    interval: NonNegative = 500
    """Steps between saves. The last step is saved too. 0: only the last."""
    mode: Literal["async", "sync"] = "async"
    """`async`: training waits while what is saved is copied to the host's memory, and goes on while it is written. `sync`: it
    waits for all of it."""
    keep: Positive = 2
    """How many of the newest to keep. Older ones are deleted after a newer one is complete."""
    keep_every: NonNegative = 0
    """Keep those of every so many steps besides, for ever. 0 keeps none but the newest."""
    dir: str = ""
    """Where to keep them: a folder, or an address that fsspec knows, such as `s3://bucket/runs`; in it each run has a folder.
    Empty: in the run's own folder."""
    max_failures: Positive = 3
    """Saves in a row that may fail, as on a full disk, before the run stops: with the first that succeeds it is as before.
    1 stops at the first."""
    verify: Literal["content", "size"] = "content"
    """What is looked at before a checkpoint is loaded: the hash of every file, or its size alone, where reading all of a very
    large one twice takes too long."""
    weights: Literal["none", "float32", "bfloat16"] = "none"
    """Precision in which the weights alone, whole, are written after the last step, as `weights.safetensors` in the run's
    folder. For checkpoints in a folder. `titanlike consolidate` does the same of any checkpoint."""
    resume_from: NonNegative = 0
    """The step to go on from, if not the newest. Later checkpoints are put aside, and the recipe in the run's folder does not
    have this key, so the next start goes on from the newest again."""
    allow_changed: tuple[str, ...] = ()
    """Keys that may be other than when the checkpoint was saved though they change what is trained, such as
    `["optimizer.lr"]`. What is read back then need not be what the recipe would have led to."""


@section
class Validation:
    """Loss on held-out text while training."""

    interval: NonNegative = 250
    """Steps between validations. 0 turns them off."""
    batches: Positive = 8
    """Global batches in a validation: always the same ones, the same number on every rank. Fewer where less is held out:
    none is read twice."""


@section
class Sample:
    """A piece of text from the trained model at the end of the run."""

    tokens: NonNegative = 0
    """Length of the sample. 0 turns it off."""
    prompt: str = "def "
    """What the sample starts from."""
    temperature: Annotated[float, Field(ge=0.01)] = 0.7
    """Below 1 keeps to likely tokens, above 1 wanders."""


@section
class Metrics:
    """What a run tells of itself."""

    interval: Positive = 10
    """Steps between two records of `metrics.jsonl`, and between two lines where there is no terminal."""
    tensorboard: bool = True
    """Write the same numbers as TensorBoard events."""


@section
class PretrainRecipe:
    """Everything that `recipes/pretrain.py` reads."""

    recipe: str = "pretrain"
    """The program that this recipe is for: a file of that name beside the recipe, or in `recipes/`; or a path to one."""
    run: Run = Run()
    model: Annotated[LlamaConfig | GPTConfig, Field(discriminator="name")] = LlamaConfig()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallelism: Parallelism = Parallelism()
    float8: Float8 = Float8()
    compile: Compile = Compile()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    sample: Sample = Sample()
    metrics: Metrics = Metrics()
