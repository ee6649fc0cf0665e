"""The folder of one run: its recipe, what it ran on, its numbers and its checkpoints."""

import json
import math
import platform
import shlex
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
from titanlike.checkpoint import CheckpointMetadata
from titanlike.checkpoint.store import open_store
from titanlike.config import PretrainRecipe, UserError, to_toml
from titanlike.distributed import environment, graceful_shutdown, process_group
from titanlike.distributed.watchdog import group_timeout
from titanlike.float8.selection import summary_lines as float8_headlines
from titanlike.metrics.hardware import device_name
from titanlike.utils.file_lock import FileLock, LockHeld


class RunDirectory:
    """Paths of a run. Nothing is written before `open`."""

    def __init__(self, recipe: PretrainRecipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.run.dir, recipe.run.name)
        elsewhere = recipe.checkpoint.dir
        self.checkpoints = f"{elsewhere.rstrip('/')}/{recipe.run.name}" if elsewhere else str(self.path / "checkpoints")
        self.metrics = self.path / "metrics.jsonl"

    @contextmanager
    def session(self) -> Iterator[torch.device]:
        """Joins the process group and locks this directory; yields the device of this rank. Leaves both at the end."""
        section = self.recipe.run
        timeout = group_timeout(section.hang_timeout)
        with (
            process_group.session(
                section.device,
                deterministic=section.deterministic,
                timeout=timeout,
                shutdown_message=self.shutdown_message,
            ) as device,
            self.locked(),
        ):
            yield device

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other jobs out of this folder while this one trains in it. Rank 0 holds the lock; if it cannot, all refuse."""
        lock, refusal = self._lock() if process_group.is_main() else (None, None)
        try:
            refusal = process_group.broadcast_object(refusal)
            if refusal:
                raise UserError(refusal)
            yield
        finally:
            if lock:
                lock.release()

    def _lock(self) -> tuple[FileLock | None, str | None]:
        try:
            lock = FileLock(self.path / "lock")
        except LockHeld as holder:
            return None, (
                f"{self.path} is being trained by {holder}; end that one, or give --run.name to start a new run"
            )
        except OSError as error:
            return None, f"run.dir = {str(self.path.parent)!r}: {error}; choose another run.dir"
        if not lock.works:
            process_group.warn(
                f"the file system of {self.path} has no locks: nothing keeps a second job out of this run"
            )
        return lock, None

    def open(self, device: torch.device, *, resumed_step: int) -> None:
        """Make the folder, write the recipe and the facts, and cut off what the metrics say of steps to be done again."""
        recipe = self.recipe
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if "://" not in self.checkpoints:
                Path(self.checkpoints).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            key, value = (
                ("checkpoint.dir", recipe.checkpoint.dir) if self.path.is_dir() else ("run.dir", recipe.run.dir)
            )
            raise UserError(f"{key} = {value!r}: {error}; choose another {key}") from None
        comment = f"The whole recipe of this run. Run it again to resume:\n{self.command()}"
        # What was said of one start is not said of the next.
        lasting = replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=0, allow_changed=()))
        facts = environment_metadata(device_name(device), environment.ranks().world_size) | {
            "resumed_step": resumed_step
        }
        try:
            _replace(self.path / "recipe.toml", to_toml(lasting, comment))
            _replace(self.path / "environment.json", json.dumps(facts, indent=1) + "\n")
            if self.metrics.exists():
                lines = self.metrics.read_text(errors="replace").splitlines()
                _replace(self.metrics, "".join(f"{line}\n" for line in lines if _step_of(line) <= resumed_step))
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written to: {error}; put that right, or choose another run.dir"
            ) from None

    def command(self) -> str:
        """What takes this run up again."""
        return f"./run_train.sh {shlex.quote(str(self.path / 'recipe.toml'))}"

    def shutdown_message(self, signal: int = 0) -> str:
        """What to say when the run is stopped by hand."""
        stopped = f"stopped by {graceful_shutdown.signal_name(signal)}" if signal else "stopped"
        saved = open_store(self.checkpoints).steps()
        if not saved:
            return f"{stopped} before the first checkpoint"
        return f"{stopped}; to go on from step {saved[-1]}: {self.command()}"

    def resume_message(self, saved: CheckpointMetadata | None, inexact: list[str]) -> str | None:
        """Where in the run this start begins, if that is not simply the beginning."""
        restarts = environment.restarts()
        restart = f"restart {restarts.count} of {restarts.limit}: " if restarts.count else ""
        if saved:
            return f"{restart}resumed at step {saved.step}" + "".join(
                f"; not bit-exact: {reason}" for reason in inexact
            )
        if self.metrics.exists() or restart:
            return f"{restart}{self.path} has no checkpoint to resume from: beginning again at step 1"
        return None


def summary(recipe: PretrainRecipe, layout: dict[str, int], device: torch.device, data: str) -> str:
    """Describes the model, the data, the batch and the layout, in a few lines."""
    model, training = recipe.model, recipe.training
    ranks, num_data_ranks = math.prod(layout.values()), layout["replicate"] * layout["shard"]
    share, num_microbatches = training.global_batch_size // num_data_ranks, training.num_microbatches(num_data_ranks)
    stages = [str(number) for number in recipe.parallelism.split(model)]
    what = {
        "pipeline": f"{recipe.parallelism.pipeline_schedule}, stages of {' + '.join(stages)} blocks",
        "replicate": "copies of the model",
        "shard": "shares of weights, gradients and optimizer state",
        "context": f"shares of a sequence, {training.seq_len // layout['context']} tokens each",
        "tensor": f"shares of a matrix, {model.num_heads // layout['tensor']} heads each",
    }
    lines = [
        f"model   {f'{model.name} {model.size}'.strip()}: {model.num_parameters():,} parameters, "
        f"{model.flops_per_token(training.seq_len) / 1e6:,.0f} MFLOP a token",
        f"data    {recipe.data.source}: {data}, {recipe.tokenizer.encoding} encoding",
        f"batch   {training.global_batch_size} sequences x {training.seq_len} tokens a step; each rank takes "
        f"{num_microbatches} x {share // num_microbatches}",
        f"ranks   {ranks} on {device_name(device)}; compute {training.compute_dtype}, compile {recipe.compile.mode}",
        *(f"          {name:<9} {size:>4}  {what[name]}" for name, size in layout.items() if size > 1),
        *float8_headlines(
            recipe.float8,
            model.matrices(),
            model.tied_head,
            compiled=recipe.compile.mode != "none",
            sharded=layout["shard"] * layout["context"] > 1,
        ),
    ]
    return "\n".join(lines)


def run_metadata(
    recipe: PretrainRecipe, data: str, tokenizer: str, layout: dict[str, int], device: torch.device
) -> CheckpointMetadata:
    """Returns the metadata of a checkpoint of this run at step 0. `data` and `tokenizer` are fingerprints."""
    return CheckpointMetadata(
        step=0,
        recipe=recipe_as_json(recipe),
        data=data,
        tokenizer=tokenizer,
        layout=layout,
        machine=machine_metadata(device),
        versions=versions(),
    )


def recipe_as_json(recipe: PretrainRecipe) -> dict[str, Any]:
    """Returns a recipe as plain dictionaries, with the name of its program instead of the path."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return values | {"recipe": Path(recipe.recipe).stem}


def machine_metadata(device: torch.device) -> dict[str, str]:
    """What of the machine decides how results are rounded."""
    return {"device": device.type, "torch": torch.__version__.partition("+")[0]}


def versions() -> dict[str, str]:
    """Of what a later reader may want to know."""
    names = ("torch", "torchao", "numpy")
    return {"titanlike": titanlike.__version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def environment_metadata(device: str, world_size: int) -> dict[str, Any]:
    """What a later reader needs to know of where this ran."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "device": device,
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "titanlike": titanlike.__version__,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain")),
    }


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: the disk may be full, or this process killed at any moment."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut short
        return float("inf")
