"""A look at one machine before many are paid for: the driver, the GPUs, EFA, and how fast the GPUs add up what they have.

What it wants to find stands in SMOKE_GPUS and SMOKE_EFA. Twenty steps of the recipe follow it (sagemaker/entry.py).
"""

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta

MEGABYTES = (1, 16, 256)
ROUNDS = 10


def main() -> int:
    """Look at the machine, then start a process for each GPU that measures. Returns the exit code."""
    wanted, processes = int(os.environ.get("SMOKE_GPUS", "0")), int(os.environ.get("NPROC", "0"))
    gpus = _lines("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    for line in gpus or ["no GPU, or no driver of one"]:
        print(f"smoke: {line}", flush=True)
    if len(gpus) < wanted:
        return _refuse(f"{len(gpus)} GPUs are there, and {wanted} were to be; is the image one for GPUs?")
    if os.environ.get("SMOKE_EFA"):
        devices = [line for line in _lines("fi_info", "-p", "efa") if line.startswith("provider: efa")]
        print(f"smoke: EFA has {len(devices)} ways out of this machine", flush=True)
        if not devices:
            return _refuse(
                "EFA is not there: fi_info finds none; the image lacks it, or the machine is of another kind"
            )
    count = processes or max(1, len(gpus))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    return subprocess.run([*torchrun, "--measure"], check=False).returncode


def measure() -> None:
    """One process of several: the time that an all-reduce takes, and the bytes a second that each link then moves."""
    import torch
    import torch.distributed as dist

    rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    world = dist.get_world_size()
    for size in MEGABYTES:
        values = torch.ones(size * 2**20 // 2, dtype=torch.bfloat16, device=device)
        seconds = []
        for _ in range(ROUNDS + 2):
            values.fill_(1.0)
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(values)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        assert values[0].item() == values[-1].item() == world, "an all-reduce that does not add up"
        middle = sorted(seconds[2:])[ROUNDS // 2]  # the first ones set up connections
        moved = size * 2**20 * 2 * (world - 1) / world / middle / 1e9
        if rank == 0:
            print(f"smoke: all-reduce of {size} MiB over {world}: {middle * 1e3:.2f} ms, {moved:.1f} GB/s", flush=True)
    dist.destroy_process_group()


def _lines(program: str, *words: str) -> list[str]:
    if not shutil.which(program):
        return []
    said = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return [line.strip() for line in said.stdout.splitlines() if line.strip()] if said.returncode == 0 else []


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    else:
        sys.exit(main())
