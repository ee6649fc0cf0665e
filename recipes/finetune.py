"""Pre-trains a language model. The whole program, from top to bottom: the library has no training loop.

    ./run_train.sh train_configs/debug.toml --training.steps=100

To change it, copy it: add a section of your own to the recipe and a line that uses it to the loop (docs/copy.md).
"""

import sys
from pathlib import Path

if (clone := Path(__file__).resolve().parents[1]).joinpath("titanlike").is_dir():
    sys.path.insert(0, str(clone))  # for `python recipes/pretrain.py` where titanlike is not installed

from titanlike.config import FinetuneRecipe
from titanlike.run.start import start

if __name__ == "__main__":
    recipe = start(FinetuneRecipe)  # before torch is imported: a wrong recipe is refused within a second

from dataclasses import replace

import torch
from torch import Tensor, nn

from titanlike.checkpoint import CheckpointManager
from titanlike.data.batches.dataloaders import build_dataloaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.distributed import collectives, process_group
from titanlike.distributed.graceful_shutdown import GracefulShutdown
from titanlike.distributed.watchdog import Watchdog
from titanlike.inference.evaluator import Evaluator
from titanlike.interop.export import export
from titanlike.interop.weights import load_initial, open_weights
from titanlike.metrics import Monitor
from titanlike.metrics.profiler import Profiler
from titanlike.models.init import initialize
from titanlike.models.layers import attention_backend
from titanlike.models.loss import num_valid
from titanlike.models.registry import build_model
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import learning_rate, set_learning_rate
from titanlike.parallelisms.context import context_position_ids
from titanlike.parallelisms.fsdp import accumulate_gradients
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.parallelize import parallelize
from titanlike.run.completion import completion_message
from titanlike.run.resume import plan_resume
from titanlike.run.run_dir import RunDirectory, run_metadata, summary
from titanlike.utils.garbage_collector import GarbageCollector
from titanlike.utils.rng import seed_generators


def main(recipe: FinetuneRecipe, device: torch.device, watchdog: Watchdog) -> None:
    """Trains as the recipe says, from the run's latest checkpoint if there is one."""
    recipe = process_group.broadcast_object(recipe)
    training, seed = recipe.training, recipe.run.seed
    torch.set_float32_matmul_precision(training.matmul_precision)

    # The device mesh: which ranks share what.
    parallelism = recipe.parallelism.resolve(process_group.world_size())
    mesh = build_mesh(device.type, **parallelism.dimensions(), expert=parallelism.expert)

    # Data: text to tokens to batches, which depend on the seed and the step, not on the layout.
    process_group.announce(f"reading data: {recipe.data.source}")
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size)
    data = build_dataloaders(
        recipe.data,
        training,
        tokenizer,
        seed=seed,
        validate=recipe.validation.interval > 0,
        dropout=recipe.model.dropout > 0,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.num_data_ranks,
        position_ids=context_position_ids(training.seq_len, mesh.context),
        device=device,
        vocab_size=recipe.model.vocab_size,
    )
    evaluator = Evaluator(recipe.evaluation, recipe.sample, recipe.data, training, recipe.model, tokenizer, seed)

    # Whether to resume is decided before anything is built or written.
    run = RunDirectory(recipe)
    metadata = run_metadata(recipe, data.fingerprint, tokenizer.fingerprint, mesh.sizes, device)
    checkpoints = CheckpointManager(
        run.checkpoints, recipe.checkpoint, owner=run.checkpoint_owner, shutdown_timeout=recipe.run.shutdown_timeout
    )
    resume = plan_resume(run, checkpoints, metadata, recipe)

    # The model: built on the meta device, sharded, then allocated and initialized.
    process_group.announce(f"building the model: {recipe.model.label()}")
    with torch.device("meta"):
        model = build_model(recipe.model)
    model = parallelize(
        model,
        mesh,
        split=parallelism.split(recipe.model),
        training=training,
        parallelism=parallelism,
        float8=recipe.float8,
        lora=recipe.lora,
        activation_checkpoint=recipe.activation_checkpoint,
        compile=recipe.compile,
    )
    initialize(model, device, seed, offload=parallelism.cpu_offload)
    optimizer = build_optimizer(model, recipe.optimizer, seed)
    checkpoints.register(model, optimizer)
    seed_generators(seed)
    if resume.checkpoint:
        checkpoints.load(model, optimizer, resume.checkpoint)
        data.training.source.load_position(resume.checkpoint.position)
    elif recipe.checkpoint.initial:
        load_initial(model, recipe.checkpoint.initial, recipe.model, recipe.checkpoint.allow_changed)
    run.open(device, resumed_step=resume.first_step - 1)
    checkpoints.archive_after(resume.first_step - 1)
    monitor = Monitor(
        folder=run.path if process_group.is_main() else None,
        device=device,
        num_devices=process_group.world_size(),
        first_step=resume.first_step,
        num_steps=training.steps,
        num_tokens=training.num_tokens,
        flops_per_token=recipe.model.flops_per_token(training.seq_len, frozen=recipe.lora.rank > 0),
        section=recipe.metrics,
        recipe=metadata.recipe,
    )
    guard = NonFiniteGuard(training.non_finite, training.skip_limit, skipped=resume.skipped, on_skip=monitor.skipped)

    with (
        monitor,
        checkpoints,
        Profiler(recipe.profiling, run.path, device, monitor.exclude_from_throughput) as profiler,
        GracefulShutdown() as shutdown,
        GarbageCollector() as garbage_collector,
        attention_backend(training.attention),
        data.training.prefetch(recipe.data.prefetch, resume.first_step, training.steps),
    ):
        monitor.print(summary(recipe, mesh.sizes, device, data.training.source.describe(training.steps)))
        monitor.print(resume.message)

        def measure(step: int, validates: bool = True, evaluates: bool = True) -> None:
            if validates and data.validation and is_due(step, recipe.validation.interval, training.steps):
                with monitor.exclude_from_throughput("validating"), watchdog.pause():
                    monitor.validation(step, validate(model, data.validation, recipe.validation.batches, mesh))
            if evaluates and evaluator.is_due(step):
                with monitor.exclude_from_throughput("evaluating"), watchdog.pause():
                    monitor.evaluation(step, evaluator(step, model, mesh))

        start = resume.first_step - 1  # a signal may have ended the run before it measured this step
        measure(start, run.lacks_record(start, "validation_loss"), run.lacks_record(start, "evaluation/", "sample"))
        for step in range(resume.first_step, training.steps + 1):
            watchdog.step(step)
            profiler.step(step)
            with monitor.data_wait():
                microbatches = data.training.microbatches(step)

            # Forward, backward, update.
            set_learning_rate(optimizer, learning_rate(step, training.steps, recipe.optimizer.lr, recipe.schedule))
            # All tokens have the same weight, whatever their rank and micro-batch: divide each sum by the global count.
            counts = [num_valid(batch.labels) for batch in microbatches]
            num_tokens = shutdown.all_reduce_sum(torch.stack(counts).sum(), mesh.loss_groups, mesh.model_groups)
            loss, local_loss = forward_backward(model, microbatches, num_tokens, mesh, parallelism.gradient_sync)
            norms = gradient_norms(model, mesh.pipeline)
            with monitor.parameter_statistics(step, model):
                if guard.should_step(step, loss, local_loss, norms):
                    clip_gradients(model, norms.total, training.max_norm)
                    optimizer.step()
            optimizer.zero_grad()
            monitor.step(step, loss=loss, grad_norm=norms.total, learning_rate=optimizer.param_groups[0]["lr"])

            # Validate, evaluate, save, stop.
            stop_signal = shutdown.result()  # the same on all ranks, received before the sum of this step; 0: continue
            if not stop_signal:
                measure(step)
            if recipe.checkpoint.enabled and (stop_signal or is_due(step, recipe.checkpoint.interval, training.steps)):
                with monitor.exclude_from_throughput("saving"), watchdog.pause():
                    guard.flush()  # a non-finite step is never saved
                    metadata = replace(metadata, step=step, tokens=training.num_tokens(step))
                    metadata = replace(metadata, position=data.training.position(), skipped=guard.skipped)
                    checkpoints.save(model, optimizer, metadata, wait=stop_signal > 0)
            monitor.record_saves(checkpoints.poll())
            if checkpoints.has_failed:  # perhaps not yet on the other ranks
                shutdown.request(1)
            if stop_signal:
                monitor.print(run.shutdown_message(stop_signal))
                break
            garbage_collector.step()

        watchdog.finish()
        guard.flush()
        checkpoints.wait(last=True)
        monitor.record_saves(checkpoints.poll())

    if shutdown.agreed_signal:
        process_group.barrier_and_exit(128 + shutdown.agreed_signal)
    if (dtype := recipe.checkpoint.export) != "none":
        process_group.run_on_main(
            lambda: export(open_weights(checkpoints.newest()), run.exported, dtype=dtype, replace=True)
        )
    monitor.print(evaluator.last_sample(model, mesh))
    monitor.print(completion_message(run, device, monitor.measured()))


def forward_backward(
    model: nn.Module, microbatches: list[Batch], num_tokens: Tensor, mesh: Mesh, sync: str
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the mean loss over the `num_tokens` of the global batch. Returns that loss, and this rank's share
    of it."""
    if isinstance(model, Pipeline):
        local_loss = model.forward_backward(microbatches, lambda loss: loss / num_tokens)
    else:
        local_loss = torch.zeros((), device=num_tokens.device)
        for batch in accumulate_gradients(model, microbatches, sync):
            loss = model(**batch.inputs, labels=batch.labels) / num_tokens
            loss.backward()
            local_loss += loss.detach()
    return collectives.all_reduce_sum(local_loss.clone(), [*mesh.loss_groups, mesh.pipeline.get_group()]), local_loss


@torch.no_grad()
def validate(model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> float:
    """Returns the mean loss per token of the same held-out batches each time. It is equal on all ranks."""
    total, num_tokens = torch.zeros(2, device=batches.device, dtype=collectives.sum_dtype(batches.device))
    for microbatches in batches.first_batches(num_batches):
        if isinstance(model, Pipeline):
            total += model.evaluate(microbatches)
        else:
            total += sum(model(**batch.inputs, labels=batch.labels) for batch in microbatches)
        num_tokens += sum(num_valid(batch.labels) for batch in microbatches)
    collectives.all_reduce_sum(total, [*mesh.loss_groups, mesh.pipeline.get_group()])
    return (total / collectives.all_reduce_sum(num_tokens, mesh.loss_groups)).item()


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether an action with this interval is due at this step. The last step is always due."""
    return step == last or (interval > 0 and step % interval == 0)


if __name__ == "__main__":
    with RunDirectory(recipe).session() as (device, watchdog):
        main(recipe, device, watchdog)
