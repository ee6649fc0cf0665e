"""Measures the cost of default observability as a share of a step of the debug recipe, with on and off interleaved in one run.

    python benchmarks/observability.py [--steps 300] [--device cpu]

The run alternates between blocks of ten steps, each with one record: observed by everything that is on by default and Prometheus;
not observed; and observed with statistics of all parameters in one step of the block. The result is the median over all blocks of
each kind, in benchmarks/results/observability.json.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 10  # steps, the default of metrics.interval
KINDS = ("off", "on", "layers")


def main() -> None:
    """Trains, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/observability.json")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp()
    sys.argv = [
        str(ROOT / "recipes/pretrain.py"), str(ROOT / "train_configs/debug.toml"), f"--training.steps={arguments.steps}",
        f"--run.dir={folder}", f"--run.device={arguments.device}", "--validation.interval=0", "--checkpoint.enabled=false",
        "--sample.tokens=0", "--metrics.interval=10", f"--metrics.layer_interval={BLOCK}", "--run.name=run",
        "--metrics.prometheus=127.0.0.1:9499",
    ]  # fmt: skip
    sys.path.insert(0, str(ROOT))
    from titanlike.recipe import PretrainRecipe
    from titanlike.run.start import start

    recipe = start(PretrainRecipe)
    from recipes import pretrain
    from titanlike.run import run

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}  # CPU seconds per step of all threads
    inside: dict[str, list[float]] = {kind: [] for kind in KINDS}  # the monitor's calls in the training thread

    class Monitor(run.Monitor):
        """Starts a block of another kind every ten steps."""

        began = 0.0
        cpu_began = 0.0
        spent = 0.0

        def kind(self, step: int) -> str:
            return KINDS[(step - 1) // BLOCK % len(KINDS)]

        def step(self, step: int, **values: Any) -> None:
            start = time.perf_counter()
            if self.kind(step) != "off":
                super().step(step, **values)
            now = time.perf_counter()
            self.spent += now - start
            if step % BLOCK == 0:
                if step > len(KINDS) * BLOCK:  # the first blocks warm up
                    seconds[self.kind(step)].append((now - self.began) / BLOCK)
                    cpu[self.kind(step)].append((time.process_time() - self.cpu_began) / BLOCK)
                    inside[self.kind(step)].append(self.spent / BLOCK)
                self.began, self.cpu_began, self.spent = time.perf_counter(), time.process_time(), 0.0

        @contextmanager
        def model_statistics(self, step: int, model: Any) -> Any:
            if self.kind(step) != "layers":
                yield
                return
            start = time.perf_counter()
            manager = super().model_statistics(step, model)
            manager.__enter__()
            self.spent += time.perf_counter() - start
            yield
            start = time.perf_counter()
            manager.__exit__(None, None, None)
            self.spent += time.perf_counter() - start

    run.Monitor = Monitor  # type: ignore[misc]
    pretrain.main(recipe)
    step = statistics.median(seconds["off"])
    result = {
        "command": "python benchmarks/observability.py", "steps": arguments.steps, "block": BLOCK,
        "device": arguments.device, "machine": platform.machine(), "load_average": os.getloadavg()[0],
        "seconds_per_step": {kind: statistics.median(values) for kind, values in seconds.items()},
        "monitor_share": {kind: statistics.median(values) / step for kind, values in inside.items()},
        "step_ratio": {kind: statistics.median(values) / step for kind, values in seconds.items()},
        "cpu_ratio": {kind: statistics.median(values) / statistics.median(cpu["off"]) for kind, values in cpu.items()},
        "profiling_off_share": seconds_of_profiling_off(arguments.device) / step, "blocks": seconds, "cpu_blocks": cpu,
    }  # fmt: skip
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {name: result[name] for name in result if not name.endswith("blocks")},
            indent=1,
        )
    )


def seconds_of_profiling_off(device: str, number: int = 100_000) -> float:
    """Returns what a step spends on a profiler that traces nothing: its call and the annotation of the data wait."""
    import torch
    from torch.profiler import record_function

    from titanlike.config.sections import Profiling
    from titanlike.metrics.profiler import Profiler

    profiler = Profiler(Profiling(), Path(), torch.device(device))
    start = time.perf_counter()
    for step in range(number):
        profiler.step(step)
        with record_function("data wait"):
            pass
    return (time.perf_counter() - start) / number


if __name__ == "__main__":
    main()
