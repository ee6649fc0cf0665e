"""Measures FSDP on one device against the casts that replace it there: time of a step and peak memory, alternating.

    python -m benchmarks.one_gpu_fsdp --device cuda --model llama3_1b --out one_gpu_fsdp.json
    OMP_NUM_THREADS=1 python -m benchmarks.one_gpu_fsdp --device cpu --model cpu_6m --compile none --out one_gpu_fsdp.json

With one process, `parallelize` applies no FSDP: weights are cast to `training.compute_dtype` where they are used. Each row is a
process that trains with one of the two.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.models import MODELS, config_of
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Training
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.metrics.hardware import device_name
from titanlike.models.common.init import initialize
from titanlike.models.common.layers import set_loss
from titanlike.models.registry import blocks, build_model
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.compile import apply_compile
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.mixed_precision import apply_mixed_precision
from titanlike.parallelize import fsdp_units

ROOT = Path(__file__).parents[1]
ROWS = ("cast", "fsdp")


def train(row: str, model_name: str, device: str, steps: int, warmup: int, compile_mode: str) -> dict[str, float]:
    """Trains in this process. Returns the median time of a step, the peak memory and the last loss."""
    spec = MODELS[model_name]
    config = config_of(spec)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.device("meta"):
        model = build_model(config)
    # In chunks, as in a recipe: logits of all tokens in float32 do not fit beside a 1B model.
    set_loss(model, CrossEntropy(chunk=Training().loss_chunk, backend="inductor" if compile_mode == "block" else ""))
    if compile_mode == "block":
        apply_compile(blocks(model))
    if row == "fsdp":
        apply_fsdp(
            model, build_mesh(device).fsdp, units=fsdp_units(model), gradient_reduction="sum", cast_forward_inputs=False,
            compute_dtype=torch.bfloat16,
        )  # fmt: skip
    else:
        apply_mixed_precision(model, torch.bfloat16, cast_forward_inputs=False)
    initialize(model, torch.device(device), 0)
    optimizer = build_optimizer(model, Optimizer(lr=spec.lr), 0)
    shape = spec.micro_batch_size, spec.seq_len + 1
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    # On a CPU, the time of its cores, which other processes do not change.
    clock = time.perf_counter if device == "cuda" else time.process_time
    times, value = [], 0.0
    for _ in range(warmup + steps):
        start = clock()
        loss = model(tokens=tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    dist.destroy_process_group()
    return {"seconds": statistics.median(times[warmup:]), "memory_gib": peak / 2**30, "loss": value}


def main() -> None:
    """Runs the rows in turn, and writes their medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--model", choices=MODELS, default="llama3_1b")
    parser.add_argument("--compile", choices=["block", "none"], default="block")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row", choices=ROWS, help="run one row in this process")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.row:
        found = train(
            arguments.row, arguments.model, arguments.device, arguments.steps, arguments.warmup, arguments.compile
        )
        print(json.dumps(found))
        return
    rounds: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    for _ in range(arguments.rounds):
        for row in ROWS:
            command = [sys.executable, "-m", "benchmarks.one_gpu_fsdp", *sys.argv[1:], "--row", row]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            rounds[row].append(json.loads(done.stdout.splitlines()[-1]))
    cast, fsdp = ({key: statistics.median(each[key] for each in rounds[row]) for key in rounds[row][0]} for row in ROWS)
    results = {
        "command": f"python -m benchmarks.one_gpu_fsdp {' '.join(sys.argv[1:])}",
        "device": device_name(torch.device(arguments.device)),
        "torch": torch.__version__,
        "cast": cast,
        "fsdp": fsdp,
        "fsdp_relative_to_cast": {key: fsdp[key] / cast[key] for key in ("seconds", "memory_gib")},
        "loss_difference": abs(fsdp["loss"] - cast["loss"]),
    }
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
