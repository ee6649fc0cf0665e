"""Profiles training steps of a benchmark model: the kernels that take the time, how long the GPU is idle, and a trace.

    python -m benchmarks.profile_step --model llama3_1b --device cuda --out profile.json

Writes the table to `--out`, and the trace beside it, for Perfetto or chrome://tracing.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.protocol import Task
from benchmarks.subjects.titanlike import recipe_of

WARMUP, STEPS = 4, 2
NUM_KERNELS = 30


def profile(task: Task, trace: Path) -> dict[str, Any]:
    """Trains with the recipe of `task`. Returns the table of the profiled steps."""
    folder = tempfile.mkdtemp()
    recipe = recipe_of(task, folder)  # before torch is imported, like the recipe does

    import torch
    from torch.profiler import ProfilerActivity, profile

    from recipes import pretrain
    from titanlike.run.run_dir import RunDirectory

    on_gpu = task.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = profile(activities=activities)
    original = pretrain.BatchLoader.microbatches

    def microbatches(self: Any, step: int) -> Any:
        if step in (WARMUP + 1, WARMUP + STEPS + 1):
            if on_gpu:
                torch.cuda.synchronize()
            (profiler.start if step == WARMUP + 1 else profiler.stop)()
        return original(self, step)

    pretrain.BatchLoader.microbatches = microbatches  # type: ignore[method-assign]
    with RunDirectory(recipe).session() as (device, watchdog):
        pretrain.main(recipe, device, watchdog)
    profiler.export_chrome_trace(str(trace))
    events = profiler.key_averages()
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    ranked = sorted(events, key=lambda event: getattr(event, kind), reverse=True)
    total = sum(getattr(event, kind) for event in events)
    seconds = [
        record["step_seconds"] for record in steps_of(Path(folder, "run/metrics.jsonl"))[WARMUP : WARMUP + STEPS]
    ]
    return {
        "model": task.model, "device": task.device, "precision": task.precision, "steps": STEPS, "step_seconds": seconds,
        "busy_seconds_per_step": total / 1e6 / STEPS,
        "kernels": [
            {"name": event.key, "calls": event.count, "seconds_per_step": getattr(event, kind) / 1e6 / STEPS}
            for event in ranked[:NUM_KERNELS]
        ],
    }  # fmt: skip


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Returns the records of all training steps."""
    return [record for record in map(json.loads, metrics.read_text().splitlines()) if "loss" in record]


def main() -> None:
    """Profiles one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama3_1b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--precision", choices=["bfloat16", "float8"], default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    task = Task(
        subject="titanlike", row="best", model=model.config, device=arguments.device, precision=arguments.precision,
        seq_len=model.seq_len, batch_size=model.batch_size, micro_batch_size=model.micro_batch_size,
        warmup=WARMUP, steps=STEPS, block=STEPS, lr=model.lr, batches_file="", weights_file="", tokens_file="",
        options={"metrics.interval": "1"} | ({} if arguments.device == "cuda" else {"compile.backend": "eager"}),
    )  # fmt: skip
    result = profile(task, arguments.out.with_suffix(".trace.json.gz"))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['busy_seconds_per_step']:.4f} of {result['step_seconds'][-1]:.4f} s a step busy")
    for kernel in result["kernels"][:10]:
        print(f"  {1e3 * kernel['seconds_per_step']:9.3f} ms  {kernel['calls']:6}  {kernel['name'][:100]}")


if __name__ == "__main__":
    main()
