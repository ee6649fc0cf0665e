"""Compares the training speed of several projects on one model.

    python -m benchmarks.run --subject plain,titanlike --model cpu_6m --device cpu --precision float32 --out result.json
    python -m benchmarks.run --table result.json ...                      prints the tables of existing results

Each subject (`benchmarks/subjects/`) is a separate process with the same initial weights, batches, AdamW and precision. It has two
rows: "shipped" with the project's defaults, and "best" with its fastest options. On a CPU all processes are warmed up and then take
turns of a few steps, so that other load on the machine slows all of them. On a GPU, where memory is compared too, they run
sequentially, in order and in reverse order.

For a peer in its own environment use `--python litgpt=/path/to/venv/bin/python` or `--path nanochat=/path/to/nanochat`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, facts, parser_of, write
from benchmarks.figures import TOLERANCES, figures, table
from benchmarks.models import MODELS, Model, config_of
from benchmarks.protocol import Task

OURS = ("plain", "titanlike")  # subjects that need no other project
UNSUPPORTED = 2  # exit code of a subject that does not support the task
SUBJECTS = sorted(path.stem for path in (ROOT / "benchmarks/subjects").glob("*.py"))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, by default that of this process."""
    parser = parser_of(__doc__)
    parser.add_argument("--subject", default="plain,titanlike", help=f"comma-separated: {', '.join(SUBJECTS)}")
    parser.add_argument("--rows", default="shipped,best")
    parser.add_argument("--model", default="cpu_6m", choices=list(MODELS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=list(TOLERANCES))
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--block", type=int, help="steps per turn; default 5 on a CPU, all on a GPU")
    parser.add_argument("--sequential", action="store_true", help="run one process at a time, as on a GPU")
    parser.add_argument("--once", action="store_true", help="on a GPU, without the second run in reverse order")
    parser.add_argument("--micro-batch", type=int, help="sequences per forward pass")
    parser.add_argument("--warm-start", action="store_true", help="also time a second start with warm compiler caches")
    add_peers(parser)
    parser.add_argument("--table", nargs="*", type=Path, help="print the tables of these results and exit")
    arguments = parser.parse_args(argv)
    turns = arguments.device == "cpu" and not arguments.sequential
    arguments.block = arguments.block or (5 if turns else arguments.steps)
    for subject in arguments.subject.split(","):
        if subject not in SUBJECTS:
            parser.error(f"--subject {subject}: unknown; choose from {', '.join(SUBJECTS)}")
    if arguments.block and arguments.steps % arguments.block:
        parser.error(f"--steps {arguments.steps}: not a multiple of --block {arguments.block}")
    return arguments


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Adds the options of subjects."""
    parser.add_argument("--python", action="append", default=[], metavar="SUBJECT=PYTHON")
    parser.add_argument("--path", action="append", default=[], metavar="SUBJECT=FOLDER")
    parser.add_argument("--option", action="append", default=[], metavar="SUBJECT.ROW:KEY=VALUE")
    parser.add_argument("--timeout", type=float, default=1800, help="time limit of a subject, in seconds")


def options_of_rows(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Returns the subjects' own options by row."""
    options: dict[str, dict[str, str]] = {}
    for item in arguments.option:
        row, _, change = item.partition(":")
        key, _, value = change.partition("=")
        options.setdefault(row, {})[key] = value
    return options


class Subject:
    """The process of one row, which runs in turns."""

    def __init__(
        self, task: Task, folder: Path, arguments: argparse.Namespace, variables: Mapping[str, str] = {}
    ) -> None:
        """`arguments` are those of `add_peers`."""
        python, path = (
            dict(item.split("=", 1) for item in items).get(task.subject) for items in (arguments.python, arguments.path)
        )
        self.waiting = False
        self.task = replace(task, started=time.time(), result_file=str(folder / "result.json"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(self.task)))
        Path(self.task.result_file).unlink(missing_ok=True)
        self.log = folder / "log.txt"
        visible = variables.get("CUDA_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        own = {
            "CUDA_VISIBLE_DEVICES": visible.partition(",")[
                0
            ],  # of several GPUs, the Trainer of transformers would use all
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
        environment = os.environ | variables
        environment |= own | {
            "PYTHONPATH": os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT), path)))
        }
        self.process = subprocess.Popen(
            [python or sys.executable, "-m", f"benchmarks.subjects.{task.subject}", str(folder / "task.json")],
            cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"),
        )  # fmt: skip
        self.watchdog = threading.Timer(arguments.timeout, self.process.kill)
        self.watchdog.daemon = True
        self.watchdog.start()

    def turn(self) -> bool:
        """Runs the process until it waits for its next turn or ends. Returns whether it waits."""
        assert self.process.stdin and self.process.stdout
        if self.waiting:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.strip() in ("ready", "done"):
                self.waiting = line.strip() == "ready"
                return self.waiting
        return False

    def result(self) -> dict[str, Any]:
        """Returns the raw result, or the end of the log of a failed process. The row of a peer that is not installed, or that does
        not support the task, is skipped."""
        self.process.wait()
        self.watchdog.cancel()
        file = Path(self.task.result_file)
        if file.exists():
            return json.loads(file.read_text())
        text = self.log.read_text()
        last = text.rstrip().rpartition("\n")[2]
        found = {"failed": text[-2000:]}
        if self.task.subject in OURS:
            return found
        absent = last.startswith("ModuleNotFoundError: ") or self.process.returncode == UNSUPPORTED
        return found | ({"skipped": last} if absent else {})


def synthetic_tokens(count: int, vocab_size: int) -> np.ndarray:
    """Returns learnable token ids: skewed frequencies, and a likely successor for each token."""
    random = np.random.default_rng(0)
    tokens = (vocab_size * random.random(count) ** 4).astype(np.uint32)
    follower = random.permutation(vocab_size).astype(np.uint32)
    follows = random.random(count) < 0.6
    for index in np.flatnonzero(follows[1:]) + 1:
        tokens[index] = follower[tokens[index - 1]]
    return tokens


def prepare(model: Model, task: Task, *, with_weights: bool) -> None:
    """Writes the shared batches, which titanlike generates in its own run, and initial weights."""
    import torch

    from titanlike.data.batches.loader import BatchLoader
    from titanlike.data.batches.packed_dataset import PackedDataset, ShuffledMixture
    from titanlike.data.tokens.arrays import InMemoryTokens
    from titanlike.models.common.init import initialize
    from titanlike.models.registry import build_model

    config = config_of(model)
    if with_weights:
        with torch.device("meta"):
            network = build_model(config)
        initialize(network, torch.device("cpu"), task.seed)
        torch.save(network.state_dict(), task.weights_file)
    steps = task.warmup + task.steps + 1
    tokens = synthetic_tokens(steps * task.batch_size * task.seq_len + 1, config.vocab_size)
    np.save(task.tokens_file, tokens)
    batches = BatchLoader(
        ShuffledMixture([PackedDataset(InMemoryTokens(tokens), task.seq_len)], seed=task.seed, global_batch_size=task.batch_size),
        global_batch_size=task.batch_size, local_batch_size=task.batch_size,
        data_rank=0, num_data_ranks=1, seed=task.seed, device=torch.device("cpu"),
    )  # fmt: skip
    all_steps = np.empty((steps, task.batch_size, task.seq_len + 1), np.uint32)
    for step in range(1, steps + 1):
        (batch,) = batches.microbatches(step)
        all_steps[step - 1, :, :-1] = batch.inputs["tokens"]
        all_steps[step - 1, :, -1] = batch.labels[:, -1]
    np.save(task.batches_file, all_steps)


def matmul_rate(model: Model, device: str, precision: str) -> float:
    """Returns the FLOP/s of the model's matmuls in bfloat16 or float32, forward and backward, each measured at its shape."""
    import torch

    from titanlike.tools.planning.measure import Timer

    config, rows = config_of(model), model.micro_batch_size * model.seq_len
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    timer = Timer(torch.device(device), 5.0)
    matrices = [*config.block_matrices().values()] * config.num_layers + [(config.vocab_size, config.dim)]
    seconds = dict.fromkeys(matrices, 0.0)
    for outputs, inputs in seconds:
        x, weight, gradient = (
            torch.randn(*shape, device=device, dtype=dtype)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        for left, right in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
            call = partial(torch.matmul, left, right)
            seconds[outputs, inputs] += timer.medians(lambda _, call=call: call, [1], 1.0)[1]
    flops = sum(6 * rows * outputs * inputs for outputs, inputs in matrices)
    return flops / sum(seconds[matrix] for matrix in matrices)


def take_turns(tasks: dict[str, Task], start: Callable[[str, Task], Subject]) -> dict[str, dict[str, Any]]:
    """Starts and warms up the subjects sequentially, then runs blocks of steps in turns. Returns the raw results."""
    running, results = {}, {}
    for row, task in tasks.items():
        print(f"{row} ...", end=" ", flush=True, file=sys.stderr)
        subject = start(row, task)
        if subject.turn():
            running[row] = subject
        else:
            results[row] = subject.result()
        print("failed" if "failed" in results.get(row, ()) else "ready", file=sys.stderr)
    order = list(running)
    while running:
        for row in order:
            if row in running and not running[row].turn():
                results[row] = running.pop(row).result()
        order = order[1:] + order[:1]  # vary the order of turns
    return {row: results[row] for row in tasks}


def measure(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs every row. Calls `save` with the results so far after each."""
    model = MODELS[arguments.model]
    options = options_of_rows(arguments)
    take_turns_on_cpu = arguments.device == "cpu" and not arguments.sequential
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # workers of a compiler may still write
        folder = Path(name)

        def start(row: str, task: Task) -> Subject:
            return Subject(task, folder / row, arguments)

        task = model.task(
            folder, arguments.micro_batch, device=arguments.device, precision=arguments.precision, warmup=arguments.warmup,
            steps=arguments.steps, block=arguments.block,
        )  # fmt: skip
        prepare(model, task, with_weights=set(arguments.subject.split(",")) != {"titanlike"})
        tasks = {
            f"{subject}.{row}": replace(task, subject=subject, row=row, options=options.get(f"{subject}.{row}", {}))
            for subject in arguments.subject.split(",")
            for row in arguments.rows.split(",")
        }
        result = facts() | {
            "model": arguments.model, "device": arguments.device, "precision": arguments.precision,
            "tokens_per_step": model.batch_size * model.seq_len,
            "warmup": task.warmup, "steps": task.steps, "block": task.block, "options": options,
            "matmul_flops_per_second": matmul_rate(model, arguments.device, arguments.precision),
        }  # fmt: skip
        results: dict[str, Any] = {}

        def save_figures() -> dict[str, Any]:
            rows = {row: figures(one, results, result) for row, one in results.items()}
            save(result | {"rows": rows})
            return result | {"rows": rows}

        if take_turns_on_cpu:
            results |= take_turns(tasks, start)
            save_figures()
            for row, task in tasks.items() if arguments.warm_start else ():
                again = take_turns({row: replace(task, steps=0)}, start)[row]
                results[row]["warm_seconds_to_second_step"] = again.get("seconds_to_second_step")
        else:
            for row in (*tasks, *(() if arguments.once else reversed(tasks))):
                if "failed" in results.get(row, ()):
                    continue
                single = take_turns({row: tasks[row]}, start)[row]
                if row in results:  # the second run starts with warm compiler caches
                    results[row]["blocks"] += single.get("blocks", [])
                    results[row]["warm_seconds_to_second_step"] = single.get("seconds_to_second_step")
                else:
                    results[row] = single
                save_figures()
        return save_figures()


def main() -> None:
    """Measures, or prints the tables of existing results."""
    arguments = parse_arguments()
    if arguments.table is None:
        result = measure(arguments, partial(write, arguments.out))
        failed = {row: one["failed"] for row, one in result["rows"].items() if "failed" in one and "skipped" not in one}
        for row, reason in failed.items():
            print(f"\n{row} failed:\n{reason}", file=sys.stderr)
        print(table([result]))
        sys.exit(bool(failed))
    else:
        print(table([json.loads(path.read_text()) for path in arguments.table]))


if __name__ == "__main__":
    main()
