"""The directory of a run: its recipe, environment, metrics, lock and checkpoints."""

import hashlib
import json
import math
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import titanlike
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.checkpoint.store import open_store
from titanlike.config import UserError
from titanlike.config.sections import Training
from titanlike.config.shipped import PROGRAMS, train_command
from titanlike.distributed import environment, process_group
from titanlike.distributed.sagemaker import sagemaker_job
from titanlike.interop.export import export
from titanlike.interop.weights import fingerprints, open_weights
from titanlike.metrics import Measured
from titanlike.metrics.hardware import device_name
from titanlike.models.common.config import TransformerConfig
from titanlike.recipe import PretrainRecipe, to_toml
from titanlike.run.hooks import call_hooks
from titanlike.utils.atomic_write import atomic_write_text
from titanlike.utils.file_lock import FileLock, LockHeld


class RunDirectory:
    """Paths of a run. Nothing is written before `open`."""

    def __init__(self, recipe: PretrainRecipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.run.dir, recipe.run.name)
        parent = recipe.checkpoint.dir
        self.checkpoints = f"{parent.rstrip('/')}/{recipe.run.name}" if parent else str(self.path / "checkpoints")
        self.checkpoint_owner = self.path if parent else None  # other runs may have the same name and checkpoint.dir
        self.metrics = self.path / "metrics.jsonl"
        sagemaker = sagemaker_job()
        self.exported = Path(sagemaker.model if sagemaker else self.path, "hf")  # of checkpoint.export

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other jobs from this run. Rank 0 holds the lock. If it cannot be acquired, all ranks raise `UserError`."""
        lock, problem = self._lock() if process_group.is_main() else (None, None)
        try:
            problem = process_group.broadcast_object(problem)
            if problem:
                raise UserError(problem)
            yield
        finally:
            if lock:
                lock.release()

    def _lock(self) -> tuple[FileLock | None, str | None]:
        try:
            lock = FileLock(self.path / "lock")
        except LockHeld as holder:
            return None, (
                f"{self.path} is being trained by {holder}; end that job, or give --run.name to start a new run"
            )
        except OSError as error:
            return None, f"run.dir = {str(self.path.parent)!r}: {error}; choose another run.dir"
        if not lock.is_supported:
            process_group.warn(
                f"the file system of {self.path} has no locks: a second job in this run is not prevented"
            )
        return lock, None

    def open(self, device: torch.device, *, resumed_step: int) -> None:
        """Creates the directory, writes the recipe and the environment, and removes metrics of steps that will be repeated.

        Rank 0 does this for all ranks.
        """
        if not process_group.is_main():
            return
        recipe = self.recipe
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if "://" not in self.checkpoints:
                Path(self.checkpoints).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            key, value = "run.dir", recipe.run.dir
            if self.path.is_dir():
                key, value = "checkpoint.dir", recipe.checkpoint.dir
            raise UserError(f"{key} = {value!r}: {error}; choose another {key}") from None
        comment = f"The resolved recipe of this run. To resume the run:\n{self.command()}"
        # These two keys apply to one start only.
        resolved = replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=0, allow_changed=()))
        facts = environment_metadata(device_name(device), environment.rank_info().world_size)
        environment_json = facts | {"resumed_step": resumed_step}
        try:
            atomic_write_text(self.path / "recipe.toml", to_toml(resolved, comment))
            atomic_write_text(self.path / "environment.json", json.dumps(environment_json, indent=1) + "\n")
            if self.metrics.exists():
                lines = self.metrics.read_bytes().decode(errors="replace").splitlines()
                kept = "".join(f"{line}\n" for line in lines if _step_of(line) <= resumed_step)
                atomic_write_text(self.metrics, kept)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error}; fix this, or choose another run.dir") from None

    def lacks_record(self, step: int, *names: str) -> bool:
        """Whether the run has trained this step and not recorded a value of it whose name begins with one of these. Rank 0 decides
        for all ranks."""
        if step == 0:
            return False
        lacks = False
        if process_group.is_main() and self.metrics.exists():
            lines = self.metrics.read_bytes().decode(errors="replace").splitlines()
            recorded = [name for line in lines if _step_of(line) == step for name in json.loads(line)]
            lacks = not any(name.startswith(names) for name in recorded)
        return process_group.broadcast_object(lacks)

    def command(self) -> str:
        """Returns the command that resumes this run."""
        return f"{train_command()} {shlex.quote(str(self.path / 'recipe.toml'))}"

    def shutdown_message(self, number: int = 0) -> str:
        """Returns the message for a run that was stopped by a signal, or by Ctrl-C if `number` is 0."""
        stopped = f"stopped by {signal.Signals(number).name}" if number else "stopped"
        try:
            steps = open_store(self.checkpoints).steps()
        except Exception as error:  # noqa: BLE001  file systems raise anything
            return f"{stopped}; {self.checkpoints} cannot be read: {error}"
        if not steps:
            return f"{stopped} before the first checkpoint"
        return f"{stopped}; to resume from step {steps[-1]}: {self.command()}"

    def resume_message(self, saved: CheckpointMetadata | None, inexact: list[str]) -> str | None:
        """Returns the message that says where a run resumes, or None for a new run."""
        ranks = environment.rank_info()
        restart = f"restart {ranks.restart_count} of {ranks.max_restarts}: " if ranks.restart_count else ""
        if saved and not saved.step:
            return f"{restart}starting from the weights of a checkpoint of {saved.imported}"
        if saved:
            return "; ".join(
                [f"{restart}resumed at step {saved.step}", *(f"not bit-exact: {reason}" for reason in inexact)]
            )
        if self.metrics.exists() or restart:
            return f"{restart}{self.path} has no checkpoint to resume from: starting at step 1"
        if self.recipe.checkpoint.initial:
            return f"starting from the weights of {self.recipe.checkpoint.initial}"
        return None

    def checkpoint_manager(self) -> CheckpointManager:
        """Returns the checkpoints of this run."""
        section, timeout = self.recipe.checkpoint, self.recipe.run.shutdown_timeout
        return CheckpointManager(self.checkpoints, section, owner=self.checkpoint_owner, shutdown_timeout=timeout)

    def export(self, checkpoints: CheckpointManager) -> None:
        """Writes the weights of the newest checkpoint as a Hugging Face folder, if `checkpoint.export` asks for it."""
        dtype = self.recipe.checkpoint.export
        if dtype != "none":
            process_group.run_on_main(
                lambda: export(open_weights(checkpoints.newest()), self.exported, dtype=dtype, replace=True)
            )

    def completion_message(self, device: torch.device, measured: Measured) -> str | None:
        """Returns the last lines of a complete run, on rank 0: its best validation loss, its weights and what to do with them."""
        if not process_group.is_main():
            return None
        lines = [_best_validation(self.metrics), *self._next_commands()]
        lines += call_hooks("completed", recipe=self.recipe, metrics=self.metrics, device=device, measured=measured)
        return "\n".join([f"done: {self.path}", *filter(None, lines)])

    def _next_commands(self) -> list[str]:
        """Returns the location of the weights, and the commands that use them."""
        if not self.recipe.checkpoint.enabled:
            return ["weights not saved: checkpoint.enabled = false"]
        path = shlex.quote(str(self.path))
        weights = f"weights {self.checkpoints}" + (f", {self.exported}" if self.exported.exists() else "")
        if sagemaker_job():  # the reader of its log is on another machine
            return [weights]
        asks = "--chat" if getattr(self.recipe.data, "has_chats", False) else "--prompt TEXT"
        commands = [f"generate {path} {asks}"] if self.recipe.causal else []
        commands += [f"export {path} FOLDER", f"compare {path} OTHER_RUN"]
        return [
            weights,
            *(f"{' ' * 4 if index else 'next'}    titanlike {text}" for index, text in enumerate(commands)),
        ]


def _best_validation(metrics: Path) -> str:
    if not metrics.exists():
        return f"{metrics} was deleted during training"
    records = [json.loads(line) for line in metrics.read_text().splitlines() if '"validation_loss"' in line]
    losses = [
        (record["validation_loss"], record["step"]) for record in records if record["validation_loss"] is not None
    ]
    if not losses:
        return ""
    best, step = min(losses)
    last = f"; {losses[-1][0]:.4f} at the last step" if losses[-1][0] > best else ""
    return f"best    validation loss {best:.4f} at step {step}{last}"


def summary(recipe: PretrainRecipe, layout: dict[str, int], device: torch.device, data: str) -> str:
    """Returns a summary of the model, data, batch and layout."""
    model, training = recipe.model, recipe.training
    ranks, num_data_ranks = math.prod(layout.values()), layout["replicate"] * layout["shard"]
    num_microbatches = training.num_microbatches(num_data_ranks)
    microbatch_size = training.global_batch_size // num_data_ranks // num_microbatches
    stages = " + ".join(str(num_blocks) for num_blocks in recipe.parallelism.split(model))
    dimensions = {
        "pipeline": f"{recipe.parallelism.pipeline_schedule}, stages of {stages} blocks",
        "replicate": "replicas of the model",
        "shard": "shards of weights, gradients and optimizer state",
        "context": f"chunks of a sequence, {training.seq_len // layout['context']} tokens each",
        "tensor": f"shards of a matrix, {model.num_heads // layout['tensor']} heads each",
    }
    lines = [
        f"model   {model.label()}: {model.num_parameters():,} parameters, {_experts(model)}"
        f"{recipe.flops_per_token / 1e6:,.0f} MFLOP per token",
        f"data    {recipe.data.source}: {data}, {recipe.tokenizer.encoding} encoding",
        f"batch   {training.global_batch_size} sequences x {training.seq_len} tokens per step; per rank "
        f"{num_microbatches} x {microbatch_size}{_ramp(training)}",
        f"ranks   {ranks} on {device_name(device)}; compute {training.compute_dtype}, compile {recipe.compile.mode}",
        *(f"          {name:<9} {size:>4}  {dimensions[name]}" for name, size in layout.items() if size > 1),
        *_expert_lines(recipe),
        *recipe.summary_lines(),
        *_float8_lines(recipe, sharded=layout["shard"] * layout["context"] > 1),
        *(["start   compiling: the first step takes longer"] if recipe.compile.mode != "none" else []),
    ]
    return "\n".join(lines)


def _ramp(training: Training) -> str:
    stages = [f"{size} for {num_steps:,} steps" for num_steps, size in training.batch_ramp]
    return f"; before, {', then '.join(stages)}" if stages else ""


def _experts(model: TransformerConfig) -> str:
    """Returns how many parameters of a mixture of experts compute a token."""
    if not model.num_experts:
        return ""
    return f"{model.num_active_parameters():,} per token ({model.experts_per_token} of {model.num_experts} experts), "


def _float8_lines(recipe: PretrainRecipe, *, sharded: bool) -> list[str]:
    if recipe.float8.scaling == "none":
        return []
    from titanlike.float8.selection import summary_lines

    model, compiled = recipe.model, recipe.compile.mode != "none"
    return summary_lines(recipe.float8, model.matrices(), model.tied_head, compiled=compiled, sharded=sharded)


def _expert_lines(recipe: PretrainRecipe) -> list[str]:
    model, expert = recipe.model, recipe.parallelism.expert
    if not model.num_experts:
        return []
    lines = []
    if expert > 1:
        lines.append(
            f"          expert    {expert:>4}  of shard x context: shards of the experts, {model.num_experts // expert} each"
        )
    if recipe.float8.scaling != "none":
        lines.append(f"          experts compute in {recipe.training.compute_dtype}: float8 is for linear layers")
    return lines


def run_metadata(
    recipe: PretrainRecipe, data: str, tokenizer: str, layout: dict[str, int], device: torch.device
) -> CheckpointMetadata:
    """Returns the metadata of a checkpoint of this run at step 0. `data` and `tokenizer` are fingerprints."""
    frozen = {key: path for key, (path, _) in recipe.initial_weights.items() if key in recipe.frozen_weights}
    if frozen:
        frozen = fingerprints(frozen)
    return CheckpointMetadata(
        step=0,
        recipe=recipe_as_json(recipe),
        program=_program_hash(recipe),
        data=data,
        tokenizer=tokenizer,
        weights=frozen,
        layout=layout,
        machine=machine_metadata(device),
        versions=versions(),
    )


def _program_hash(recipe: PretrainRecipe) -> str:
    """Returns a hash of the file of the program, or "" if there is none."""
    path = PROGRAMS / Path(recipe.program).with_suffix(".py")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def recipe_as_json(recipe: PretrainRecipe) -> dict[str, Any]:
    """Returns a recipe as plain dictionaries, with the name of its program instead of the path."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return values | {"program": Path(recipe.program).stem}


def machine_metadata(device: torch.device) -> dict[str, str]:
    """Returns the properties of the machine that affect rounding."""
    found = {"device": device.type, "torch": torch.__version__.partition("+")[0]}
    if device.type == "cpu":
        return found | {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
        }
    if device.type == "mps":
        return found | {"chip": platform.processor(), "system": platform.mac_ver()[0]}
    libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version()}
    return found | {"gpu": device_name(device)} | {name: str(version) for name, version in libraries.items()}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute."""
    packages = {name: metadata.version(name) for name in ("torch", "torchao", "numpy")}
    return {"titanlike": titanlike.__version__, "python": platform.python_version(), **packages}


def environment_metadata(device: str, world_size: int) -> dict[str, Any]:
    """Returns the command, hardware and software of this start."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "device": device,
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        **versions(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain")),
    }


def _git(*arguments: str) -> str | None:
    directory = Path(__file__).resolve().parent
    try:
        result = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be truncated
        return float("inf")
