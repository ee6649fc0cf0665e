"""Pre-train a language model. The whole program, top to bottom; the library has no loop of its own.

    ./run_train.sh train_configs/debug.toml --training.steps=100

To change it, copy it: give the recipe a section of your own, and the loop a line that reads it (docs/copy.md).
"""

from titanlike.config import PretrainRecipe
from titanlike.run.start import start

if __name__ == "__main__":
    recipe = start(PretrainRecipe)  # before torch is imported: a wrong recipe is refused within a second

import gc
from dataclasses import replace

import torch
from torch import Tensor, nn

from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.data.loader import Batch, BatchLoader
from titanlike.data.packed_dataset import BatchSource
from titanlike.data.sources import open_sources
from titanlike.data.text.tokenizer import build_tokenizer
from titanlike.distributed import collectives, process_group
from titanlike.distributed.graceful_shutdown import GracefulShutdown
from titanlike.distributed.watchdog import Watchdog, group_timeout
from titanlike.generate import generate
from titanlike.metrics import Monitor
from titanlike.metrics.hardware import device_name
from titanlike.models import build_model
from titanlike.models.init import initialize
from titanlike.models.layers import attention_backend
from titanlike.models.loss import num_valid
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import learning_rate, set_learning_rate
from titanlike.parallelisms.context import context_position_ids
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.parallelize import parallelize
from titanlike.run.resume import as_json, check_resume
from titanlike.run.run_dir import RunDirectory, machine_metadata, summary_lines, versions
from titanlike.utils.rng import seed_generators


def main(recipe: PretrainRecipe, device: torch.device) -> None:
    """Train as the recipe says, from the run's last checkpoint if it has one."""
    recipe = process_group.broadcast_object(recipe)
    training = recipe.training
    torch.set_float32_matmul_precision(training.matmul_precision)

    # Ranks: how many share what.
    parallelism = recipe.parallelism.resolve(process_group.world_size())
    mesh = build_mesh(device.type, **parallelism.dimensions())

    # Data: text to tokens, tokens to batches that depend on the seed and the step alone.
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size)
    data = open_sources(
        recipe.data,
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        seed=recipe.run.seed,
        validate=recipe.validation.interval > 0,
    )
    data_id = process_group.assert_equal_across_ranks("the data", data.fingerprint)

    def batches(feed: BatchSource, *, dropout_bits: bool = False) -> BatchLoader:
        return BatchLoader(
            feed,
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
            data_rank=mesh.data_rank,
            num_data_ranks=mesh.num_data_ranks,
            position_ids=context_position_ids(training.seq_len, mesh.context),
            seed=recipe.run.seed,
            device=device,
            document_separator=tokenizer.separator if recipe.data.document_masks else None,
            dropout_bits=dropout_bits,
        )

    train_batches = batches(data.training, dropout_bits=recipe.model.dropout > 0)
    validation_batches = batches(data.validation) if data.validation else None

    # Resume or not: decided before anything is built or written.
    run = RunDirectory(recipe)
    here = CheckpointMetadata(
        step=0,
        recipe=as_json(recipe),
        data=data_id,
        tokenizer=tokenizer.fingerprint,
        layout=mesh.sizes,
        machine=machine_metadata(device),
        versions=versions(),
    )
    checkpoints = CheckpointManager(run.checkpoints, recipe.checkpoint, shutdown_timeout=recipe.run.shutdown_timeout)
    saved = checkpoints.find(recipe.checkpoint.resume_from)
    inexact = check_resume(saved, here, recipe) if saved else []
    first_step = saved.step + 1 if saved else 1
    beginning = run.resume_message(saved, inexact)

    # Model: plain on the meta device, then made this rank's part of a parallel one, then given memory and values.
    with torch.device("meta"):
        model: nn.Module = build_model(recipe.model)
    model = parallelize(
        model,
        mesh,
        split=parallelism.split(recipe.model),
        training=training,
        parallelism=parallelism,
        float8=recipe.float8,
        activation_checkpoint=recipe.activation_checkpoint,
        compile=recipe.compile,
    )
    initialize(model, device, recipe.run.seed, offload=parallelism.cpu_offload)
    optimizer = build_optimizer(model, recipe.optimizer, recipe.run.seed)
    seed_generators(recipe.run.seed)
    if saved:
        checkpoints.load(model, optimizer, saved)
        data.training.begin(saved.position)

    if process_group.is_main():
        run.open(recipe, device_name(device), process_group.world_size(), resumed_step=first_step - 1)
    checkpoints.archive_after(first_step - 1)
    monitor = Monitor(
        folder=run.path if process_group.is_main() else None,
        device=device,
        num_devices=process_group.world_size(),
        first_step=first_step,
        num_steps=training.steps,
        tokens_per_step=training.global_batch_size * training.seq_len,
        flops_per_token=recipe.model.flops_per_token(training.seq_len),
        interval=recipe.metrics.interval,
        tensorboard=recipe.metrics.tensorboard,
    )
    guard = NonFiniteGuard(
        training.non_finite,
        limit=training.skip_limit,
        window=training.skip_window,
        skipped=saved.skipped if saved else (),
        tell=monitor.skipped,
    )
    if training.gc_interval:
        gc.disable()

    with (
        monitor,
        checkpoints,
        Watchdog(recipe.run.hang_timeout, run.path) as watchdog,
        GracefulShutdown() as shutdown,
        attention_backend(training.attention),
        train_batches.prefetch(recipe.data.prefetch, first_step, training.steps),
    ):
        for line in summary_lines(recipe, mesh.sizes, device_name(device), data.training.describe(training.steps)):
            monitor.print(line)
        if beginning:
            monitor.print(beginning)

        for step in range(first_step, training.steps + 1):
            watchdog.step(step)
            with monitor.data_wait():
                microbatches = train_batches.microbatches(step)

            set_learning_rate(optimizer, learning_rate(step, training.steps, recipe.optimizer.lr, recipe.schedule))
            loss, local_loss = forward_backward(model, microbatches, mesh)
            shutdown.begin_sync(checkpoints.has_failed)
            norms = gradient_norms(model, mesh.pipeline)
            if guard.should_step(step, loss, local_loss, norms):
                clip_gradients(model, norms.total, training.max_norm)
                optimizer.step()
            optimizer.zero_grad()

            monitor.step(step, loss=loss, grad_norm=norms.total, learning_rate=optimizer.param_groups[0]["lr"])

            stopping = shutdown.result()  # the number of a signal, as a rule 0
            if validation_batches and not stopping and due(step, recipe.validation.interval, training.steps):
                with monitor.exclude_from_throughput(), watchdog.pause():
                    monitor.validation(step, validate(model, validation_batches, recipe.validation.batches, mesh))
            if recipe.checkpoint.enabled and (stopping or due(step, recipe.checkpoint.interval, training.steps)):
                with monitor.exclude_from_throughput(), watchdog.pause():
                    guard.flush()
                    seen = step * training.global_batch_size * training.seq_len
                    here = replace(
                        here, step=step, tokens=seen, skipped=guard.skipped, position=train_batches.position()
                    )
                    checkpoints.save(model, optimizer, here, wait=stopping > 0)
            monitor.record_saves(checkpoints.poll())
            if stopping:
                monitor.print(run.shutdown_message(stopping))
                break
            if step == first_step:
                gc.collect()  # what compiling has left behind
            elif due(step, training.gc_interval, training.steps):
                gc.collect(1)

        with watchdog.pause():
            guard.flush()
            checkpoints.wait(last=True)
        monitor.record_saves(checkpoints.poll())

    if shutdown.agreed_signal:
        process_group.barrier_and_exit(128 + shutdown.agreed_signal)
    if recipe.checkpoint.weights != "none" and process_group.is_main():
        checkpoints.write_weights(run.path / "weights.safetensors", recipe.checkpoint.weights)
    if recipe.sample.tokens:
        text = generate(
            model,
            mesh,
            tokenizer,
            recipe.sample.prompt,
            num_tokens=recipe.sample.tokens,
            window=min(training.seq_len, 256),
            temperature=recipe.sample.temperature,
            seed=recipe.run.seed,
            device=device,
        )
        monitor.print(f"\nsample after {training.steps} steps:\n{text}\n")
    monitor.print(f"done: {run.path}")


def forward_backward(model: nn.Module, microbatches: list[Batch], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Gradients of the loss over the global batch. Returns that loss, and this rank's part of it."""
    # Every token weighs the same, on whatever rank and in whatever micro-batch: count them all, then divide each sum.
    counts = [num_valid(batch.labels) for batch in microbatches]
    num_tokens = collectives.all_reduce_sum(torch.stack(counts).sum(), mesh.loss_groups)

    if isinstance(model, Pipeline):
        local_loss = model.forward_backward(microbatches, lambda loss: loss / num_tokens)
    else:
        local_loss = torch.zeros((), device=num_tokens.device)
        for batch in microbatches:
            loss = model(**batch.inputs, labels=batch.labels) / num_tokens
            loss.backward()
            local_loss += loss.detach()
    return collectives.all_reduce_sum(local_loss.clone(), [*mesh.loss_groups, mesh.pipeline.get_group()]), local_loss


@torch.no_grad()
def validate(model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> float:
    """Mean loss a token over held-out batches: the same ones each time, the same number on every rank."""
    total, num_tokens = torch.zeros(2, device=batches.device, dtype=torch.float64)
    for index in range(1, batches.num_distinct(num_batches) + 1):
        microbatches = batches.microbatches(index)
        if isinstance(model, Pipeline):
            total += model.evaluate(microbatches)
        else:
            total += sum(model(**batch.inputs, labels=batch.labels) for batch in microbatches)
        num_tokens += sum(num_valid(batch.labels) for batch in microbatches)
    collectives.all_reduce_sum(total, [*mesh.loss_groups, mesh.pipeline.get_group()])
    return (total / collectives.all_reduce_sum(num_tokens, mesh.loss_groups)).item()


def due(step: int, interval: int, last: int) -> bool:
    """Whether something done every so many steps, and at the last, is done now."""
    return step == last or (interval > 0 and step % interval == 0)


if __name__ == "__main__":
    run = RunDirectory(recipe)
    with (
        process_group.session(
            recipe.run.device,
            deterministic=recipe.run.deterministic,
            timeout=group_timeout(recipe.run.hang_timeout),
            shutdown_message=run.shutdown_message,
        ) as device,
        run.locked(),
    ):
        main(recipe, device)
