"""What each program asks of its collaborators, with which arguments and when.

Each program trains a tiny model in this process while the calls of checkpoints, guard, monitor, watchdog, shutdown, data and others
are recorded: in one start; in parts, which a failure to save and a signal end; and again from an earlier checkpoint.
"""

import gc
import inspect
import io
import json
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.checkpoints import assert_equal_state
from tests.launching import ROOT, records
from titanlike.checkpoint import CheckpointManager
from titanlike.checkpoint.loader import read_whole
from titanlike.data.batches import openers
from titanlike.data.batches.dataloaders import build_dataloaders
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.distributed import environment, process_group
from titanlike.distributed.graceful_shutdown import GracefulShutdown
from titanlike.distributed.watchdog import Watchdog
from titanlike.inference.evaluator import Evaluator
from titanlike.interop.weights import load_initial
from titanlike.losses import IGNORE
from titanlike.metrics import Measured, Monitor, monitor, profiler
from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.optim import NonFiniteGuard, build_optimizer, clip_gradients, gradient_norms, learning_rate
from titanlike.optim.clipping import unscale_gradients
from titanlike.optim.non_finite import LossScale
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run import preferences, run_dir
from titanlike.run.changes import check_resume
from titanlike.run.loop import GarbageCollector, sum_over_data
from titanlike.run.run_dir import RunDirectory
from titanlike.run.start import start as start_program
from titanlike.utils.rng import seed_generators

STEPS, SEED, SKIPPED, OVERFLOW = 9, 3, 2, 5
# Intervals, of which none but the third divides the last step.
DUE = {"validation": 2, "save": 2, "sample": 3, "evaluation": 6}
COMMON: dict[str, Any] = {
    "run.seed": SEED, "run.device": "cpu", "run.dir": "runs", "data.source": "synthetic", "data.prefetch": 3,
    "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.vocab_size": 320,
    "training.steps": STEPS, "training.seq_len": 16, "training.global_batch_size": 4, "training.local_batch_size": 2,
    "training.compute_dtype": "float16", "training.matmul_precision": "high", "training.attention": "math",
    "training.max_norm": 0.01, "training.non_finite": "skip", "training.skip_limit": 1,
    "optimizer.lr": 1e-2, "schedule.warmup_steps": 2, "compile.mode": "none",
    "validation.interval": DUE["validation"], "validation.batches": 1, "checkpoint.interval": DUE["save"],
    "checkpoint.keep": STEPS, "metrics.trackers": "[]", "metrics.interval": 1, "profiling.steps": "[2]",
}  # fmt: skip
DECODER = {
    "model.name": "gpt", "model.dropout": 0.1, "sample.tokens": 2, "sample.interval": DUE["sample"], "sample.prompt": "a",
    "evaluation.interval": DUE["evaluation"], "evaluation.data": '["text.txt"]',
}  # fmt: skip
CHATS = {"data.source": "chat", "data.path": "chats.jsonl", "training.seq_len": 48}
TEACHER = {
    "teacher.dim": 16, "teacher.num_layers": 1, "teacher.num_heads": 2, "teacher.num_kv_heads": 1, "teacher.ffn_dim": 16,
    "teacher.vocab_size": 320, "distillation.teacher": "random",
}  # fmt: skip
PROGRAMS: dict[str, dict[str, Any]] = {
    "pretrain": DECODER,
    "finetune": DECODER | CHATS,
    "dpo": DECODER | CHATS | {"data.source": "preference", "data.path": "pairs.jsonl", "training.seq_len": 96},
    "distill": DECODER | CHATS | TEACHER,
    "mlm": {"model.name": "bert", "model.dropout": 0.1, "model.ffn_dim": 16},
    "seq2seq": {
        "model.name": "t5", "model.num_layers": 2, "model.num_encoder_layers": 1, "model.ffn_dim": 16,
        "training.attention": "auto",
    },
}  # fmt: skip
LORA = ("finetune", "dpo", "distill")
METHODS: dict[Any, tuple[str, ...]] = {
    CheckpointManager: ("find", "load", "register", "archive_after", "save", "poll", "wait", "__exit__"),
    Watchdog: ("step", "pause", "finish"),
    Monitor: ("__init__", "data_wait", "exclude_from_throughput", "model_statistics", "step", "validation", "evaluation",
              "record_saves", "__exit__"),
    NonFiniteGuard: ("__init__", "should_step", "flush"),
    GracefulShutdown: ("__enter__", "exchange", "result", "request", "__exit__"),
    GarbageCollector: ("__enter__", "step", "__exit__"),
    Evaluator: ("__init__", "__call__", "last_sample"),
    BatchLoader: ("prefetch", "microbatches", "first_batches", "position"),
    RunDirectory: ("__init__", "open", "export", "completion_message"),
}  # fmt: skip
FUNCTIONS = (
    build_mesh, build_tokenizer, build_dataloaders, build_model, parallelize, initialize, build_optimizer, seed_generators,
    load_initial, check_resume, gradient_norms, clip_gradients, unscale_gradients, process_group.announce,
    process_group.broadcast_object, sum_over_data, start_program,
)  # fmt: skip
LAYOUT = {"expert": 2, "cpu_offload": True}  # what programs pass on, and one process does not have
# Seconds of a clock that only these calls advance.
SECONDS = {
    "BatchLoader.microbatches": 1.0, "optimizer.step": 4.0, "CheckpointManager.save": 1000.0, "BatchLoader.first_batches": 100.0,
    "Evaluator.__call__": 100.0,
}  # fmt: skip


def due(name: str) -> list[int]:
    """Returns the steps at which something is due: at an interval, and at the last step."""
    return [step for step in range(1, STEPS + 1) if step % DUE[name] == 0 or step == STEPS]


@dataclass
class Call:
    name: str
    arguments: dict[str, Any]
    step: int  # of the watchdog
    during: list[tuple[str, Any]]  # contexts that are open, each with its last argument
    result: Any = None


@dataclass(eq=False)
class Start:
    """A start of a program, and what it called. Calls of recorded functions within each other are not recorded."""

    faults: dict[int, str] = field(default_factory=dict)  # the loss or the gradients of these steps are not finite
    fails_after: int = 0  # step, after which saves have failed
    signal_at: int = 0  # step
    code: Any = None
    output: str = ""
    calls: list[Call] = field(default_factory=list)
    clock: float = 0.0
    step: int = 0
    depth: int = 0
    during: list[tuple[str, Any]] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def __getitem__(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def one(self, name: str) -> Call:
        (call,) = self[name]
        return call

    @property
    def recipe(self) -> Any:
        return self["RunDirectory.__init__"][-1].arguments["recipe"]

    @property
    def model(self) -> Any:
        return self["parallelize"][0].result

    @property
    def optimizer(self) -> Any:
        return self.one("build_optimizer").result

    def spied(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        is_context = inspect.isgeneratorfunction(inspect.unwrap(function)) and name != "BatchLoader.first_batches"

        @contextmanager
        def opened(context: Any, call: Call) -> Iterator[Any]:
            with context as value:
                self.during.append((name, list(call.arguments.values())[-1]))
                try:
                    yield value
                finally:
                    self.during.pop()

        @wraps(function)
        def spy(*arguments: Any, **keywords: Any) -> Any:
            if self.depth or threading.get_ident() != self.thread:
                return function(*arguments, **keywords)
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            call = Call(name, bound.arguments, self.step, [*self.during])
            self.calls.append(call)
            self.before(call)
            self.depth += 1
            try:
                call.result = function(*bound.args, **bound.kwargs)
            finally:
                self.depth -= 1
            self.after(call)
            return opened(call.result, call) if is_context else call.result

        return spy

    def before(self, call: Call) -> None:
        self.clock += SECONDS.get(call.name, 0.0)
        found = call.arguments
        if call.name == "Watchdog.step":
            self.step = call.step = found["step"]
            if self.step == self.signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
        elif call.name == "NonFiniteGuard.should_step":
            value = found["loss"].detach().clone()
            call.arguments = found | {"loss": value, "norm": found["norms"].total.item()}
            fault = self.faults.get(self.step)
            if fault == "loss":
                found["loss"], found["local_loss"] = (torch.full_like(value, torch.nan) for _ in range(2))
            elif fault == "gradients":
                norms = found["norms"]
                found["norms"] = norms._replace(total=norms.total * torch.inf, parts=norms.parts * torch.inf)
        elif call.name == "optimizer.step":
            optimizer, model = self.one("build_optimizer").result, self.one("build_optimizer").arguments["model"]
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            call.arguments = {
                "norm": torch.stack([each.float().square().sum() for each in gradients]).sum().sqrt().item(),
                "lr": {group["lr"] for group in optimizer.param_groups},
                "settings": (
                    torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled(), gc.isenabled(),
                    signal.getsignal(signal.SIGTERM) != signal.SIG_DFL,
                ),
            }  # fmt: skip
        elif call.name == "build_mesh":
            call.arguments, found["expert"] = {**found}, 1
        elif call.name == "parallelize":
            call.arguments = {**found}
            found["parallelism"] = replace(found["parallelism"], cpu_offload=False)
        elif call.name == "Monitor.step":
            call.arguments = found | {"loss": found["loss"].item(), "grad_norm": found["grad_norm"].item()}

    def after(self, call: Call) -> None:
        if call.name == "build_optimizer":
            optimizer: Any = call.result
            if self.recipe.checkpoint.enabled:  # not each has some
                optimizer.metrics = {"of_optimizer": torch.tensor(7.0)}
            for name in ("step", "zero_grad"):
                setattr(optimizer, name, self.spied(f"optimizer.{name}", _method(getattr(optimizer, name))))
        elif call.name == "build_dataloaders":
            source = call.result.training.source
            source.load_position = self.spied("source.load_position", lambda position: None)
        elif call.name == "start":
            object.__setattr__(call.result, "parallelism", replace(call.result.parallelism, **LAYOUT))
        elif call.name == "BatchLoader.position":
            call.result = [["position", self.step]]

    def has_failed(self, checkpoints: CheckpointManager) -> bool:
        return bool(self.step) and self.step == self.fails_after

    def run(self, program: str, *words: str) -> "Start":
        """Runs the program as `python program.py words` does, and keeps its exit code."""
        start = self
        path = str(ROOT / f"recipes/{program}.py")

        class Profiler:
            """In the place of torch's, which takes a second."""

            def __init__(self, section: Any, run: Path, device: torch.device, pause: Any) -> None:
                start.calls.append(Call("Profiler", {"section": section, "run": run, "device": device}, 0, []))
                self.pause = pause

            def step(self, step: int) -> None:
                start.calls.append(Call("Profiler.step", {"step": step}, step, [*start.during]))
                with self.pause("starting the profiler"):
                    start.clock += 100.0

            def __enter__(self) -> "Profiler":
                return self

            def __exit__(self, *error: object) -> None:
                start.calls.append(Call("Profiler.__exit__", {}, start.step, []))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        with ExitStack() as stack:
            for number in numbers:
                stack.callback(signal.signal, number, signal.getsignal(number))
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            replaced: list[tuple[Any, str, Any]] = [
                (sys, "argv", [path, *words]), (sys, "path", [*sys.path]), (os, "fsync", lambda _: None),
                (run_dir, "_git", lambda *_: None), (monitor, "time", SimpleNamespace(perf_counter=lambda: self.clock)),
                (TransformerConfig, "num_mtp_layers", False),  # 0, and not the default of what gets it
                (profiler, "Profiler", Profiler), (CheckpointManager, "has_failed", property(self.has_failed)),
            ]  # fmt: skip
            for kind, names in METHODS.items():
                label = kind.__name__
                replaced += [(kind, name, self.spied(f"{label}.{name}", getattr(kind, name))) for name in names]
            for owner, name, value in replaced:
                stack.enter_context(patch.object(owner, name, value))
            spies = {function: self.spied(function.__name__, function) for function in FUNCTIONS}
            _replace(spies)
            stack.callback(_replace, {spy: function for function, spy in spies.items()})
            stack.enter_context(patch.dict(os.environ, {environment.BATCH_RECORD: "batches"}))
            output = stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(output))
            try:
                runpy.run_path(path, run_name="__main__")
                self.code = 0
            except SystemExit as end:
                self.code = end.code
            self.output = output.getvalue()
        return self


def _replace(functions: Mapping[Any, Any]) -> None:
    """Replaces functions wherever they are imported."""
    for module in [each for name, each in sys.modules.items() if name.startswith(("titanlike", "recipes"))]:
        for name, value in [*vars(module).items()]:
            if inspect.isfunction(value) and value in functions:
                setattr(module, name, functions[value])


def _method(bound: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function without the signature that torch's wrappers hide."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return bound(*arguments, **keywords)

    return call


class Runs:
    """The starts of one program, which share a folder."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.evaluates = "evaluation.data" in PROGRAMS[program]
        (folder / "recipe.toml").write_text(f'program = "{program}"\n')
        (folder / "text.txt").write_text("some text " * 10)
        (folder / "batches").mkdir()
        for name, answer in (("chats", {"completion": "two"}), ("pairs", {"chosen": "two", "rejected": "three"})):
            lines = [json.dumps({"prompt": f"What is {number}?"} | answer) for number in range(100)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        faults = {SKIPPED: "loss", OVERFLOW: "gradients"}
        self.whole = self.start("whole", {"checkpoint.export": "float32"}, faults=faults)
        self.failed = self.start("parts", code=129, faults=faults, fails_after=3)
        self.signalled = self.start("parts", code=143, faults=faults, signal_at=6)
        self.last = self.start("parts", faults=faults)
        self.states = [read_whole(folder / f"runs/{name}/checkpoints/step-{STEPS:08d}") for name in ("whole", "parts")]
        self.lines = {name: records(folder / "runs" / name) for name in ("whole", "parts")}
        # From the step after which a sample and an evaluation were recorded.
        options: dict[str, Any] = {"validation.interval": 1, "checkpoint.resume_from": 6}
        options |= {"evaluation.limit": 1} if self.evaluates else {}
        self.again = self.start("whole", options, code=2, faults={7: "loss"})
        options = {"checkpoint.initial": "runs/whole", "checkpoint.enabled": False, "training.steps": 2}
        options |= {"checkpoint.allow_changed": '["data.path"]'}
        options |= {
            "validation.interval": 0,
            "validation.batches": None,
            "sample.tokens": 0 if self.evaluates else None,
        }
        options |= {"sample.interval": None, "sample.prompt": None}
        options |= {"model.dropout": 0} if "model.dropout" in PROGRAMS[program] else {}
        options |= {"lora.rank": 2} if program in LORA else {}
        self.initial = self.start("initial", options)

    def start(self, name: str, options: dict[str, Any] | None = None, *, code: int = 0, **disturbed: Any) -> Start:
        """Runs the program with these options besides its own. Those that are None are left out."""
        values = COMMON | PROGRAMS[self.program] | {"run.name": name} | (options or {})
        words = [f"--{key}={value}" for key, value in values.items() if value is not None]
        start = Start(**disturbed).run(self.program, "recipe.toml", *words)
        assert start.code == code, start.output
        return start

    def measured(self, step: int) -> list[str]:
        """Returns what is called after a step to measure what is due."""
        names = ["BatchLoader.first_batches", "Monitor.validation"] if step in due("validation") else []
        evaluates = self.evaluates and step in due("sample") + due("evaluation")
        return names + (["Evaluator.__call__", "Monitor.evaluation"] if evaluates else [])

    def loop(self, steps: range, *, stops: bool) -> list[str]:
        """Returns what is called from the first step to the end of the loop."""
        names = []
        for step in steps:
            names += ["Watchdog.step", "Profiler.step", "BatchLoader.microbatches", "GracefulShutdown.exchange"]
            names += ["sum_over_data", "unscale_gradients", "gradient_norms", "NonFiniteGuard.should_step"]
            names += [] if step in (SKIPPED, OVERFLOW) else ["clip_gradients", "optimizer.step"]
            names += ["optimizer.zero_grad", "Monitor.step", "GracefulShutdown.result"]
            is_last = stops and step == steps[-1]
            names += [] if is_last else self.measured(step)
            if step in due("save"):
                names += ["NonFiniteGuard.flush", "BatchLoader.position", "CheckpointManager.save"]
            names += ["CheckpointManager.poll", "Monitor.record_saves"]
            names += [] if is_last else ["GarbageCollector.step"]
        names += ["Watchdog.finish", "NonFiniteGuard.flush", "CheckpointManager.wait", "CheckpointManager.poll"]
        names += ["Monitor.record_saves", "GarbageCollector.__exit__", "GracefulShutdown.__exit__", "Profiler.__exit__"]
        return [*names, "CheckpointManager.__exit__", "Monitor.__exit__"]


def called(start: Start) -> list[str]:
    """Returns what a start called from the beginning of the loop on. `during` of these calls has the contexts that are left out."""
    omitted = ["Monitor.exclude_from_throughput", "Watchdog.pause", "Monitor.data_wait", "Monitor.model_statistics"]
    omitted += ["broadcast_object", "GracefulShutdown.request"]
    calls = start.calls[[call.name for call in start.calls].index("BatchLoader.prefetch") + 1 :]
    return [
        call.name for call in calls
        if call.name not in omitted
        and not (call.name == "BatchLoader.microbatches" and call.during[-1][0] == "Watchdog.pause")
    ]  # fmt: skip


def assert_called(call: Call, **expected: Any) -> None:
    """Asserts that arguments are these."""
    for name, value in expected.items():
        assert call.arguments[name] is value or call.arguments[name] == value, f"{name} of {call.name}"


@pytest.fixture(scope="module", params=PROGRAMS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder := tmp_path_factory.mktemp(request.param))
        yield Runs(request.param, folder)


def test_what_each_step_calls(runs: Runs) -> None:
    sample = ["Evaluator.last_sample"] if runs.evaluates else []
    end = ["RunDirectory.export", *sample, "RunDirectory.completion_message"]
    assert called(runs.whole) == runs.loop(range(1, STEPS + 1), stops=False) + end
    assert called(runs.failed) == runs.loop(range(1, 5), stops=True)
    # What was due when the run was stopped is measured now.
    assert called(runs.signalled) == runs.measured(4) + runs.loop(range(5, 7), stops=True)
    assert called(runs.last) == runs.measured(6) + runs.loop(range(7, STEPS + 1), stops=False) + end
    assert called(runs.again)[:2] == ["Watchdog.step", "Profiler.step"]  # nothing is measured again
    starts = (runs.whole, runs.failed, runs.signalled, runs.last)
    requests = [
        [(call.step, call.arguments["number"]) for call in start["GracefulShutdown.request"]] for start in starts
    ]
    assert requests == [[], [(3, 1)], [(6, signal.SIGTERM)], []]


def test_what_a_program_builds(runs: Runs) -> None:
    """Also with values of the keys with which the first start cannot tell a wrong condition."""
    for start in (runs.whole, runs.initial):
        recipe, training, model, cpu = start.recipe, start.recipe.training, start.model, torch.device("cpu")
        names = ("build_mesh", "build_tokenizer", "build_dataloaders")
        mesh, tokenizer, data = (start.one(name).result for name in names)
        layout, folder = recipe.parallelism, Path(recipe.run.dir, recipe.run.name)
        assert_called(start.one("build_mesh"), device_type="cpu", **layout.dimensions(), expert=LAYOUT["expert"])
        initial = recipe.checkpoint.initial
        assert_called(start.one("build_tokenizer"), section=recipe.tokenizer, model_vocab_size=320, weights=initial)
        assert_called(
            start.one("build_dataloaders"), section=recipe.data, training=training, tokenizer=tokenizer, seed=SEED,
            validate=start is runs.whole, dropout=start is runs.whole and runs.program != "seq2seq", data_rank=0,
            num_data_ranks=1, vocab_size=320, device=cpu,
        )  # fmt: skip
        assert (start.one("build_dataloaders").arguments["num_next_tokens"] is False) == (
            runs.program in ("pretrain", "finetune")
        )
        opener, expected = start.one("build_dataloaders").arguments["open_sources"], openers.of(recipe)
        assert getattr(opener, "func", opener) is getattr(expected, "func", expected)
        assert getattr(opener, "keywords", {}) == getattr(expected, "keywords", {})
        if runs.evaluates:
            evaluator = start.one("Evaluator.__init__")
            assert_called(
                evaluator, section=recipe.evaluation, sample=recipe.sample, data=recipe.data, training=training,
                config=recipe.model, tokenizer=tokenizer, seed=SEED,
            )  # fmt: skip
            assert (evaluator.arguments["template"] is None) == (runs.program == "pretrain")
        assert_called(start["build_model"][0], config=recipe.model)
        assert_called(
            start["parallelize"][0], model=start["build_model"][0].result, mesh=mesh, split=[recipe.model.num_layers],
            training=training, parallelism=layout, float8=recipe.float8, lora=recipe.lora if runs.program in LORA else None,
            activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile, loss=None,
            loss_reduction="none" if runs.program == "dpo" else "sum", static_shapes=runs.program == "distill",
        )  # fmt: skip
        assert_called(start["initialize"][0], model=model, device=cpu, seed=SEED, offload=True)
        assert_called(start.one("build_optimizer"), model=model, section=recipe.optimizer, seed=SEED)
        assert_called(start.one("CheckpointManager.register"), model=model, optimizer=start.optimizer)
        assert_called(start.one("seed_generators"), seed=SEED)
        assert_called(start.one("RunDirectory.open"), device=cpu, resumed_step=0)
        assert_called(
            start.one("Monitor.__init__"), folder=folder, device=cpu, num_devices=1, first_step=1, num_steps=training.steps,
            num_tokens=training.num_tokens, flops_per_token=recipe.flops_per_token, section=recipe.metrics,
            recipe=run_dir.recipe_as_json(recipe),
        )  # fmt: skip
        assert_called(start.one("NonFiniteGuard.__init__"), training=training)
        assert_called(start.one("Profiler"), section=recipe.profiling, run=folder, device=cpu)
        texts = [f"reading data: {recipe.data.source}", f"building the model: {recipe.model.label()}"]
        assert [call.arguments["activity"] for call in start["announce"]][:2] == texts
        assert data.training.source.describe(training.steps) in start.output


def test_each_step_computes_with_what_it_read(runs: Runs) -> None:
    names = ["sum_over_data", "unscale_gradients", "gradient_norms", "NonFiniteGuard.should_step"]
    for start in (runs.whole, runs.failed, runs.signalled, runs.last):
        recipe, model, mesh = start.recipe, start.model, start.one("build_mesh").result
        updates = {call.step: call for call in start["optimizer.step"]}
        read = [call for call in start["BatchLoader.microbatches"] if call.during[-1][0] == "Monitor.data_wait"]
        steps = [call.step for call in start["Watchdog.step"]]
        assert_called(start.one("BatchLoader.prefetch"), num_batches=3, first_step=steps[0], last_step=STEPS)
        for step, batches, total, unscaled, norms, guard, record in zip(
            steps, read, *(start[name] for name in (*names, "Monitor.step")), strict=True
        ):
            batch = batches.result
            labels = [(one.labels != IGNORE).sum() for one in batch]
            assert len(batch) == 2
            assert_called(batches, step=step)
            count = preferences.num_pairs(batch) if runs.program == "dpo" else sum(labels)
            assert_called(total, count=count, mesh=mesh)
            assert_called(unscaled, model=model, loss_scale=LossScale.INITIAL / (1 if step <= OVERFLOW else 2))
            assert_called(norms, model=model, pipeline=mesh.pipeline)
            assert_called(guard, step=step, count=total.result, norms=norms.result)
            assert guard.during == [("BatchLoader.prefetch", STEPS), ("Monitor.model_statistics", model)]
            loss, norm = guard.arguments["loss"].item(), guard.arguments["norm"]
            assert guard.arguments["local_loss"].item() == pytest.approx(loss) and 0.1 < loss < 10
            lr = learning_rate(step, STEPS, recipe.optimizer.lr, recipe.schedule)
            assert_called(record, step=step, loss=loss, grad_norm=norm, lr=lr)
            found = record.arguments["others"]
            assert found["loss_scale"].item() == LossScale.INITIAL / (1 if step < OVERFLOW else 2)
            assert "of_optimizer" in found
            assert {"dpo": "rewards/margins", "distill": "kl"}.get(runs.program, "loss_scale") in found
            if step in updates:
                update = updates[step].arguments
                assert update["norm"] == pytest.approx(min(norm, recipe.training.max_norm), rel=1e-3)
                assert norm > 2 * recipe.training.max_norm and update["lr"] == {lr}
                assert update["settings"] == ("high", runs.program == "seq2seq", False, True)
        for call in (*start["Watchdog.step"], *start["Profiler.step"], *start["Monitor.model_statistics"]):
            assert_called(call, step=call.step)


def test_what_is_measured_and_saved(runs: Runs) -> None:
    for start in (runs.whole, runs.failed, runs.signalled, runs.last):
        recipe, model, data = start.recipe, start.model, start.one("build_dataloaders").result
        saves, mesh = start["CheckpointManager.save"], start.one("build_mesh").result
        for name, activity, paused in (
            ("CheckpointManager.save", "saving", None), ("BatchLoader.first_batches", "validating", model),
            ("Evaluator.__call__", "evaluating", model),
        ):  # fmt: skip
            contexts = [("Monitor.exclude_from_throughput", activity), ("Watchdog.pause", paused)]
            for call in start[name]:
                assert call.during == [("BatchLoader.prefetch", STEPS), *contexts]
        for call in start["BatchLoader.first_batches"]:
            assert_called(call, self=data.validation, limit=1)
            assert not data.validation.dropout_bits
        for call in (*start["Evaluator.__call__"], *start["Evaluator.last_sample"]):
            assert_called(call, model=model, mesh=mesh)
        for call in saves:
            waits = call is saves[-1] and start in (runs.failed, runs.signalled)
            assert_called(call, model=model, optimizer=start.optimizer, wait=waits, others={})
            found = call.arguments["metadata"]
            assert (found.step, found.tokens) == (call.step, recipe.training.num_tokens(call.step))
            assert found.position == [["position", call.step]] and found.recipe == run_dir.recipe_as_json(recipe)
            assert found.skipped == [SKIPPED]
            assert found.loss_scale[0] == LossScale.INITIAL / (1 if call.step < OVERFLOW else 2)
            assert (found.data, found.tokenizer) == (data.fingerprint, start.one("build_tokenizer").result.fingerprint)
            assert (found.layout, found.machine["device"]) == (mesh.sizes, "cpu")
        for polled, recorded in zip(start["CheckpointManager.poll"], start["Monitor.record_saves"], strict=True):
            assert recorded.arguments["results"] is polled.result
        assert_called(start.one("CheckpointManager.wait"), last=True)
    # What `titanlike verify` compares.
    assert {path.stem for path in (runs.folder / "batches").iterdir()} == {"training", "validation"}
    assert not runs.initial["CheckpointManager.save"] and "weights not saved" in runs.initial.output


def test_what_is_recorded(runs: Runs) -> None:
    """Throughput counts the wait for data and the steps, and nothing else. The parts of a run have the records of the whole."""
    whole = {line["step"]: line for line in runs.lines["whole"] if "loss" in line}
    assert [*whole] == list(range(1, STEPS + 1))
    tokens = runs.whole.recipe.training.tokens_per_step
    for step, line in whole.items():
        wait = SECONDS["BatchLoader.microbatches"]
        seconds = wait + (0.0 if step in (SKIPPED, OVERFLOW) else SECONDS["optimizer.step"])
        measured = [line[name] for name in ("step_seconds", "data_wait", "tokens_per_second", "tokens")]
        assert measured == pytest.approx([seconds, wait / seconds, tokens / seconds, tokens * step]), step
    names = {"validation_loss": "validation", "save_seconds": "save"}
    names |= {"sample": "sample", "evaluation/text/loss": "evaluation"} if runs.evaluates else {}
    recorded = {name: due(kind) for name, kind in names.items()} | {"skipped": [SKIPPED, OVERFLOW]}
    assert ("validation_accuracy" in str(runs.lines)) == (runs.program in ("mlm", "dpo"))
    times = re.compile("seconds|wait|per_second|tflops|memory|save_|mfu|spike")
    found = []
    for lines in runs.lines.values():
        assert {name: [line["step"] for line in lines if name in line] for name in recorded} == recorded
        values = [
            (line["step"], name, value) for line in lines for name, value in line.items() if not times.search(name)
        ]
        found.append(sorted(values, key=str))
    assert found[1] == found[0]
    assert_equal_state(runs.states[1], runs.states[0])


def test_how_a_run_stops_and_resumes(runs: Runs) -> None:
    sample = [f"sample after {STEPS} steps:"] if runs.evaluates else []
    limit = "the loss is nan on rank 0. It would be skip number 2 in the last 100 steps (steps 2,"
    for start, texts in (
        (runs.whole, ["model   ", "data    ", *sample, "done: runs/whole", "best    validation loss"]),
        (runs.failed, ["stopped by SIGHUP; to resume from step 4"]),  # the number of the request
        (runs.signalled, ["resumed at step 4", "stopped by SIGTERM; to resume from step 6"]),
        (runs.last, ["resumed at step 6", *sample, "done: runs/parts"]),
        (runs.again, ["resumed at step 6", f"step 7: {limit}"]),
        (runs.initial, ["starting from the weights of runs/whole"]),
    ):
        assert [text for text in texts if text not in start.output] == []
    assert_called(runs.whole.one("RunDirectory.completion_message"), device=torch.device("cpu"))
    assert isinstance(runs.whole.one("RunDirectory.completion_message").arguments["measured"], Measured)
    exported = [path.name for path in (runs.folder / "runs/whole/hf").iterdir()]
    assert "config.json" in exported and ("chat_template.jinja" in exported) == (runs.program in LORA)
    resumed = {runs.signalled: (4, 0), runs.last: (6, 0), runs.again: (6, 6)}
    for start, (step, asked) in resumed.items():
        found = start.one("CheckpointManager.find")
        saved = found.result
        assert_called(found, step=asked)
        assert saved.step == step
        assert_called(start.one("check_resume"), saved=saved, recipe=start.recipe)
        assert start.one("check_resume").arguments["now"].data == saved.data
        assert_called(
            start.one("CheckpointManager.load"), model=start.model, optimizer=start.optimizer, metadata=saved, others={}
        )
        assert_called(start.one("source.load_position"), position=[["position", step]])
        assert_called(start.one("RunDirectory.open"), resumed_step=step)
        assert_called(start.one("CheckpointManager.archive_after"), step=step)
        assert_called(start.one("Monitor.__init__"), first_step=step + 1)
        assert_called(start.one("build_dataloaders"), validate=True)
        assert_called(start.one("NonFiniteGuard.__init__"), skipped=[SKIPPED], loss_scale=saved.loss_scale)
        names = [call.name for call in start.calls]
        in_order = ["CheckpointManager.register", "CheckpointManager.load", "RunDirectory.open"]
        in_order = ["check_resume", "build_model", *in_order]
        assert sorted(in_order, key=names.index) == in_order


def test_a_run_starts_from_given_weights(runs: Runs) -> None:
    names = [call.name for call in runs.initial.calls]
    assert names.index("build_optimizer") < names.index("seed_generators") < names.index("RunDirectory.open")
    loaded = runs.initial["load_initial"][-1]
    config = runs.initial.recipe.model
    assert_called(loaded, model=runs.initial.model, initial="runs/whole", config=config, allow_changed=("data.path",))
    assert not any(start["load_initial"] for start in (runs.whole, runs.failed, runs.signalled, runs.last))
