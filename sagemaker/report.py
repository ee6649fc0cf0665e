"""What a job would be, before it is paid for: the files, the layout, whether it can fit, hours, dollars, and the request itself."""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from limits import model_problems
from machines import PRICES
from parcel import Parcel
from request import Job

from titanlike.config import PretrainRecipe, UserError

GIB = 2**30


def report(options: argparse.Namespace, job: Job, request: dict[str, Any], parcel: Parcel) -> str:
    """All of it, as text."""
    recipe = parcel.recipe
    num_gpus = job.instances * job.machine.num_gpus
    layout = recipe.parallelism.resolve(num_gpus).dimensions()
    sizes = parcel.sizes()
    training = recipe.training
    lines = [
        f"job         {job.name}, of the run {job.run}",
        f"machines    {job.instances} x {job.machine.name}: {num_gpus} x {job.machine.gpu} of {job.machine.gpu_gib} GiB"
        + (", EFA between them" if "FI_PROVIDER" in request["Environment"] else ""),
        f"layout      {', '.join(f'{name} {size}' for name, size in layout.items() if size > 1) or 'one process'}; nothing in "
        f"the recipe speaks against {num_gpus} processes",
        states(recipe, num_gpus, job),
        f"batch       {training.global_batch_size} sequences x {training.seq_len:,} tokens, {training.steps:,} steps: "
        f"{total_tokens(recipe):.3g} tokens",
        *price_lines(options, job, recipe, num_gpus),
        f"image       {job.image}",
        f"code        {job.code}",
        f"checkpoints {job.checkpoints.address if job.checkpoints else f'{job.root}/checkpoints/{job.run}'}",
        f"run folder  {job.folder}",
        *(f"channel     {channel.key} = {channel.path}  from {channel.address}" for channel in job.channels),
        "",
        f"to be uploaded: {len(sizes)} files, {sum(sizes.values()):,} bytes",
        *(f"{size:>10,}  {name}" for name, size in sizes.items()),
        "",
        "the request, as create_training_job takes it:",
        json.dumps(request, indent=2),
        "",
        *_validation(request),
    ]
    return "\n".join(lines)


def _validation(request: dict[str, Any]) -> list[str]:
    try:
        found = model_problems(request)
    except ImportError:
        return ['not held against the service\'s own model of it: that is in botocore (pip install -e ".[sagemaker]")']
    if found:
        raise UserError("\n".join(found))
    return ["held against the service's own model of it, as botocore has it: nothing speaks against it"]


def bytes_per_parameter(recipe: PretrainRecipe) -> float:
    """Of weights, gradients and optimizer state."""
    master = {"float32": 4, "bfloat16": 2}[recipe.training.master_dtype]
    averages = {"full": 2 * master, "bfloat16": 4, "8bit": 2}[recipe.optimizer.state_dtype]
    return master + master + averages


def states(recipe: PretrainRecipe, num_gpus: int, job: Job) -> str:
    """Whether what every rank keeps for the whole run fits at all. Refuses what cannot."""
    layout = recipe.parallelism.resolve(num_gpus)
    shares = layout.shard * layout.context * layout.tensor * layout.pipeline
    each, count = bytes_per_parameter(recipe), recipe.model.num_parameters()
    if recipe.parallelism.cpu_offload:
        return "states      kept in the host's memory (parallelism.cpu_offload)"
    size = each * count / shares / GIB
    text = f"{each:g} bytes x {count / 1e9:.3g} billion parameters / {shares} shares = {size:.3g} GiB"
    if size > job.machine.gpu_gib:
        raise UserError(
            f"weights, gradients and optimizer state alone do not fit: {text}, and a GPU of {job.machine.name} has "
            f"{job.machine.gpu_gib} GiB; take more instances, shard more, or optimizer.state_dtype = '8bit'"
        )
    return f"states      {text} of a GPU's {job.machine.gpu_gib}; activations come on top, and are not reckoned here"


def total_tokens(recipe: PretrainRecipe) -> int:
    """Of the whole run."""
    return recipe.training.steps * recipe.training.global_batch_size * recipe.training.seq_len


def price_lines(options: argparse.Namespace, job: Job, recipe: PretrainRecipe, num_gpus: int) -> list[str]:
    """What an hour costs, what the job can cost at most, and with a known speed what the whole run will."""
    price = options.price or job.machine.price
    source = "as you say" if options.price else PRICES
    if price is None:
        lines = [f"price       not known of {job.machine.name}; give --price"]
    else:
        hour = price * job.instances
        spot = "; spot costs less" if job.spot else ""
        lines = [
            f"price       ${hour:,.2f} an hour ({job.instances} x ${price:,.2f}, {source}); at most "
            f"${hour * job.max_hours:,.2f} in --max-hours {job.max_hours:g}{spot}"
        ]
    speed = options.tokens_per_second or (measured_speed(options.measured) if options.measured else None)
    if speed is None:
        return [
            *lines,
            "whole run   not known without a speed: give --tokens-per-second of a GPU, or --measured metrics.jsonl",
        ]
    hours = total_tokens(recipe) / (speed * num_gpus) / 3600
    cost = f", ${hours * price * job.instances:,.2f}" if price is not None else ""
    text = f"whole run   {hours:,.1f} hours{cost}, at {speed:,.0f} tokens/s of a GPU; start and saves come on top"
    if hours > job.max_hours:
        text += f"; the job ends after --max-hours {job.max_hours:g}, saved, and `resume {job.run}` goes on"
    return [*lines, text]


def records(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; the last may be cut short."""
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]


def measured_speed(metrics: Path) -> float:
    """Tokens a second of one process, as a former run had them: the median of its later half."""
    try:
        lines = records(metrics)
        processes = json.loads((metrics.parent / "environment.json").read_text())["processes"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--measured {metrics}: not the metrics.jsonl of a run, with its environment.json beside it: {error}"
        ) from None
    speeds = [record["tokens_per_second"] for record in lines if record.get("tokens_per_second")]
    if not speeds:
        raise UserError(f"--measured {metrics}: it has no tokens_per_second")
    return statistics.median(speeds[len(speeds) // 2 :]) / processes
