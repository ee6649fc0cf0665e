"""Profiles training steps of a benchmark model: where their time goes, the kernels that take it, and a trace.

    python -m benchmarks.profile_step --model llama3_1b --device cuda --out profile.json

`titanlike profile` does the same for a recipe. Writes the trace beside `--out`.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.protocol import Task
from benchmarks.subjects.titanlike import recipe_of

WARMUP, STEPS = 4, 2


def profile(task: Task, trace: Path) -> dict[str, Any]:
    """Trains with the recipe of `task`. Returns the profile of its last steps."""
    folder = tempfile.mkdtemp()
    recipe = recipe_of(task, folder)  # before torch is imported, like the recipe does

    from recipes import pretrain
    from titanlike.run.run_dir import RunDirectory
    from titanlike.tools.trace import read_profile, traces

    pretrain.main(recipe)
    (path,) = traces(RunDirectory(recipe).path).values()
    found = read_profile(path)
    shutil.move(path, trace)
    return {"model": task.model, "device": task.device, "precision": task.precision, **asdict(found)}


def main() -> None:
    """Profiles one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama3_1b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--precision", choices=["bfloat16", "float8"], default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    options = {"metrics.interval": "1", "profiling.steps": f"[{WARMUP + 1}]", "profiling.num_steps": str(STEPS)}
    task = Task(
        subject="titanlike", row="best", model=model.config, device=arguments.device, precision=arguments.precision,
        seq_len=model.seq_len, batch_size=model.batch_size, micro_batch_size=model.micro_batch_size,
        warmup=WARMUP, steps=STEPS, block=STEPS, lr=model.lr, batches_file="", weights_file="", tokens_file="",
        options=options | ({} if arguments.device == "cuda" else {"compile.backend": "eager"}),
    )  # fmt: skip
    result = profile(task, arguments.out.with_suffix(".trace.json.gz"))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, seconds in sorted(result["parts"].items(), key=lambda part: -part[1]):
        print(f"{1e3 * seconds:10.3f} ms  {seconds / result['seconds']:6.1%}  {name}")


if __name__ == "__main__":
    main()
