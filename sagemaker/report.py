"""The report of `--dry-run`: price, duration, layout, memory, files, and the request."""

import argparse
import json
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bundle import Bundle
from request import Job
from validation import request_errors

from titanlike.config import UserError
from titanlike.tools.metrics_file import read_records
from titanlike.tools.planning.plan import Plan, plan_or_none

GIB = 2**30


def report(options: argparse.Namespace, job: Job, request: dict[str, Any], bundle: Bundle) -> str:
    """Returns the report."""
    recipe, hardware = bundle.recipe, job.instance_type.hardware
    num_gpus = job.num_instances * hardware.gpus_per_node
    layout = ", ".join(f"{k} {n}" for k, n in recipe.parallelism.resolve(num_gpus).dimensions().items() if n > 1)
    training = recipe.training
    num_tokens = training.num_tokens(training.steps)
    efa = ", connected by EFA" if "FI_PROVIDER" in request["Environment"] else ""
    sizes = {name: len(content) for name, content in bundle.contents.items()}
    plan = plan_or_none(recipe, num_gpus, hardware)
    lines = [
        f"job         {job.name}, of run {job.run}",
        *price_lines(options, job, num_tokens / num_gpus, plan),
        f"instances   {job.num_instances}, {num_gpus} GPUs: {hardware.name}, {hardware.memory_gib:g} GiB each{efa}",
        f"layout      {layout or 'one process'}; valid for {num_gpus} processes",
        *(memory_lines(plan, job) if plan else []),
        *plan_lines(plan),
        f"batch       {training.global_batch_size} sequences x {training.seq_len:,} tokens, {training.steps:,} steps: "
        f"{num_tokens:.3g} tokens",
        f"image       {job.image}",
        f"code        {job.code}",
        f"checkpoints {job.checkpoints.uri if job.checkpoints else f'{job.root}/checkpoints/{job.run}'}",
        f"run folder  {job.run_dir}",
        *(f"channel     {channel.key} = {channel.path}  from {channel.uri}" for channel in job.channels),
        f"request     {_validate(request)}",
        "",
        f"files to upload: {len(sizes)}, {sum(sizes.values()):,} bytes",
        *file_lines(sizes),
        "",
        "create_training_job request:",
        json.dumps(request, indent=2),
    ]
    return "\n".join(lines)


def file_lines(sizes: Mapping[str, int]) -> list[str]:
    """Returns a line for each file to upload, and one for those of the library."""
    library = [size for name, size in sizes.items() if name.startswith("titanlike/")]
    return [
        *(f"{size:>10,}  {name}" for name, size in sizes.items() if not name.startswith("titanlike/")),
        f"{sum(library):>10,}  titanlike/: {len(library)} files",
    ]


def _validate(request: dict[str, Any]) -> str:
    try:
        errors = request_errors(request)
    except ImportError:
        return 'not validated: botocore is not installed; run: pip install -e ".[sagemaker]"'
    if errors:
        raise UserError("\n".join(errors))
    return "valid according to botocore's model of the service"


def memory_lines(plan: Plan, job: Job) -> list[str]:
    """Returns the planned memory, and refuses a training state that exceeds a GPU's memory."""
    moments = (moment.usage for memory in plan.memory for moment in memory.moments)
    state = max(usage.parameters + usage.gradients + usage.optimizer for usage in moments) / GIB
    limit, what = job.instance_type.hardware.memory_gib, "weights, gradients and optimizer state"
    if state > limit:
        raise UserError(
            f"{what} do not fit: {state:.3g} GiB on a GPU, but one of {job.instance_type.name} has {limit:g} GiB; use more "
            "instances, a larger parallelism.shard, or optimizer.state_dtype = '8bit'"
        )
    return [f"memory      {state:.3g} GiB of {what} per GPU, without activations"]


def plan_lines(plan: Plan | None) -> list[str]:
    """Returns the planned memory and speed."""
    if plan is None:
        return []
    verdict = "" if plan.fits else ": it does not fit; `titanlike plan` finds what does"
    return [
        f"plan        {plan.reserved / GIB:,.1f} of {plan.available / GIB:,.1f} GiB per GPU, with activations{verdict}; "
        f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
    ]


def price_lines(options: argparse.Namespace, job: Job, tokens_per_gpu: float, plan: Plan | None) -> list[str]:
    """Returns the price per hour, the maximum price of the job, and if the throughput is known, that of the run."""
    price = options.price or job.instance_type.price
    if price is None:
        lines = [f"price       unknown for {job.instance_type.name}; set --price"]
    else:
        hourly = price * job.num_instances
        source = "--price" if options.price else job.instance_type.hardware.price_source
        spot = "; spot instances cost less" if job.spot else ""
        lines = [
            f"price       ${hourly:,.2f} an hour ({job.num_instances} x ${price:,.2f}, {source}); at most "
            f"${hourly * job.max_hours:,.2f} in --max-hours {job.max_hours:g}{spot}"
        ]
    speed = options.tokens_per_second or (measured_speed(options.measured) if options.measured else None)
    planned = "" if speed else ", as planned"
    if speed is None and plan is not None:
        speed = plan.tokens_per_second_per_gpu
    if speed is None:
        return [*lines, "full run    unknown; set --tokens-per-second per GPU, or --measured metrics.jsonl"]
    hours = tokens_per_gpu / speed / 3600
    cost = f", ${hours * price * job.num_instances:,.2f}" if price is not None else ""
    text = f"full run    {hours:,.1f} hours{cost}, at {speed:,.0f} tokens/s per GPU{planned}, without startup and checkpointing"
    if hours > job.max_hours:
        text += (
            f"; the job saves and ends after --max-hours {job.max_hours:g}, `resume {shlex.quote(job.run)}` continues"
        )
    return [*lines, text]


def measured_speed(metrics: Path) -> float:
    """Returns the tokens per second and process of an earlier run: the median of its second half."""
    try:
        records = read_records(metrics)
        processes = int(json.loads((metrics.parent / "environment.json").read_bytes())["processes"])
        speeds = [float(record["tokens_per_second"]) for record in records if record.get("tokens_per_second")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--measured {metrics}: not a run's metrics.jsonl with its environment.json: {error}") from None
    if not speeds or processes < 1:
        raise UserError(f"--measured {metrics}: contains no tokens_per_second")
    return statistics.median(speeds[len(speeds) // 2 :]) / processes
