"""What a save costs: how long training stands still, how long until it is on the disk, and how much slower the steps beside it are.

    python -m benchmarks.save_stall --out benchmarks/results/save_stall_cpu.json
    python -m benchmarks.save_stall --table benchmarks/results/save_stall_cpu.json        the table of the documents

Our saves and those of torch.distributed.checkpoint (DCP), of the same tensors of the same model on the same ranks in the same
processes. All take turns, in another order each round; a ratio is between saves of one round. The first round does not count: in
it memory is taken, and processes are started, that later saves find there.

DCP is given what we save, as a dictionary, and a process group of its own, as its documents advise. It fsyncs its files, as we do;
we besides hash what we write, and let a checkpoint appear under its name only when it is whole. `dcp async` is DCP by its
defaults; the other two rows are its options: memory for the copy that is kept from save to save, and a process of its own.
"""

import argparse
import json
import os
import platform
import shlex
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
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.figures import cpu_name, format_ratio
from benchmarks.models import MODELS, config_of
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata, loader
from titanlike.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Float8,
    Optimizer,
    Parallelism,
    Training,
)
from titanlike.distributed import process_group
from titanlike.models import build_model
from titanlike.models.init import initialize
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run.run_dir import versions

ROOT = Path(__file__).parents[1]
ROWS = ("titanlike async", "titanlike sync", "dcp async", "dcp async, kept memory", "dcp async, process", "dcp sync")
AGAINST = "dcp async"
NO_DEVICE = {"use_async_staging": False, "use_non_blocking_copy": False}
STEPS_ALONE = 4  # before each save, to hold the steps beside it against


class Bench:
    """One rank's model, and the ways to save it."""

    def __init__(self, name: str, folder: Path, sequences: int, length: int) -> None:
        shape = config_of(MODELS[name])
        parallelism = Parallelism().resolve(dist.get_world_size())
        training = Training(
            compute_dtype="float32", seq_len=length, global_batch_size=sequences * dist.get_world_size()
        )
        with torch.device("meta"):
            model = build_model(shape)
        self.model = parallelize(
            model, build_mesh("cpu", **parallelism.dimensions()), split=parallelism.split(shape), training=training,
            parallelism=parallelism, float8=Float8(), activation_checkpoint=ActivationCheckpoint(), compile=Compile(mode="none"),
        )  # fmt: skip
        initialize(self.model, torch.device("cpu"), 0)
        self.optimizer = build_optimizer(self.model, Optimizer())
        self.tokens = torch.randint(shape.vocab_size, (sequences, length + 1))
        self.positions = torch.arange(length).expand(sequences, length)
        self.folder = folder
        self.group = dist.new_group(backend="gloo")
        self.checkpoints = CheckpointManager(str(folder), Checkpoint(keep=1000, tries=1))
        self.future: Future[Any] | None = None
        self.kept = DefaultStager(StagingOptions(*[False] * 4))
        self.shared = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=True, **NO_DEVICE))
        self.options: dict[str, dict[str, Any]] = {
            "dcp async": {},
            "dcp async, kept memory": {"async_stager": self.kept},
            "dcp async, process": {
                "async_stager": self.shared,
                "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            },
        }
        self.num_steps = 0

    def step(self) -> float:
        """Train a step. Its seconds."""
        started = time.perf_counter()
        loss = self.model(tokens=self.tokens[:, :-1], position_ids=self.positions, labels=self.tokens[:, 1:])
        (loss / self.positions.numel()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return time.perf_counter() - started

    def save(self, row: str) -> Callable[[], float | None]:
        """Begin a save. Returns what tells in how many seconds all came to be on the disk, or None as long as it is not."""
        if row.startswith("titanlike"):
            saved = CheckpointMetadata(self.num_steps, {}, "", {}, {}, versions=versions())
            self.checkpoints.save(self.model, self.optimizer, saved, wait=row == "titanlike sync")
            return self._ours_took
        began, took = time.perf_counter(), []
        named = dict(loader.tensors(self.model, self.optimizer, {}))
        place = {"checkpoint_id": str(self.folder / f"dcp-{self.num_steps}"), "process_group": self.group}
        if row == "dcp sync":
            dcp.save(named, **place)
            took.append(time.perf_counter() - began)
        else:
            future = dcp.async_save(named, **place, **self.options[row])
            assert isinstance(future, Future)
            self.future = future
            future.add_done_callback(lambda _: took.append(time.perf_counter() - began))
        return lambda: took[0] if took else None

    def _ours_took(self) -> float | None:
        for outcome in self.checkpoints.poll():
            assert not outcome.error, outcome.error
            return outcome.seconds
        return None

    def measure(self, row: str) -> dict[str, float]:
        """One save, steps before it and steps beside it. Of all ranks, the longest counts."""
        process_group.barrier()
        alone = [self.step() for _ in range(STEPS_ALONE)]
        process_group.barrier()
        began = time.perf_counter()
        ended = self.save(row)
        stall = time.perf_counter() - began
        took, beside = ended(), list[float]()
        while None in process_group.all_gather_object(took):
            beside.append(self.step())
            took = ended() if took is None else took
        if self.future:
            self.future.result()  # raises what went wrong
        assert took is not None
        beside = beside[:-1] or beside  # the last has not all of it beside the save
        found = {
            "stall": stall, "seconds": took, "step": statistics.median(alone), "steps_beside": len(beside),
            "step_beside": statistics.median(beside or alone), "bytes": sum(f.stat().st_size for f in self.folder.rglob("*.*")),
        }  # fmt: skip
        found = {name: max(said[name] for said in process_group.all_gather_object(found)) for name in found}
        process_group.barrier()
        if process_group.is_main():
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found

    def close(self) -> None:
        """Leave what was opened."""
        self.checkpoints.close()
        for stager in (self.kept, self.shared):
            stager.close()


def work(arguments: argparse.Namespace) -> None:
    """What each rank does: all rows in each round, in another order each time. Rank 0 writes what came of it."""
    rows = arguments.rows
    with process_group.session("cpu"):
        bench = Bench(arguments.model, arguments.folder, arguments.sequences, arguments.length)
        found: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
        for number in range(arguments.rounds + 1):
            for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
                one = bench.measure(row)
                if number:
                    found[row].append(one)
                if process_group.is_main():
                    print(f"round {number}  {row:<24} stall {one['stall']:.3f} s, on disk after {one['seconds']:.2f} s, "
                          f"steps {one['step_beside'] / one['step']:.2f}", flush=True)  # fmt: skip
        bench.close()
        if process_group.is_main():
            arguments.worker.write_text(json.dumps(found))


def figures(rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each row what is in the middle and between what half of all lies; ratios are between saves of one round."""
    told = {}
    for row, saves in rows.items():
        others = rows.get(AGAINST, saves)
        told[row] = {
            "stall": _spread([one["stall"] for one in saves]),
            "stall_ratio": _spread([a["stall"] / b["stall"] for a, b in zip(saves, others, strict=True)]),
            "seconds": _spread([one["seconds"] for one in saves]),
            "mb_per_second": _spread([one["bytes"] / one["seconds"] / 1e6 for one in saves]),
            "slowdown": _spread([one["step_beside"] / one["step"] for one in saves]),
        }
    return told


def _spread(numbers: list[float]) -> dict[str, float]:
    ordered, quarter = sorted(numbers), len(numbers) // 4
    return {"median": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter]}


def table(result: dict[str, Any]) -> str:
    """The result as the documents have it."""
    lines = []
    for ranks, rows in result["ranks"].items():
        size = next(iter(rows.values()))[0]["bytes"] / 1e6
        lines += [
            f"**{result['parameters'] / 1e6:.0f} million parameters, {size:,.0f} MB, ranks: {ranks}**",
            "",
            f"| Save | stands still, s | of {AGAINST}'s (half lie in) | on the disk after, s | MB/s | steps beside it take |",
            "|---|---|---|---|---|---|",
        ]
        for row, one in figures(rows).items():
            beside = "" if "async" not in row else f"{one['slowdown']['median']:.2f}"
            lines.append(
                f"| {row} | {one['stall']['median']:.3f} | {format_ratio(one['stall_ratio'])} | {one['seconds']['median']:.2f} | "
                f"{one['mb_per_second']['median']:.0f} | {beside} |"
            )
        lines.append("")
    return "\n".join(lines).strip()


def main() -> None:
    """Measure on each number of ranks, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cpu_50m", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=1, help="in a step of a rank")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--ranks", default="2,1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", type=lambda text: text.split(";"), default=list(ROWS), help="as in the table, with ; between"
    )
    parser.add_argument("--folder", type=Path, help="on the disk to write to; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this result, and measure nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    if arguments.worker:
        work(arguments)
        return
    shape = config_of(MODELS[arguments.model])
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.save_stall", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "platform": platform.platform()},
        "versions": versions(), "model": arguments.model, "parameters": shape.num_parameters(),
        "tokens_per_step_of_a_rank": arguments.sequences * arguments.length, "rounds": arguments.rounds,
        "ranks": {}, "load": [os.getloadavg()[0]],
    }  # fmt: skip
    words = [f"--{name}={getattr(arguments, name)}" for name in ("model", "sequences", "length", "rounds")]
    for ranks in arguments.ranks.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="saves-") as folder:
            found = Path(folder, "found.json")
            saves = Path(folder, "saves")
            saves.mkdir()
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                 "-m", "benchmarks.save_stall", *words, f"--rows={';'.join(arguments.rows)}", f"--folder={saves}",
                 f"--worker={found}"],
                cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // int(ranks)))},
            )  # fmt: skip
            result["ranks"][ranks] = json.loads(found.read_text())
        result["load"].append(os.getloadavg()[0])
    result["figures"] = {ranks: figures(rows) for ranks, rows in result["ranks"].items()}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
