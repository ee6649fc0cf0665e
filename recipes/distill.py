"""Distills a language model from a larger one, its teacher, on text or chats. The whole program, from top to bottom.

    ./run_train.sh train_configs/distill_debug.toml --distillation.temperature=2.0

To change it, copy it: add a section of your own to the recipe and a line that uses it to the loop (docs/copy.md).
"""

import sys
from pathlib import Path

if (clone := Path(__file__).resolve().parents[1]).joinpath("titanlike").is_dir():
    sys.path.insert(0, str(clone))  # for `python recipes/distill.py` where titanlike is not installed

from titanlike.recipe.distill import DistillRecipe
from titanlike.run.start import start

if __name__ == "__main__":
    recipe = start(DistillRecipe)  # before torch is imported: a wrong recipe is refused within a second

import torch

from titanlike.data.batches import chats, dataloaders, openers
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.distributed import process_group
from titanlike.distributed.graceful_shutdown import GracefulShutdown
from titanlike.distributed.watchdog import Watchdog
from titanlike.inference.evaluator import Evaluator
from titanlike.metrics import Monitor
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.optim import (
    NonFiniteGuard,
    build_optimizer,
    clip_gradients,
    gradient_norms,
    learning_rate,
    set_learning_rate,
)
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run import distillation, loop
from titanlike.run.resume import find_resume_point, restore
from titanlike.run.run_dir import RunDirectory, run_metadata, summary


def main(recipe: DistillRecipe, device: torch.device, watchdog: Watchdog) -> None:
    """Trains as the recipe says, from the run's latest checkpoint if there is one."""
    recipe = process_group.broadcast_object(recipe)
    training, seed = recipe.training, recipe.run.seed

    # The device mesh: which ranks share what.
    parallelism = recipe.parallelism.resolve(process_group.world_size())
    mesh = build_mesh(device.type, **parallelism.dimensions(), expert=parallelism.expert)

    # Data: conversations or text to tokens to batches, which depend on the seed and the step, not on the layout.
    process_group.announce(f"reading data: {recipe.data.source}")
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size, recipe.checkpoint.initial)
    data = dataloaders.build_dataloaders(
        recipe.data, training, tokenizer, seed=seed, validate=recipe.validation.interval > 0, dropout=recipe.model.dropout > 0,
        vocab_size=recipe.model.vocab_size, device=device, open_sources=openers.of(recipe),
        **mesh.data_shard(training.seq_len),
    )  # fmt: skip
    evaluator = Evaluator(
        recipe.evaluation, recipe.sample, recipe.data, training, recipe.model, tokenizer, seed,
        template=chats.template_of(recipe.data, tokenizer),
    )  # fmt: skip

    # Whether to resume is decided before anything is built or written.
    run = RunDirectory(recipe)
    checkpoints = run.checkpoint_manager()
    metadata = run_metadata(recipe, data.fingerprint, tokenizer.fingerprint, mesh.sizes, device)
    resume = find_resume_point(run, checkpoints, metadata, recipe)

    # The model: built on the meta device, sharded, then allocated; its weights are those of checkpoint.initial.
    process_group.announce(f"building the model: {recipe.model.label()}")
    with torch.device("meta"):
        model = build_model(recipe.model)
    model = parallelize(
        model, mesh, split=parallelism.split(recipe.model), training=training, parallelism=parallelism, float8=recipe.float8,
        lora=recipe.lora, activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile, static_shapes=True,
    )  # fmt: skip
    initialize(model, device, seed, offload=parallelism.cpu_offload)
    objective = distillation.build_objective(recipe, model, mesh, parallelism, device, tokenizer, data)
    optimizer = build_optimizer(model, recipe.optimizer, seed)
    restore(resume, checkpoints, model, optimizer, data.training.source, recipe)
    run.open(device, resumed_step=resume.first_step - 1)
    checkpoints.archive_after(resume.first_step - 1)
    monitor = Monitor(
        folder=run.path if process_group.is_main() else None, device=device, num_devices=process_group.world_size(),
        first_step=resume.first_step, num_steps=training.steps, num_tokens=training.num_tokens,
        flops_per_token=recipe.flops_per_token, section=recipe.metrics, recipe=metadata.recipe,
    )  # fmt: skip
    guard = NonFiniteGuard(training, resume.skipped, resume.loss_scale, on_skip=monitor.skipped)
    measurements = loop.Measurements(
        recipe, model, mesh, data.validation, evaluator, monitor, watchdog, objective.validate
    )

    with (
        monitor,
        checkpoints,
        loop.trace_steps(recipe.profiling, run.path, device, monitor) as trace_step,
        GracefulShutdown() as shutdown,
        loop.loop_settings(training) as garbage_collector,
        data.training.prefetch(recipe.data.prefetch, resume.first_step, training.steps),
    ):
        monitor.print(summary(recipe, mesh.sizes, device, data.training.source.describe(training.steps)))
        monitor.print(resume.message)
        measurements.missing(run, resume.first_step - 1)
        for step in range(resume.first_step, training.steps + 1):
            watchdog.step(step)
            trace_step(step)
            with monitor.data_wait():
                microbatches = data.training.microbatches(step)

            # Forward, backward, update.
            set_learning_rate(optimizer, learning_rate(step, training.steps, recipe.optimizer.lr, recipe.schedule))
            num_tokens = shutdown.all_reduce_sum(loop.num_labels(microbatches), mesh.loss_groups, mesh.model_groups)
            loss, local_loss, means = objective.forward_backward(model, microbatches, num_tokens, guard.loss_scale)
            norms = gradient_norms(model, mesh.pipeline)
            with monitor.model_statistics(step, model):
                if guard.should_step(step, loss, local_loss, norms, num_tokens):
                    clip_gradients(model, norms.total, training.max_norm)
                    optimizer.step()
            optimizer.zero_grad()
            means |= guard.metrics | getattr(optimizer, "metrics", {})
            monitor.step(step, loss=loss, grad_norm=norms.total, lr=optimizer.param_groups[0]["lr"], **means)

            # Validate, evaluate, save, stop.
            stop_signal = shutdown.result()  # the same on all ranks, received before the sum of this step; 0: continue
            if not stop_signal:
                measurements.after(step)
            if recipe.checkpoint.enabled and (
                stop_signal or loop.is_due(step, recipe.checkpoint.interval, training.steps)
            ):
                with monitor.exclude_from_throughput("saving"), watchdog.pause():
                    guard.flush()  # a non-finite step is never saved
                    now = metadata.at(step, training.num_tokens(step), data.training.position(), *guard.state)
                    checkpoints.save(model, optimizer, now, wait=stop_signal > 0)
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
    run.export(checkpoints)
    monitor.print(evaluator.last_sample(model, mesh))
    monitor.print(run.completion_message(device, monitor.measured()))


if __name__ == "__main__":
    with RunDirectory(recipe).session() as (device, watchdog):
        main(recipe, device, watchdog)
