"""The lifecycle of a training run: what every program needs around its loop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.checkpoint import CheckpointMetadata
from titanlike.config import UserError
from titanlike.data.batches.dataloaders import DataLoaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.distributed import environment, process_group
from titanlike.distributed.graceful_shutdown import GracefulShutdown
from titanlike.distributed.watchdog import Watchdog, group_timeout
from titanlike.inference.evaluator import Evaluator
from titanlike.interop.weights import load_initial
from titanlike.metrics import Monitor
from titanlike.optim import NonFiniteGuard, clip_gradients
from titanlike.optim.clipping import Norms
from titanlike.parallelisms.mesh import Mesh
from titanlike.recipe import PretrainRecipe
from titanlike.run.changes import changed_keys, check_resume
from titanlike.run.hooks import call_hooks
from titanlike.run.loop import Loss, is_due, loop_settings
from titanlike.run.run_dir import RunDirectory, recipe_as_json, run_metadata, summary
from titanlike.utils.rng import seed_generators

# Returns the loss, and other values, of this number of batches.
Validate = Callable[[nn.Module, BatchLoader, int, Mesh], Mapping[str, float]]


class Run:
    """A training run: a context that joins the process group, locks the run's directory, ends the job if it hangs, stops at a
    signal, records metrics, resumes and saves. It never calls the model, and knows no loss and no transform::

        with Run(recipe) as run:
            ...
            run.find_checkpoint(data, tokenizer, mesh)
            ...
            run.restore(model, optimizer, data.training)
            for step, microbatches in run.steps():
                ...
                run.update(optimizer, loss, norms)
                run.log(loss=loss.mean, grad_norm=norms.total, lr=lr)
                run.measure()
                if run.is_save_due:
                    run.save(model, optimizer)

    In a process that is in a process group already, it uses that group and its timeout, and sets no deterministic algorithms.

    Attributes:
        device: The device of this rank.
        step: The current step, counted from 1.
    """

    def __init__(self, recipe: PretrainRecipe) -> None:
        self.recipe, self.step = recipe, 0
        self._shutdown, self._signal = GracefulShutdown(), -1  # -1: not asked in this step
        self._validation: tuple[Validate, BatchLoader, Mesh] | None = None
        self._evaluation: tuple[Evaluator, Mesh] | None = None
        self._metrics: dict[str, Tensor] = {}  # of the last update
        self._is_training = False
        self._session = self._open()

    def __enter__(self) -> "Run":
        self._session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.__exit__(*error)

    @contextmanager
    def _open(self) -> Iterator[None]:
        section = self.recipe.run
        with ExitStack() as contexts:
            if dist.is_initialized():
                self.device = process_group.select_device(section.device, "run.device")
            else:
                session = process_group.session(
                    section.device,
                    deterministic=section.deterministic,
                    timeout=group_timeout(section.hang_timeout),
                    shutdown_message=lambda: RunDirectory(self.recipe).shutdown_message(),
                )
                self.device = contexts.enter_context(session)
            self.recipe = _recipe_of_all_ranks(self.recipe)
            self.directory = RunDirectory(self.recipe)
            contexts.enter_context(_advice_when_out_of_memory(self.recipe))
            self._watchdog = contexts.enter_context(Watchdog(section.hang_timeout, self.directory.path))
            contexts.enter_context(self.directory.locked())
            self._loop = contexts.enter_context(ExitStack())
            process_group.announce(f"reading data: {self.recipe.data.source}")
            yield
            self._finish()
            self._print(self.directory.completion_message(self.device, self._monitor.measured()))

    def find_checkpoint(self, data: DataLoaders, tokenizer: Tokenizer, mesh: Mesh) -> None:
        """Finds the checkpoint to resume from, if there is one, before anything is built or written. Raises `UserError` if this
        recipe would not continue its run."""
        recipe, self._layout = self.recipe, mesh.sizes
        self._checkpoints = self.directory.checkpoint_manager()
        self._metadata = run_metadata(recipe, data.fingerprint, tokenizer.fingerprint, mesh.sizes, self.device)
        self._found = self._checkpoints.find(recipe.checkpoint.resume_from)
        inexact = check_resume(self._found, self._metadata, recipe) if self._found else []
        self._message = self.directory.resume_message(self._found, inexact)
        process_group.announce(f"building the model: {recipe.model.label()}")

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: BatchLoader, **others: nn.Module
    ) -> None:
        """Loads the checkpoint that was found, also into other modules that were saved in it, or the initial weights of a new run.
        Seeds the global random generators, whose state a checkpoint contains. Creates the run's directory."""
        recipe, self._model, self._batches = self.recipe, model, batches
        self._checkpoints.register(model, optimizer)
        seed_generators(recipe.run.seed)
        saved = self._found or CheckpointMetadata(step=0)
        if self._found:
            self._checkpoints.load(model, optimizer, saved, **others)
            batches.source.load_position(saved.position)
        elif recipe.checkpoint.initial:
            load_initial(model, recipe.checkpoint.initial, recipe.model, recipe.checkpoint.allow_changed)
        self.step = saved.step
        self.directory.open(self.device, resumed_step=saved.step)
        self._checkpoints.archive_after(saved.step)
        self._monitor = Monitor(
            folder=self.directory.path if process_group.is_main() else None, device=self.device,
            num_devices=process_group.world_size(), first_step=saved.step + 1, num_steps=recipe.training.steps,
            num_tokens=recipe.training.num_tokens, flops_per_token=recipe.flops_per_token, section=recipe.metrics,
            recipe=self._metadata.recipe,
        )  # fmt: skip
        self._guard = NonFiniteGuard(recipe.training, saved.skipped, saved.loss_scale, on_skip=self._monitor.skipped)

    def on_validation(self, validate: Validate, batches: BatchLoader | None, mesh: Mesh) -> None:
        """Sets the function that `measure` calls with held-out batches, None if the recipe has no validation."""
        self._validation = (validate, batches, mesh) if batches else None

    def on_evaluation(self, evaluator: Evaluator, mesh: Mesh) -> None:
        """Sets the evaluator that `measure` calls. It also makes the sample at the end of the run."""
        self._evaluation = evaluator, mesh

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yields each step with its micro-batches, to the last step of the recipe, or until all ranks agree to stop."""
        recipe, first, last, profiler = self.recipe, self.step + 1, self.recipe.training.steps, None
        enter, self._is_training = self._loop.enter_context, True
        enter(self._monitor)
        enter(self._checkpoints)
        if recipe.profiling.steps or recipe.profiling.memory:
            from titanlike.metrics.profiler import Profiler

            pause = self._monitor.exclude_from_throughput
            profiler = enter(Profiler(recipe.profiling, self.directory.path, self.device, pause))
        enter(self._shutdown)
        garbage_collector = enter(loop_settings(recipe.training))
        enter(self._batches.prefetch(recipe.data.prefetch, first, last))
        self._print(summary(recipe, self._layout, self.device, self._batches.source.describe(last)))
        self._print(self._message)
        # What an earlier start has not measured: a signal may have ended it after the step.
        self._measure(
            validates=self.directory.lacks_record(self.step, "validation_loss"),
            evaluates=self.directory.lacks_record(self.step, "evaluation/", "sample"),
        )
        for self.step in range(first, last + 1):
            self._watchdog.step(self.step)
            if profiler:
                profiler.step(self.step)
            with self._monitor.data_wait():
                microbatches = self._batches.microbatches(self.step)
            self._shutdown.exchange(self.device)
            self._signal = -1
            yield self.step, microbatches
            self._monitor.record_saves(self._checkpoints.poll())
            if self._checkpoints.has_failed:  # perhaps not yet on the other ranks
                self._shutdown.request(1)  # `wait` raises the error after the loop
            if self._stop_signal:
                self._print(self.directory.shutdown_message(self._stop_signal))
                break
            garbage_collector.step()
        self._finish()

    def _finish(self) -> None:
        """Ends the loop: waits for the last save, and exits if a signal has stopped the run."""
        if not self._is_training:
            return
        self._is_training = False
        self._watchdog.finish()
        self._guard.flush()
        self._checkpoints.wait(last=True)
        self._monitor.record_saves(self._checkpoints.poll())
        self._loop.close()
        if self._shutdown.agreed_signal:
            process_group.barrier_and_exit(128 + self._shutdown.agreed_signal)
        self.directory.export(self._checkpoints)
        if self._evaluation:
            evaluator, mesh = self._evaluation
            self._print(evaluator.last_sample(self._model, mesh))

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the backward pass: not 1 in float16."""
        return self._guard.loss_scale

    def update(self, optimizer: torch.optim.Optimizer, loss: Loss, norms: Norms) -> None:
        """Clips the gradients and updates the weights. If the loss or a gradient is not finite, skips the update or stops the run,
        as `training.non_finite` says. Resets the gradients."""
        with self._monitor.model_statistics(self.step, self._model):
            if self._guard.should_step(self.step, loss.mean, loss.share, norms, loss.count):
                clip_gradients(self._model, norms.total, self.recipe.training.max_norm, optimizer)
                optimizer.step()
        optimizer.zero_grad()
        self._metrics = self._guard.metrics | getattr(optimizer, "metrics", {})

    def log(self, *, loss: Tensor, grad_norm: Tensor, lr: float, **others: Tensor) -> None:
        """Records the step, if that is due, with any other values."""
        self._monitor.step(self.step, loss=loss, grad_norm=grad_norm, lr=lr, **others, **self._metrics)

    @property
    def _stop_signal(self) -> int:
        """The signal after which the run stops, the same on all ranks; 0: none. Asked after the update, when it has arrived."""
        if self._signal < 0:
            self._signal = self._shutdown.result()
        return self._signal

    def measure(self) -> None:
        """Validates, evaluates and samples, as far as that is due. A run that stops does it when it resumes."""
        if not self._stop_signal:
            self._measure(validates=True, evaluates=True)

    def _measure(self, *, validates: bool, evaluates: bool) -> None:
        section, last = self.recipe.validation, self.recipe.training.steps
        if validates and self._validation and is_due(self.step, section.interval, last):
            validate, batches, mesh = self._validation
            with self._monitor.exclude_from_throughput("validating"), self._watchdog.pause(self._model):
                self._monitor.validation(self.step, **validate(self._model, batches, section.batches, mesh))
        if evaluates and self._evaluation and self._evaluation[0].is_due(self.step):
            evaluator, mesh = self._evaluation
            with self._monitor.exclude_from_throughput("evaluating"), self._watchdog.pause(self._model):
                self._monitor.evaluation(self.step, evaluator(self.step, self._model, mesh))

    @property
    def is_save_due(self) -> bool:
        """Whether to save a checkpoint after this step: at the interval, at the last step, and when the run stops."""
        section, last = self.recipe.checkpoint, self.recipe.training.steps
        return section.enabled and (self._stop_signal > 0 or is_due(self.step, section.interval, last))

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, **others: nn.Module) -> None:
        """Saves the model, the optimizer and other modules, such as an average of the weights."""
        with self._monitor.exclude_from_throughput("saving"), self._watchdog.pause():
            self._guard.flush()  # a non-finite step is never saved
            skipped, loss_scale = self._guard.state
            now = replace(
                self._metadata, step=self.step, tokens=self.recipe.training.num_tokens(self.step),
                position=self._batches.position(), skipped=skipped, loss_scale=loss_scale,
            )  # fmt: skip
            self._checkpoints.save(model, optimizer, now, wait=self._stop_signal > 0, **others)

    def _print(self, text: str | None) -> None:
        self._monitor.print(text)


def _recipe_of_all_ranks(recipe: PretrainRecipe) -> PretrainRecipe:
    """Returns rank 0's recipe, which names the run. Raises `UserError` if another rank's would train something else."""
    first = process_group.broadcast_object(recipe)
    own, expected = (recipe_as_json(each) | {"run": None} for each in (recipe, first))
    for rank, keys in enumerate(process_group.all_gather_object([*changed_keys(own, expected)])):
        if keys:
            raise UserError(
                f"the recipes of rank {rank} and rank 0 differ in {', '.join(keys)}; give all ranks the same"
            )
    return first


@contextmanager
def _advice_when_out_of_memory(recipe: PretrainRecipe) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        cause = str(error).splitlines()[0].rstrip(".")
        advice = call_hooks("out_of_memory", recipe=recipe)
        raise UserError(
            "; ".join([f"rank {environment.rank_info().rank} is out of memory: {cause}", *advice])
        ) from None
