"""Restart from remote storage: the bytes that each rank reads, under the layout of the save and under others.

    python -m benchmarks.restart_bytes --out benchmarks/results/restart_bytes.json
    python -m benchmarks.restart_bytes --table benchmarks/results/restart_bytes.json        prints the table of docs/checkpoints.md

Eight ranks save a checkpoint under FSDP. It is then verified and loaded through a file system that counts what it reads.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

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
from titanlike.utils.dtensor import local_tensor

ROOT = Path(__file__).parents[1]
SAVED: dict[str, int] = dict(shard=8)
LAYOUTS: list[dict[str, int]] = [
    SAVED, dict(replicate=2, shard=4), dict(tensor=2, shard=4), dict(pipeline=2, shard=4), dict(shard=4), dict(shard=2),
]  # fmt: skip


class CountingFileSystem(LocalFileSystem):
    """Counts the bytes that are read."""

    protocol = "counted"
    read: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        content = super().cat_file(path, start, end, **options)
        with self.lock:
            self.read["bytes"] += len(content)
        return content

    def get_file(self, path: str, target: str, **options: Any) -> None:  # type: ignore[override]
        super().get_file(path, target, **options)
        with self.lock:
            self.read["bytes"] += Path(target).stat().st_size


def work(sizes: dict[str, int], model_name: str, folder: Path, *, saves: bool) -> None:
    """Saves or loads on this rank."""
    fsspec.register_implementation("counted", CountingFileSystem)
    with process_group.session("cpu"):
        config, parallelism = config_of(MODELS[model_name]), Parallelism(**sizes)
        mesh = build_mesh("cpu", **parallelism.dimensions())
        with torch.device("meta"):
            model = build_model(config)
        model = parallelize(
            model, mesh, split=parallelism.split(config), training=Training(compute_dtype="float32"), parallelism=parallelism,
            float8=Float8(), activation_checkpoint=ActivationCheckpoint(), compile=Compile(mode="none"),
        )  # fmt: skip
        initialize(model, torch.device("cpu"), 0)
        optimizer = build_optimizer(model, Optimizer())
        with CheckpointManager(f"counted://{folder}/saved", Checkpoint()) as checkpoints:
            if saves:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                checkpoints.save(model, optimizer, CheckpointMetadata(step=1), wait=True)
                return
            metadata = checkpoints.find()
            assert metadata is not None
            checkpoints.load(model, optimizer, metadata)
        tensors = staging.named_tensors(model, optimizer, {})
        found = {"read": CountingFileSystem.read["bytes"], "shards": sum(local_tensor(t).nbytes for _, t in tensors)}
        gathered = process_group.all_gather_object(found)
        if process_group.is_main():
            (folder / "found.json").write_text(json.dumps(gathered))


def start(sizes: dict[str, int], model: str, folder: Path, mode: str) -> None:
    """Runs this module on the ranks of a layout."""
    ranks = 1
    for size in sizes.values():
        ranks *= size
    worker = [f"--worker={mode}", f"--sizes={json.dumps(sizes)}", f"--model={model}", f"--folder={folder}"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         "-m", "benchmarks.restart_bytes", *worker],
        cwd=ROOT, check=True,
    )  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Returns the result as a Markdown table, in MB."""
    lines = [
        "| Restart of 8 ranks' FSDP checkpoint under | its shards, MB a rank | read, MB a rank | of the checkpoint |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        layout = " x ".join(f"{name} {size}" for name, size in row["layout"].items())
        shards, read = (max(rank[key] for rank in row["ranks"]) for key in ("shards", "read"))
        share = read / result["checkpoint_bytes"]
        lines.append(f"| {layout} | {shards / 1e6:.1f} | {read / 1e6:.1f} | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Saves, loads under each layout, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cpu_6m", choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this result and exit")
    for name in ("worker", "sizes", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    if arguments.worker:
        work(json.loads(arguments.sizes), arguments.model, Path(arguments.folder), saves=arguments.worker == "save")
        return
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.restart_bytes", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d"),
        "versions": versions(), "model": arguments.model, "saved": SAVED, "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        start(SAVED, arguments.model, Path(folder), "save")
        files = Path(folder, "saved/step-00000001").iterdir()
        result["checkpoint_bytes"] = sum(path.stat().st_size for path in files)
        for sizes in LAYOUTS:
            start(sizes, arguments.model, Path(folder), "load")
            result["rows"].append({"layout": sizes, "ranks": json.loads(Path(folder, "found.json").read_text())})
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
