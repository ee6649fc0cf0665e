"""What every subject of `benchmarks/run.py` shares: the task it is given, the batches, and the clock that it is timed by.

No titanlike in here: a subject brings its own model, its own loss and its own optimizer. A subject is a program,

    python benchmarks/subjects/plain.py TASK.json

that builds its model from the task, takes `task.weights` as its first weights, trains on `task.batch(step)` for the steps
1, 2, 3 ..., and after each step calls `clock.step(loss)`. The clock ends the process when it has seen enough.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """One row of the table: what to train, and how. Read from the file that `benchmarks/run.py` writes."""

    subject: str
    row: str  # "shipped": as its makers run it; "best": as fast as its options make it
    model: dict[str, Any]  # titanlike's names: name, dim, num_layers, num_heads, num_kv_heads, ffn_dim, vocab_size, ...
    device: str  # "cpu" or "cuda"
    precision: (
        str  # "float32", "bfloat16" (weights and optimizer in float32), or "float8" (the same, products in float8)
    )
    seq_len: int
    batch_size: int  # sequences in a step
    micro_batch_size: int  # sequences in a pass through the model
    warmup: int  # steps before the timed ones
    steps: int  # timed steps
    block: int  # steps between two looks at the clock, and between two turns of the subjects
    batches_file: str  # (steps, sequences, seq_len + 1): each sequence's tokens, and one more for the last label
    weights_file: str  # first weights by titanlike's names, as torch saves them
    tokens_file: str  # the whole stream of tokens, for a subject that makes the same batches of it by itself
    result_file: str = ""
    started: float = 0.0  # when the process was started, by time.time()
    lr: float = 1e-3  # of AdamW, the same at every step
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0
    options: dict[str, str] = field(default_factory=dict)  # what this row changes, in the subject's own words

    @classmethod
    def read(cls) -> "Task":
        """The task that the command line names."""
        return cls(**json.loads(Path(sys.argv[1]).read_text()))

    @cached_property
    def _batches(self) -> Any:
        return np.load(self.batches_file, mmap_mode="r")

    @property
    def num_microbatches(self) -> int:
        return self.batch_size // self.micro_batch_size

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and labels (micro_batch_size, seq_len) of each micro-batch of a step, counted from 1."""
        sequences = torch.from_numpy(self._batches[step - 1].astype(np.int64))
        if self.device == "cuda":
            sequences = sequences.pin_memory().to("cuda", non_blocking=True)
        return [
            (part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in sequences.split(self.micro_batch_size)
        ]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """First weights by titanlike's names, in float32: (outputs, inputs) each, as torch.nn.Linear has them."""
        return torch.load(self.weights_file, mmap=True, weights_only=True)


class Clock:
    """Times the steps of a subject, waits for its turn between blocks of them, and writes what it saw."""

    def __init__(self, task: Task, packages: tuple[str, ...] = ()) -> None:
        """`packages` are those whose versions belong beside the figures."""
        self.task = task
        self.packages = packages
        self.steps = 0
        self.losses: list[Tensor] = []
        self.found: dict[str, Any] = {"blocks": []}
        self.turn_started = 0.0

    def step(self, loss: Tensor) -> None:
        """A step is done; its loss is the mean over the step's tokens, before the step. The host does not wait for it."""
        task = self.task
        self.steps += 1
        self.losses.append(loss.detach())
        if self.steps == 2:
            self._wait()
            self.found["seconds_to_second_step"] = time.time() - task.started
            if task.steps == 0:
                self._finish()
        timed = self.steps - task.warmup
        if timed >= 0 and timed % task.block == 0:
            self._wait()
            if timed:
                self.found["blocks"].append(time.perf_counter() - self.turn_started)
            if timed == task.steps:
                self._finish()
            print("ready", flush=True)  # ends a turn; the next line of the input starts another
            if not sys.stdin.readline():
                os._exit(1)  # whoever gave the turns is gone
            self.turn_started = time.perf_counter()

    def _wait(self) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()

    def _finish(self) -> NoReturn:
        if self.task.device == "cuda":
            memory = torch.cuda.max_memory_allocated() / 2**30
            name = torch.cuda.get_device_name()
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            name = "cpu"
        self.found |= {
            "peak_memory_gib": memory,
            "losses": [float(loss) for loss in self.losses],
            "versions": {name: importlib.metadata.version(name) for name in ("torch", *self.packages)},
            "threads": torch.get_num_threads(),
            "device": name,
        }
        Path(self.task.result_file).write_text(json.dumps(self.found))
        print("done", flush=True)
        os._exit(0)  # whatever the subject would go on with is no part of this
