"""Checks a machine before it is measured: driver, collectives, attention kernels, float8 matmuls, FlexAttention.

    python -m benchmarks.sanity --device cuda --out sanity.json

Each check is independent, and compares with a reference in float64. Exits with 1 if one of them fails.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlike.distributed.autograd_collectives import all_gather_no_grad, reduce_scatter_no_grad
from titanlike.metrics.hardware import device_name, peak_flops
from titanlike.models.common.document_mask import block_mask_attention, document_block_mask, document_dense_mask
from titanlike.models.common.layers import ATTENTION_BACKENDS, attention_backend
from titanlike.tools.null_gpu.values import compare_values

NOT_ON_CPU = ("cudnn", "efficient")  # attention kernels
TOLERANCE = 2e-2  # of bfloat16 results, relative to the largest element


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected element."""
    expected = expected.double()
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def require(error: float, limit: float) -> dict[str, float]:
    """Returns the error. Raises if it is above the limit, or not a number."""
    with compare_values():
        assert error <= limit, f"relative error {error:.2g}, more than {limit:.2g}"
    return {"relative_error": error}


def require_finite_gradients(*tensors: Tensor) -> None:
    """Raises if a tensor has no gradient, or one with NaN or infinity."""
    for x in tensors:
        assert x.grad is not None
        with compare_values():
            assert x.grad.isfinite().all()


def check_driver(device: torch.device) -> dict[str, Any]:
    """Records the device and the versions."""
    found: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv"]
        if shutil.which(query[0]):  # not in all containers
            found["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found["capability"] = torch.cuda.get_device_capability(device)
        found["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = torch.cuda.nccl.version()
    found["peak_tflops"] = (peak_flops(device_name(device)) or 0) / 1e12 or None
    return found


def check_collectives(device: torch.device) -> dict[str, Any]:
    """All collectives of a training step, in a group of one rank."""
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        x, world = torch.arange(1024.0, device=device), cast(dist.ProcessGroup, dist.group.WORLD)
        reduced = x.clone()
        dist.all_reduce(reduced)
        dist.barrier()
        for found in (all_gather_no_grad(x, 0, world), reduce_scatter_no_grad(x, 0, world), reduced):
            assert found.shape == x.shape
            with compare_values():
                assert torch.equal(found, x)
    finally:
        dist.destroy_process_group()
    return {}


def check_matmul(device: torch.device) -> dict[str, Any]:
    """A bfloat16 matmul."""
    a, b = (torch.randn(256, 256, device=device) for _ in "ab")
    return require(relative_error(a.bfloat16() @ b.bfloat16(), a.double() @ b.double()), TOLERANCE)


def check_float8_matmul(device: torch.device) -> dict[str, Any]:
    """A float8 matmul with scales, against the product of its rounded inputs."""
    a, b = (torch.randn(256, 256, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    one = torch.ones((), device=device)
    found = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda")
    return require(relative_error(found, a.double() @ b.double().t()), TOLERANCE)


def attention_inputs(device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Returns queries, keys and values with grouped heads, and the reference output in float64."""
    q, k, v = (torch.randn(2, heads, 256, 64, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2))
    with attention_backend("math"):
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    return [x.requires_grad_() for x in (q, k, v)], expected


def check_attention(device: torch.device, name: str) -> dict[str, Any]:
    """Forward and backward of an attention kernel."""
    (q, k, v), expected = attention_inputs(device)
    if name == "efficient":  # does not support grouped heads
        k, v = (x.detach().repeat_interleave(4, dim=1).requires_grad_() for x in (k, v))
    with attention_backend(name):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        out.sum().backward()
    require_finite_gradients(q, k, v)
    return require(relative_error(out, expected), TOLERANCE)


def check_flex_attention(device: torch.device) -> dict[str, Any]:
    """FlexAttention with the block mask of documents; the backward pass on a GPU only."""
    (q, k, v), _ = attention_inputs(device)
    ids = (torch.arange(256, device=device) // 100).expand(2, -1)
    positions = torch.arange(256, device=device)
    mask, dense = (make(positions, positions, ids, ids) for make in (document_block_mask, document_dense_mask))
    with attention_backend("math"):
        exact = [x.detach().double() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*exact, attn_mask=dense, enable_gqa=True)
    if device.type == "cpu":  # there is no backward pass
        q, k, v = (x.detach() for x in (q, k, v))
    out = block_mask_attention(q, k, v, mask)
    if device.type == "cuda":
        out.sum().backward()
        require_finite_gradients(q, k, v)
    return require(relative_error(out, expected), TOLERANCE)


def check_compile(device: torch.device) -> dict[str, Any]:
    """torch.compile: forward and backward of a small function."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    function = torch.compile(lambda x: F.silu(x @ x).sum(), fullgraph=True)
    (gradient,) = torch.autograd.grad(function(x), x)
    (expected,) = torch.autograd.grad(F.silu(x @ x).sum(), x)
    return require(relative_error(gradient, expected), 1e-2)  # TF32 is allowed


def checks(device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns all checks by name."""
    kernels = [name for name in ATTENTION_BACKENDS if device.type == "cuda" or name not in NOT_ON_CPU]
    return {
        "driver": lambda: check_driver(device),
        "collectives": lambda: check_collectives(device),
        "matmul": lambda: check_matmul(device),
        "float8 matmul": lambda: check_float8_matmul(device),
        **{f"attention {name}": lambda name=name: check_attention(device, name) for name in kernels},
        "compile": lambda: check_compile(device),
        "flex attention": lambda: check_flex_attention(device),
    }


def main() -> None:
    """Runs the checks, prints each result at once, and writes all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for name, check in checks(device).items():
        start = time.perf_counter()
        try:
            results[name] = {"ok": True, **check()}
        except Exception as error:  # noqa: BLE001  one broken kernel must not hide the others
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}", "stack": traceback.format_exc()}
        results[name]["seconds"] = time.perf_counter() - start
        print(f"{name}: {'ok' if results[name]['ok'] else results[name]['error']}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
