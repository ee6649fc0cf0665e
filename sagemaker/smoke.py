"""A test of one instance before a large job: driver, GPUs, EFA, and the bandwidth of all-reduce.

SMOKE_GPUS and SMOKE_EFA set what is expected. `entry.py` then trains 20 steps of the recipe.
"""

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta

MEBIBYTES = (1, 16, 256)
ROUNDS = 10


def main() -> int:
    """Checks the instance, then starts one measuring process per GPU. Returns the exit code."""
    gpus = _output_lines("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    for line in gpus or ["no GPU, or no driver"]:
        print(f"smoke: {line}", flush=True)
    expected = int(os.environ.get("SMOKE_GPUS", "0"))
    if len(gpus) < expected:
        return _fail(f"found {len(gpus)} GPUs, expected {expected}; the image may lack GPU support")
    if os.environ.get("SMOKE_EFA"):
        devices = [line for line in _output_lines("fi_info", "-p", "efa") if line.startswith("provider: efa")]
        print(f"smoke: {len(devices)} EFA endpoints", flush=True)
        if not devices:
            return _fail("fi_info finds no EFA; the image lacks it, or the instance type does not support it")
    processes = int(os.environ.get("NPROC", "0")) or max(1, len(gpus))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        __file__,
    ]
    return subprocess.run([*torchrun, "--measure"], check=False).returncode


def measure() -> None:
    """Measures the duration and bus bandwidth of all-reduce, as one of several processes."""
    import torch
    import torch.distributed as dist

    rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    world_size = dist.get_world_size()
    for size in MEBIBYTES:
        values = torch.ones(size * 2**20 // 2, dtype=torch.bfloat16, device=device)
        seconds = []
        for _ in range(ROUNDS + 2):
            values.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        assert values[0].item() == values[-1].item() == world_size, "wrong result of all-reduce"
        median = sorted(seconds[2:])[ROUNDS // 2]  # the first rounds establish connections
        bandwidth = size * 2**20 * 2 * (world_size - 1) / world_size / median / 1e9
        if rank == 0:
            result = f"{median * 1e3:.2f} ms, {bandwidth:.1f} GB/s"
            print(f"smoke: all-reduce of {size} MiB over {world_size}: {result}", flush=True)
    dist.destroy_process_group()


def _output_lines(program: str, *arguments: str) -> list[str]:
    if not shutil.which(program):
        return []
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _fail(error: str) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    else:
        sys.exit(main())
