"""Job configs of torchtitan 0.2.0 to 0.2.2 as recipes, and the keys that those of 0.3 share with them. `formats.py` calls it for
`titanlike import` and `titanlike plan`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from titanlike.config.base import UserError
from titanlike.config.optimizer import Schedule
from titanlike.models.common.config import TransformerConfig
from titanlike.tools.migration.conversion import Conversion
from titanlike.tools.migration.torchtitan_keys import KEYS
from titanlike.tools.migration.torchtitan_models import SOURCE_C4, VALIDATION_C4, model_section

MAX_TRACES = 10  # of a recipe; torchtitan has no limit

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved_1f1b",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
# Keys of earlier versions, whose models and defaults differ.
EARLIER = {"training.batch_size", "training.compile", "checkpoint.enable_checkpoint", "model.tokenizer_path"}
INITIALIZATION = (
    "initial weights: normal with a standard deviation of 1 for the embedding, dim**-0.5 for the head, and for wo, w2 and w3 "
    "of block i 0.02 / sqrt(2 * (i + 1)); here 0.02, and 0.02 / sqrt(2 * num_layers) for wo and w2"
)
DATA_ORDER = (
    "data: each rank reads its part of the stream and skips a token between sequences; here the order is a function of seed "
    "and step, whatever the layout"
)


def convert(name: str, values: Mapping[str, Any], num_gpus: int | None) -> Conversion:
    """Returns the recipe of a job config. Raises `UserError` for a model that this toolkit does not have.

    Args:
        num_gpus: of the job, which its batch size may depend on.
    """
    given = dict(flat(values))
    if earlier := sorted(EARLIER & given.keys()):
        raise UserError(
            f"{name}: {', '.join(earlier)}: keys of torchtitan before 0.2 are not converted; write those of 0.2.2 instead"
        )
    job = Conversion("torchtitan 0.2", name, given, KEYS, num_gpus, planned_as="torchtitan")
    convert_keys(job, model_section(job))
    job.differ(INITIALIZATION)
    job.differ(DATA_ORDER)
    job.finish()
    return job


def convert_keys(job: Conversion, model: TransformerConfig, groups: Sequence[Mapping[str, Any]] = ()) -> None:
    """Sets everything but the model, by the keys of 0.2. `groups` of parameters differ from the optimizer's keys."""
    _data(job)
    data_ranks = _batch(job)
    _optimizer(job, groups)
    _schedule(job)
    _layout(job, model.num_layers)
    _float8(job, model.matrices())
    _compute(job)
    _checkpoint(job)
    _validation(job, data_ranks)
    _observation(job)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _data(job: Conversion) -> None:
    """Tokenizer and training data."""
    job.set("tokenizer.encoding", job["model.hf_assets_path"], "model.hf_assets_path")
    job.set("tokenizer.special", "both", comment="torchtitan delimits documents on both sides")
    name, path = job["training.dataset"].lower(), job["training.dataset_path"]
    job.set("data.source", "text" if name == "c4_test" else "stream", "training.dataset")
    known = {"c4": SOURCE_C4, "c4_test": "tests/assets/c4_test", "c4_validation": VALIDATION_C4}
    if path:
        job.set("data.path", path, "training.dataset_path", comment="a folder or pattern of .jsonl or .parquet files")
    elif name in known:
        job.set(
            "data.path",
            known[name],
            "training.dataset",
            comment="in a clone of torchtitan" if name == "c4_test" else "",
        )
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
            "sequences on each data-parallel rank; give the number of GPUs of the job, such as --gpus 8"
        )
    else:
        job.batch_grows = True
        comment = f"{local} on each of {data_ranks} data-parallel ranks; torchtitan's batch grows with the GPUs"
        keys = ("training.local_batch_size", "training.global_batch_size")
        job.set("training.global_batch_size", local * data_ranks, *keys, comment=comment)
    if job["parallelism.pipeline_parallel_degree"] > 1:
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


def _optimizer(job: Conversion, groups: Sequence[Mapping[str, Any]]) -> None:
    decay = job["optimizer.weight_decay"]
    job.set("optimizer.weight_decay", decay, "optimizer.weight_decay")
    if decay or groups:
        job.set(
            "optimizer.groups",
            [*groups, {"pattern": "*", "weight_decay": decay}],
            "optimizer.weight_decay",
            comment="norms too, as torchtitan decays them; without the last, matrices and embeddings only",
        )
    if job["optimizer.name"] != "AdamW":
        job.leave("optimizer.name", "AdamW here; Adam adds weight decay to the gradient instead")


def _schedule(job: Conversion) -> None:
    steps, given_warmup = job["training.steps"], job["lr_scheduler.warmup_steps"]
    if job["lr_scheduler.total_steps"] not in (None, steps):
        job.leave(
            "lr_scheduler.total_steps",
            f"the schedule here ends at training.steps; set training.steps to it, and stop the run at step {steps}",
        )
    warmup = min(given_warmup, steps)
    kind, ratio = job["lr_scheduler.decay_type"], job["lr_scheduler.decay_ratio"]
    length = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    comment = f"torchtitan limits {given_warmup} to all steps" if warmup != given_warmup else ""
    job.set("schedule.warmup_steps", warmup, "lr_scheduler.warmup_steps", comment=comment)
    job.set("schedule.decay", kind if length else "none", "lr_scheduler.decay_type")
    whole = ratio is None or not length or length == steps - warmup
    job.set("schedule.decay_ratio", 0.0 if whole else float(ratio), "lr_scheduler.decay_ratio",
            comment="0: all steps after the warmup" if whole else "")  # fmt: skip
    job.set("schedule.min_ratio", job["lr_scheduler.min_lr_factor"], "lr_scheduler.min_lr_factor")
    section = job.checked(Schedule, job.tables["schedule"])
    job.compare_schedule(
        section,
        steps,
        lambda step: torchtitan_learning_rate(step, steps, section),
        "the decay begins one step later and would reach its end one step after the last",
    )


def torchtitan_learning_rate(step: int, num_steps: int, section: Schedule) -> float:
    """Returns torchtitan's learning rate of a step, counted from 1, as a fraction of the peak."""
    from titanlike.optim.schedule import learning_rate  # imports torch

    is_decay = step > num_steps - section.num_decay_steps(num_steps)
    return learning_rate(step - is_decay, num_steps, 1.0, section)


def _layout(job: Conversion, num_layers: int) -> None:
    """FSDP and pipeline; sizes of dimensions have a key each."""
    reshard = job["parallelism.fsdp_reshard_after_forward"]
    job.set(
        "parallelism.reshard_after_forward",
        {"default": "auto"}.get(reshard, reshard),
        "parallelism.fsdp_reshard_after_forward",
    )
    asynchronous = job["parallelism.enable_async_tensor_parallel"]
    if asynchronous and job["parallelism.tensor_parallel_degree"] == 1:
        job.leave("parallelism.enable_async_tensor_parallel", "there is no tensor parallelism", changes=False)
    else:
        job.set("parallelism.async_tensor_parallel", asynchronous, "parallelism.enable_async_tensor_parallel")
    tensor, expert_tensor = job["parallelism.tensor_parallel_degree"], job["parallelism.expert_tensor_parallel_degree"]
    if job["parallelism.expert_parallel_degree"] > 1 and expert_tensor != tensor:
        job.lack(
            "parallelism.expert_tensor_parallel_degree",
            f"parallelism.tensor = {tensor} shards every expert here as well",
        )
    stage_keys = [
        f"parallelism.{name}"
        for name in ("module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
                     "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule")
    ]  # fmt: skip
    pipeline = job["parallelism.pipeline_parallel_degree"]
    if pipeline == 1:
        for key in stage_keys:
            job.leave(key, "there is no pipeline", changes=False)
        return
    modules, first, last, per_stage, name = (job[key] for key in stage_keys)
    schedule = SCHEDULES.get(name.lower())
    if schedule is None:
        raise UserError(
            f"{job.source}: parallelism.pipeline_parallel_schedule = {name!r} is not supported; use one of 1F1B, GPipe, "
            "Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV"
        )
    job.set("parallelism.pipeline_schedule", schedule, stage_keys[-1])
    if modules:
        sizes = [
            sum(str(module).startswith("layers.") for module in part) for part in modules if isinstance(part, list)
        ]
    else:
        stages = pipeline * (1 if schedule in ("1f1b", "gpipe") else 2)
        stages = -(-(num_layers + first + last) // per_stage) if per_stage else stages
        per_stage, extra = divmod(num_layers + first + last, stages)
        ends = {0: first, stages - 1: last}  # what the embedding and the head count as, in blocks
        indices = range(stages if stages <= num_layers else 0)
        sizes = [per_stage + (index < extra) - ends.get(index, 0) for index in indices]
    if min(sizes, default=0) < 1 or sum(sizes) != num_layers or len(sizes) % pipeline:
        job.differ(
            f"pipeline: torchtitan has stages of {sizes} blocks, which is not possible here; parallelism.pipeline_split "
            "is left to its default"
        )
    else:
        job.set("parallelism.pipeline_split", sizes, *stage_keys[:4], comment="as torchtitan divides the blocks")


def _float8(job: Conversion, matrices: Mapping[str, Any]) -> None:
    tables = [f"quantize.linear.{kind}" for kind in ("float8", "mx")]
    short = {"float8": tables[0], "mx": tables[1]}  # which configs of 0.2 have too
    converters = [short.get(str(name), str(name)) for name in job["model.converters"]]
    used = [table for table in tables if table in converters]
    if unknown := [name for name in converters if name not in tables]:
        job.leave("model.converters", f"{', '.join(unknown)}: computed in training.compute_dtype here")
    for table in tables:
        for key in [key for key in job.given if key.startswith(f"{table}.") and table not in used]:
            job.leave(key, f"model.converters does not name {table}", changes=False)
    if len(used) != 1:
        if used:
            job.leave("model.converters", "float8 and MX exclude each other here")
        return
    table = used[0]
    if table == tables[0]:
        scaling = job[f"{table}.recipe_name"] or "tensorwise"
        gathers = f"{table}.enable_fsdp_float8_all_gather"
        job.set("float8.all_gather", job[gathers], gathers)
        job.set("float8.emulate", job[f"{table}.emulate"], f"{table}.emulate")
    else:
        scaling = "mxfp8"
    job.set("float8.scaling", scaling, f"{table}.recipe_name", "model.converters")
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


def _compute(job: Conversion) -> None:
    """torch.compile and activation checkpointing."""
    enabled, components = job["compile.enable"], job["compile.components"]
    job.set(
        "compile.mode", "block" if enabled and "model" in components else "none", "compile.enable", "compile.components"
    )
    job.plan_changes["eager_loss"] = not (enabled and "loss" in components)
    mode, option = job["activation_checkpoint.mode"], job["activation_checkpoint.selective_ac_option"]
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
    for key in ("training.seed", "debug.seed"):
        if job[key] is not None:
            job.set("run.seed", job[key], key)
    deterministic = job["debug.deterministic"] or job["training.deterministic"]
    job.set("run.deterministic", deterministic, "debug.deterministic", "training.deterministic")


def _checkpoint(job: Conversion) -> None:
    keys = ("checkpoint.enable", "checkpoint.load_only")
    job.set("checkpoint.enabled", job[keys[0]] and not job[keys[1]], *keys)
    mode, keep = job["checkpoint.async_mode"], job["checkpoint.keep_latest_k"]
    job.set("checkpoint.mode", "sync" if mode == "disabled" else "async", "checkpoint.async_mode")
    if keep > 0:
        job.set("checkpoint.keep", keep, "checkpoint.keep_latest_k")
    else:
        job.set("checkpoint.keep_every", 1, "checkpoint.keep_latest_k", comment="keeps all")
    if job["checkpoint.load_step"] > 0:
        job.leave(
            "checkpoint.load_step",
            "a checkpoint of torchtitan is imported with `titanlike import ... --from torchtitan`",
        )
    path, in_hf = job["checkpoint.initial_load_path"], job["checkpoint.initial_load_in_hf"]
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
        for key in keys[1:]:
            job.leave(key, "profiling is off", changes=False)
        return
    active = min(active, freq)
    starts = range(freq - active + 1, job["training.steps"] + 1, freq)
    comment = f"the first {MAX_TRACES} of {len(starts)}" if len(starts) > MAX_TRACES else ""
    job.set("profiling.steps", list(starts[:MAX_TRACES]), *keys, comment=comment)
    job.set("profiling.num_steps", active, "profiling.profiler_active")
