"""Command lines of Megatron-LM's pretrain_gpt.py as recipes. `formats.py` calls it for `titanlike import` and `titanlike plan`."""

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlike.config.base import LIMIT, UserError, shown
from titanlike.tools.migration.conversion import Conversion
from titanlike.tools.migration.megatron_model import model_section
from titanlike.tools.migration.megatron_options import KEYS
from titanlike.tools.migration.megatron_schedule import set_schedule
from titanlike.tools.migration.script import PROGRAM, run_script

MAX_SIZES = 10_000  # of a batch-size ramp
THRESHOLD = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
DATA_ORDER = "data: Megatron-LM shuffles with a seed of its own; here the order is a function of seed and step"


def convert(
    name: str,
    text: str,
    num_gpus: int | None,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    trust: bool = False,
) -> Conversion | None:
    """Returns the recipe of a script that starts Megatron-LM, or of its command line; None if there is none in the text.

    Args:
        num_gpus: of the job. Default: from the launcher's options in the script.
        folder, env, trust: of `run_script`.
    """
    if not re.search(PROGRAM, text) and "--num-layers" not in text:
        return None
    script = run_script(name, text, folder, env or {}, trust=trust)
    found = [_parts(words) for words in script.commands if _is_start(words)]
    if not found:
        raise UserError(f"{name}: bash finds no start of Megatron-LM in it ({script.problem})")
    launcher, words = max(found, key=lambda one: (len(one[1]), one))  # others may set up something
    options = _options(name, words, script.unset)
    job = Conversion("Megatron-LM", name, options, KEYS, num_gpus or _num_gpus(launcher), planned_as="megatron")
    where = "" if num_gpus else ", as its launcher's options say"
    if script.unset:
        variables = shown(", ".join(script.unset))
        job.differ(f"the script reads variables that are not set as empty: {variables}; --env NAME=VALUE sets one")
    model = model_section(job)
    _data(job)
    data_ranks = _layout(job, model.num_layers, where)
    steps = _batch(job, data_ranks)
    _optimizer(job)
    set_schedule(job, steps)
    _precision(job)
    _checkpoint(job)
    _observation(job, steps)
    job.differ(DATA_ORDER)
    job.finish()
    return job


def _is_program(word: str) -> bool:
    return re.fullmatch(PROGRAM, word.rpartition("/")[2]) is not None


def _is_start(words: list[str]) -> bool:
    """Whether a command starts Megatron-LM, or is its options alone."""
    is_other = any(word.endswith(".py") for word in words)
    return any(map(_is_program, words)) or ("--num-layers" in words and not is_other)


def _parts(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns what a command line has before Megatron-LM's program, and after it."""
    end = next((index for index, word in enumerate(words) if _is_program(word)), 0)
    return words[:end], words[end + 1 :]


def _options(name: str, words: list[str], unset: list[str]) -> dict[str, Any]:
    """Returns options and their values, of the types that are known of them. A flag has the value true."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if re.match(r"--[a-zA-Z]", word):
            option, equals, value = word.partition("=")
            values = options[option] = [value] if equals else []
        else:
            values.append(word.strip("'\""))
    return {key: _typed(name, key, values, unset) for key, values in options.items()}


def _typed(name: str, key: str, values: list[str], unset: list[str]) -> Any:
    known, text = KEYS.get(key), " ".join(values)
    types = known.valid_types if known else ()
    if list in types:
        return values
    if not types:
        return text or True
    if bool in types:
        if values:
            raise UserError(f"{name}: {key} takes no value, but is followed by {shown(text)}")
        return True
    if str in types:
        return text
    try:
        return float(text) if float in types else int(text)
    except ValueError:
        kind = "a number" if float in types else "an integer"
        hint = f"; the script does not set {shown(', '.join(unset))}: give --env NAME=VALUE" if unset else ""
        raise UserError(f"{name}: {key} = {shown(text)!r} is not {kind}{hint}") from None


def _num_gpus(launcher: list[str]) -> int | None:
    """Returns the number of GPUs that the options of torchrun say, if they do."""
    sizes = {}
    text = " ".join(launcher).replace("=", " ").replace("-", "_").split()
    for word, value in itertools.pairwise(text):
        if word in ("__nproc_per_node", "__nnodes") and value.isdigit():
            sizes[word] = int(value)
    return math.prod(sizes.values()) if len(sizes) == 2 else None


def _data(job: Conversion) -> None:
    kind, model = job["--tokenizer-type"], job["--tokenizer-model"]
    if kind in ("", "GPT2BPETokenizer"):
        job.set(
            "tokenizer.encoding", "gpt2", "--tokenizer-type", "--vocab-file", comment="tiktoken's, with the same tokens"
        )
    elif kind == "NullTokenizer":
        job.set("tokenizer.encoding", "bytes", "--tokenizer-type", comment="there is no text")
    else:
        job.set("tokenizer.encoding", model or "tokenizer", "--tokenizer-model",
                comment="a Hugging Face folder, tokenizer.json, or tiktoken file: set it")  # fmt: skip
        if kind in ("Llama2Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
            job.leave(
                "--tokenizer-type", "SentencePiece files are not read; give the folder with the model's tokenizer.json"
            )
    paths = [path for path in job["--data-path"] if not re.fullmatch(r"[\d.]+", path)]
    if job["--mock-data"] or "--data-path" not in job.given:
        job.set("data.source", "synthetic", "--mock-data")
    else:
        job.set("data.source", "shards", "--data-path")
        weights = [float(path) for path in job["--data-path"] if path not in paths]
        files = [path or "shards" for path in paths or [""]]
        comment = "Megatron-LM's .bin and .idx are read in place"
        if len(files) > 1:
            job.set("data.mixture", files, "--data-path", comment=comment)
            job.set("data.weights", weights if len(weights) == len(files) else [], "--data-path")
        else:
            job.set("data.path", files[0], "--data-path", comment=comment)
    masks = job["--reset-attention-mask"]
    job.set("data.document_masks", masks, "--reset-attention-mask")
    if job["--reset-position-ids"] != masks:
        job.leave("--reset-position-ids", "position ids restart if, and only if, attention is masked between documents")
    interval, iterations = job["--eval-interval"], job["--eval-iters"]
    shares: list[float] = [float(part) for part in re.findall(r"[\d.]+", job["--split"])]
    share = shares[1] / sum(shares) if len(shares) > 1 and any(shares) else 0.0
    if iterations < 1 or not share:
        job.set("validation.interval", 0, "--eval-iters", "--split")
        job.set("data.holdout_every", 0, "--split")
        return
    job.set("validation.interval", interval, "--eval-interval")
    job.set("validation.batches", iterations, "--eval-iters")
    job.set(
        "data.holdout_every",
        max(2, round(1 / share)),
        "--split",
        comment="shards with a validation split have their own",
    )
    if len(shares) > 2 and shares[2]:
        job.differ(
            f"--split: a share of {shares[2]:g} for tests, which Megatron-LM does not train on, is training data here"
        )


def _layout(job: Conversion, num_layers: int, where: str) -> int:
    """Returns the number of data-parallel ranks, 0 if it is not known."""
    sizes = []
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        key = f"--{name}-parallel-size"
        sizes.append(job[key])
        job.set(f"parallelism.{name.removesuffix('-model')}", job[key], key)
    tensor, pipeline, context, expert = sizes
    others, data_ranks = tensor * pipeline * context, 0
    if job.num_gpus:
        data_ranks, rest = divmod(job.num_gpus, others)
        if rest or not data_ranks:
            raise UserError(
                f"{job.source}: its layout needs a multiple of {others} GPUs, not {job.num_gpus}{where}; give --gpus"
            )
    _data_parallel(job, data_ranks, expert)
    sequence_parallel, overlap = job["--sequence-parallel"], job["--tp-comm-overlap"]
    if tensor > 1 and not sequence_parallel:
        job.differ(
            "--sequence-parallel is not set; it is always on here, which takes less memory and computes the same"
        )
        job.plan_changes["sequence_parallel"] = False
    if tensor > 1:
        job.set("parallelism.async_tensor_parallel", overlap, "--tp-comm-overlap")
        if not overlap:
            job.plan_changes["async_tensor_share"] = 0.0
    if expert > 1 and job["--expert-tensor-parallel-size"] not in (None, tensor):
        job.leave("--expert-tensor-parallel-size", f"parallelism.tensor = {tensor} shards every expert here as well")
    _pipeline(job, num_layers, pipeline)
    return data_ranks


def _data_parallel(job: Conversion, data_ranks: int, expert: int) -> None:
    """DDP, ZeRO-1, or FSDP."""
    keys = ("--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
    strategy = job["--data-parallel-sharding-strategy"]
    is_fsdp = any(job[key] for key in keys[1:])
    shards = "optim_grads_params" if job["--use-torch-fsdp2"] else strategy if is_fsdp else "optim"
    if not (job["--overlap-grad-reduce"] or is_fsdp):
        job.plan_changes["overlaps"] = False
    if (is_fsdp and shards != "no_shard") or job[keys[0]] or expert > 1:
        job.set("parallelism.shard", -1, *keys)
        if shards == "optim_grads_params":
            return
        job.set(
            "parallelism.reshard_after_forward",
            "never",
            "--use-distributed-optimizer",
            "--data-parallel-sharding-strategy",
        )
        job.set("parallelism.gradient_sync", "last_microbatch", "--use-distributed-optimizer")
        if shards == "optim":
            job.differ(
                "the distributed optimizer is ZeRO-1; parallelism.reshard_after_forward = 'never' is nearest: it shards "
                "gradients and, between "
                "steps, parameters too"
            )
        return
    if not data_ranks:
        raise UserError(
            f"{job.source}: without --use-distributed-optimizer each data-parallel rank has a replica, and their number is "
            "the number of GPUs "
            "divided by the other dimensions; give the number of GPUs of the job, such as --gpus 8"
        )
    job.set(
        "parallelism.replicate", data_ranks, *keys, comment="without --use-distributed-optimizer, replicas as in DDP"
    )
    job.set("parallelism.shard", 1, *keys)


def _pipeline(job: Conversion, num_layers: int, pipeline: int) -> None:
    keys = (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
    )
    per_stage, virtual, first, last = (job[key] for key in keys)
    if pipeline == 1:
        return
    if per_stage:
        virtual = max(1, num_layers // pipeline // per_stage)
    stages = pipeline * (virtual or 1)
    job.set("parallelism.pipeline_schedule", "interleaved_1f1b" if virtual and virtual > 1 else "1f1b", *keys[:2])
    ends = [size for size in (first, last) if size]
    middle, rest = divmod(num_layers - sum(ends), stages - len(ends)) if stages > len(ends) else (0, 1)
    if rest or middle < 1:
        if any(job.given.get(key) for key in keys) or num_layers % pipeline:
            job.differ("pipeline: the blocks of the stages are left to parallelism.pipeline_split's default")
        return
    sizes = [middle] * stages
    sizes[0], sizes[-1] = first or middle, last or middle
    job.set("parallelism.pipeline_split", sizes, *keys, comment="as Megatron-LM divides the blocks")


def _batch(job: Conversion, data_ranks: int) -> int:
    """Batch sizes and steps. Returns the number of steps."""
    micro, total = job["--micro-batch-size"], job["--global-batch-size"]
    if not micro:
        raise UserError(f"{job.source}: --micro-batch-size is missing")
    if not total and not data_ranks:
        raise UserError(
            f"{job.source}: --global-batch-size is missing, so that it is --micro-batch-size on each data-parallel rank; give "
            "the number of "
            "GPUs of the job, such as --gpus 8"
        )
    total = total or micro * data_ranks
    job.set("training.global_batch_size", total, "--global-batch-size")
    job.set("training.local_batch_size", micro, "--micro-batch-size")
    ramp = _ramp(job, total)
    steps, samples = job["--train-iters"], job["--train-samples"]
    if not steps and not samples:
        raise UserError(f"{job.source}: neither --train-iters nor --train-samples is set; add one")
    if not steps:
        consumed = sum(number * size for number, size in ramp)
        steps = max(1, sum(number for number, _ in ramp) + max(0, samples - consumed) // total)
    job.set("training.steps", min(steps, LIMIT), "--train-iters", "--train-samples")
    return min(steps, LIMIT)


def _ramp(job: Conversion, total: int) -> list[list[int]]:
    """Returns the pairs of steps and sequences before the last batch size."""
    linear, stepwise = job["--rampup-batch-size"], job["--step-batch-size-schedule"]
    try:
        if linear:
            start, increment, samples = map(int, linear)
            count = (total - start) // increment
            if start < 1 or not 1 <= count <= MAX_SIZES:
                raise ValueError
            limits = [(start + index * increment, (index + 1) * samples // count) for index in range(count)]
        elif stepwise:
            entries = [entry.split(":") for entry in stepwise.replace("'", " ").split()]
            starts = [
                float(text.rstrip("KMBT")) * THRESHOLD.get(text[-1:], 1) / job["--seq-length"] for text, _ in entries
            ]
            limits = [(int(size), int(end)) for (_, size), end in zip(entries[:-1], starts[1:], strict=True)]
        else:
            return []
    except (ValueError, ZeroDivisionError):
        raise UserError(
            f"{job.source}: --rampup-batch-size or --step-batch-size-schedule cannot be read: {shown(str(linear or stepwise))}"
        ) from None
    ramp, consumed = [], 0
    for size, end in limits:
        if size > 0 and (number := -(-(end - consumed) // size)) > 0:
            ramp.append([number, size])
            consumed += number * size
    job.set(
        "training.batch_ramp",
        ramp,
        "--rampup-batch-size",
        "--step-batch-size-schedule",
        comment="pairs of steps and sequences",
    )
    return ramp


def _optimizer(job: Conversion) -> None:
    if job["--optimizer"] != "adam":
        job.leave("--optimizer", "AdamW here")
    if not job["--lr"]:
        raise UserError(f"{job.source}: --lr is missing")
    job.set("optimizer.lr", job["--lr"], "--lr")
    clip = job["--clip-grad"]
    job.set(
        "training.max_norm", clip or float(LIMIT), "--clip-grad", comment="" if clip else "0 disables clipping there"
    )
    if job["--decoupled-lr"]:
        scale = job["--decoupled-lr"] / job["--lr"]
        job.set(
            "optimizer.groups",
            [{"pattern": name, "lr_scale": scale} for name in ("tok_embeddings", "output")],
            "--decoupled-lr",
        )
        if job["--decoupled-min-lr"] is not None:
            job.leave("--decoupled-min-lr", "schedule.min_ratio is that of all parameters")


def _precision(job: Conversion) -> None:
    """Precision, float8 and what is recomputed."""
    half = "float16" if job["--fp16"] else "bfloat16"
    job.set("training.compute_dtype", half if job["--bf16"] or job["--fp16"] else "float32", "--bf16", "--fp16")
    job.set("training.reduce_dtype", "bfloat16" if job["--grad-reduce-in-bf16"] else "float32", "--grad-reduce-in-bf16",
            "--accumulate-allreduce-grads-in-fp32")  # fmt: skip
    if job["--fp8-format"]:
        recipe = job["--fp8-recipe"]
        scaling = {"tensorwise": "tensorwise", "mxfp8": "mxfp8"}.get(recipe, "tensorwise")
        job.set("float8.scaling", scaling, "--fp8-recipe", "--fp8-format")
        job.set("float8.layers", ["*"], "--fp8-format", comment="all linear layers of the blocks")
        gathers = (job["--fp8-param-gather"] or job["--fp8-param"]) and scaling == "tensorwise"
        job.set("float8.all_gather", gathers, "--fp8-param-gather")
        if recipe != scaling:
            job.lack(
                "--fp8-recipe", "no such scaling here; 'tensorwise' computes the scale of each tensor when it is cast"
            )
    granularity = "selective" if job["--recompute-activations"] else job["--recompute-granularity"]
    if job["--checkpoint-activations"] or job["--activations-checkpoint-method"]:
        granularity = "full"
    method, number = job["--recompute-method"], job["--recompute-num-layers"]
    keys = (
        "--recompute-granularity",
        "--recompute-activations",
        "--checkpoint-activations",
        "--activations-checkpoint-method",
    )
    comment = (
        "Megatron-LM recomputes attention scores, which flash attention never stores"
        if granularity == "selective"
        else ""
    )
    job.set("activation_checkpoint.mode", "full" if granularity == "full" else "none", *keys, comment=comment)
    if granularity == "full" and (method == "block" or (number or 1) > 1):
        job.leave("--recompute-num-layers", "each block is recomputed by itself here, which takes other memory")
    if granularity == "selective" and job["--recompute-modules"] not in ([], ["core_attn"]):
        job.leave("--recompute-modules", "nothing is recomputed here; try activation_checkpoint.mode = 'selective'")


def _checkpoint(job: Conversion) -> None:
    save, load = job["--save"], job["--load"]
    job.set("checkpoint.enabled", "--save" in job.given, "--save", comment="in the run directory")
    job.set("checkpoint.interval", job["--save-interval"] or job["--persistent-save-interval"] or 0, "--save-interval",
            "--persistent-save-interval")  # fmt: skip
    job.set("checkpoint.mode", "async" if job["--async-save"] else "sync", "--async-save")
    if job["--save-retain-interval"]:
        job.set("checkpoint.keep_every", job["--save-retain-interval"], "--save-retain-interval")
    else:
        job.set("checkpoint.keep_every", 1, comment="Megatron-LM keeps all checkpoints")
    if load == save:
        job.leave("--load", "a run of the same name resumes by itself", changes=False)
    else:
        job.leave("--load", "`titanlike import CHECKPOINT recipe.toml` converts a checkpoint")
    for key in ("--finetune", "--pretrained-checkpoint", "--ckpt-step"):
        job.leave(key, "`titanlike import CHECKPOINT recipe.toml --weights-only` converts its weights")


def _observation(job: Conversion, steps: int) -> None:
    trackers = [
        name for name, key in (("tensorboard", "--tensorboard-dir"), ("wandb", "--wandb-project")) if key in job.given
    ]
    job.set("metrics.trackers", trackers, "--tensorboard-dir", "--wandb-project")
    if job["--wandb-project"]:
        job.set("metrics.project", job["--wandb-project"][:100], "--wandb-project")
    start, end = job["--profile-step-start"], job["--profile-step-end"]
    if job["--profile"] and 0 < start <= steps:
        job.set("profiling.steps", [start], "--profile", "--profile-step-start")
        job.set("profiling.num_steps", max(1, end - start), "--profile-step-end")
