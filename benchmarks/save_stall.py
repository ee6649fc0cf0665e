"""Cost of a save: how long training is blocked, how long the save takes, and how much it slows down the steps meanwhile.

    python -m benchmarks.save_stall --out benchmarks/results/save_stall_cpu.json
    python -m benchmarks.save_stall --table benchmarks/results/save_stall_cpu.json        prints the tables of benchmarks/LOG.md

Compares titanlike with torch.distributed.checkpoint (DCP): the same tensors, ranks and processes. The methods alternate, in a
different order each round; ratios are between saves of one round. The first round, which allocates memory and starts processes, is
a warm-up.

DCP saves the same tensors as a dictionary over its own process group, as its documentation recommends. Both fsync their files;
titanlike also hashes them and commits atomically. `dcp async` uses the defaults; `kept memory` reuses its staging buffer.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.common import ROOT, script
from benchmarks.common import table as table_of
from benchmarks.figures import format_ratio
from benchmarks.models import MODELS, config_of
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata, staging
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import ActivationCheckpoint, Checkpoint, Compile, Float8, Parallelism, Training
from titanlike.distributed import process_group
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run.run_dir import versions

ROWS = ("titanlike async", "titanlike sync", "dcp async", "dcp async, kept memory", "dcp sync")
BASELINE = "dcp async"
STEPS_WITHOUT_SAVE = 4  # before each save, for comparison


class Bench:
    """The model of one rank, and the methods to save it."""

    def __init__(self, name: str, folder: Path, sequences: int, length: int) -> None:
        config = config_of(MODELS[name])
        parallelism = Parallelism().resolve(dist.get_world_size())
        training = Training(
            compute_dtype="float32", seq_len=length, global_batch_size=sequences * dist.get_world_size()
        )
        with torch.device("meta"):
            model = build_model(config)
        self.model = parallelize(
            model, build_mesh("cpu", **parallelism.dimensions()), split=parallelism.split(config), training=training,
            parallelism=parallelism, float8=Float8(), activation_checkpoint=ActivationCheckpoint(), compile=Compile(mode="none"),
        )  # fmt: skip
        initialize(self.model, torch.device("cpu"), 0)
        self.optimizer = build_optimizer(self.model, Optimizer())
        self.tokens = torch.randint(config.vocab_size, (sequences, length + 1))
        self.positions = torch.arange(length).expand(sequences, length)
        self.folder = folder
        self.group = dist.new_group(backend="gloo")
        self.checkpoints = CheckpointManager(str(folder), Checkpoint(keep=1000, max_failures=1))
        self.future: Future[Any] | None = None
        self.kept = DefaultStager(StagingOptions(*[False] * 4))
        self.options: dict[str, dict[str, Any]] = {
            "dcp async": {},
            "dcp async, kept memory": {"async_stager": self.kept},
        }
        self.num_steps = 0

    def step(self) -> float:
        """Trains a step. Returns its duration in seconds."""
        started = time.perf_counter()
        loss = self.model(tokens=self.tokens[:, :-1], position_ids=self.positions, labels=self.tokens[:, 1:])
        (loss / self.positions.numel()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return time.perf_counter() - started

    def save(self, row: str) -> Callable[[], float | None]:
        """Starts a save. Returns a function that returns the duration of the save in seconds, or None while it is in progress."""
        if row.startswith("titanlike"):
            metadata = CheckpointMetadata(self.num_steps, {}, "", {}, {}, versions=versions())
            self.checkpoints.save(self.model, self.optimizer, metadata, wait=row == "titanlike sync")
            return self._save_seconds
        started, durations = time.perf_counter(), list[float]()
        tensors = dict(staging.named_tensors(self.model, self.optimizer, {}))
        location = {"checkpoint_id": str(self.folder / f"dcp-{self.num_steps}"), "process_group": self.group}
        if row == "dcp sync":
            dcp.save(tensors, **location)
            durations.append(time.perf_counter() - started)
        else:
            future = dcp.async_save(tensors, **location, **self.options[row])
            assert isinstance(future, Future)
            self.future = future
            future.add_done_callback(lambda _: durations.append(time.perf_counter() - started))
        return lambda: durations[0] if durations else None

    def _save_seconds(self) -> float | None:
        for result in self.checkpoints.poll():
            assert not result.error, result.error
            return result.seconds
        return None

    def measure(self, row: str) -> dict[str, float]:
        """Measures a save, the steps before it and the steps during it. Returns the maximum over all ranks."""
        process_group.barrier()
        without_save = [self.step() for _ in range(STEPS_WITHOUT_SAVE)]
        process_group.barrier()
        started = time.perf_counter()
        duration = self.save(row)
        stall = time.perf_counter() - started
        seconds, during_save = duration(), list[float]()
        while None in process_group.all_gather_object(seconds):
            during_save.append(self.step())
            seconds = duration() if seconds is None else seconds
        if self.future:
            self.future.result()  # raises the error of the save
        assert seconds is not None
        during_save = during_save[:-1] or during_save  # the save ended during the last step
        found = {
            "stall": stall, "seconds": seconds, "step": statistics.median(without_save), "steps_during_save": len(during_save),
            "step_during_save": statistics.median(during_save or without_save),
            "bytes": sum(f.stat().st_size for f in self.folder.rglob("*.*")),
        }  # fmt: skip
        found = {name: max(other[name] for other in process_group.all_gather_object(found)) for name in found}
        process_group.barrier()
        if process_group.is_main():
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found

    def close(self) -> None:
        """Releases the checkpoints and the staging buffers."""
        self.checkpoints.close()
        self.kept.close()


def work(arguments: argparse.Namespace) -> None:
    """Runs all rows in each round, in a different order, on every rank. Rank 0 writes the result."""
    with process_group.session("cpu"):
        bench = Bench(arguments.model, Path(arguments.folder), arguments.sequences, arguments.length)
        found: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
        for number in range(arguments.rounds + 1):
            for row in ROWS[number % len(ROWS) :] + ROWS[: number % len(ROWS)]:
                one = bench.measure(row)
                if number:
                    found[row].append(one)
                if process_group.is_main():
                    print(f"round {number}  {row:<24} stall {one['stall']:.3f} s, complete after {one['seconds']:.2f} s, "
                          f"steps {one['step_during_save'] / one['step']:.2f}", flush=True)  # fmt: skip
        bench.close()
        if process_group.is_main():
            Path(arguments.worker).write_text(json.dumps(found))


def figures(rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the median and the quartiles of each row; ratios are between saves of one round."""
    summary = {}
    for row, saves in rows.items():
        others = rows[BASELINE]
        summary[row] = {
            "stall": _quartiles([one["stall"] for one in saves]),
            "stall_ratio": _quartiles([a["stall"] / b["stall"] for a, b in zip(saves, others, strict=True)]),
            "seconds": _quartiles([one["seconds"] for one in saves]),
            "mb_per_second": _quartiles([one["bytes"] / one["seconds"] / 1e6 for one in saves]),
            "slowdown": _quartiles([one["step_during_save"] / one["step"] for one in saves]),
        }
    return summary


def _quartiles(numbers: list[float]) -> dict[str, float]:
    ordered, quarter = sorted(numbers), len(numbers) // 4
    return {"median": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter]}


def table(result: dict[str, Any]) -> str:
    """Returns the tables of docs/results.md."""
    tables = []
    for ranks, rows in result["ranks"].items():
        size = next(iter(rows.values()))[0]["bytes"] / 1e6
        cells = [
            (
                row, f"{one['stall']['median']:.3f}", format_ratio(one["stall_ratio"]), f"{one['seconds']['median']:.2f}",
                f"{one['mb_per_second']['median']:.0f}", f"{one['slowdown']['median']:.2f}" if "async" in row else "",
            )
            for row, one in figures(rows).items()
        ]  # fmt: skip
        title = f"**{result['parameters'] / 1e6:.0f} million parameters, {size:,.0f} MB, ranks: {ranks}**"
        heads = (
            "Save", "training blocked, s", f"relative to {BASELINE} (quartiles)", "complete after, s", "MB/s", "relative step time",
        )  # fmt: skip
        tables.append(f"{title}\n\n{table_of(heads, cells)}")
    return "\n\n".join(tables)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures on each number of ranks."""
    if arguments.worker:
        work(arguments)
        sys.exit()
    result: dict[str, Any] = {
        "model": arguments.model, "parameters": config_of(MODELS[arguments.model]).num_parameters(), "rounds": arguments.rounds,
        "tokens_per_step_of_a_rank": arguments.sequences * arguments.length, "ranks": {},
    }  # fmt: skip
    options = [f"--{name}={getattr(arguments, name)}" for name in ("model", "sequences", "length", "rounds")]
    for ranks in arguments.ranks.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder or None, prefix="saves-") as folder:
            found, saves = Path(folder, "found.json"), Path(folder, "saves")
            saves.mkdir()
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                 "-m", "benchmarks.save_stall", *options, f"--folder={saves}", f"--worker={found}"],
                cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // int(ranks)))},
            )  # fmt: skip
            result["ranks"][ranks] = json.loads(found.read_text())
    return result | {"figures": {ranks: figures(rows) for ranks, rows in result["ranks"].items()}}


if __name__ == "__main__":
    # `sequences` of a step and rank have `length` tokens. Each rank is a process with a file, `worker`, to write to.
    script(
        __doc__, measure, table, model="cpu_50m", sequences=1, length=256, ranks="2,1", rounds=5, folder="", worker=""
    )
