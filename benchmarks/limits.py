"""What this machine can do at most, at a model's own shapes, and from that the least time that a token can take.

    python -m benchmarks.limits --model llama3_1b --device cuda --out limits.json

Measured: products in float32 (on a CPU), bfloat16 and float8, of each matrix of a block and of the head, forward and backward;
attention, forward and backward, by each kernel that this machine has; the speed of a copy. The floor of a token is the sum of
its products and its attention, each at its own best rate, and of the weights that the optimizer has to read and write: nothing
between them, nothing that waits. No program reaches it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.models import MODELS, Model, shape_of
from titanlike.config.model_configs import GPTConfig, LlamaConfig
from titanlike.metrics.hardware import device_name, peak_flops
from titanlike.models.layers import ATTENTION_BACKENDS, attention_backend


def seconds(work: Callable[[], Any], device: str, times: int = 7) -> float:
    """Median time of a call, after two that are not counted."""
    found = []
    for _ in range(times + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def product(tokens: int, outputs: int, inputs: int, kind: str, device: str) -> float:
    """Seconds of the three products of a matrix: its result, its input's gradient, its own gradient."""
    if kind == "float8":
        one = torch.ones((), device=device)

        def scaled(rows: int, inner: int, columns: int, dtype: torch.dtype) -> Callable[[], Any]:
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn).t()
            return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        calls = (
            scaled(tokens, inputs, outputs, torch.float8_e4m3fn),
            scaled(tokens, outputs, inputs, torch.float8_e5m2),
            scaled(outputs, tokens, inputs, torch.float8_e5m2),
        )
        return sum(seconds(call, device) for call in calls)
    dtype = getattr(torch, kind)
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    gradient = torch.randn(tokens, outputs, device=device, dtype=dtype)
    plain = (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return sum(seconds(call, device) for call in plain)


def attention(
    shape: LlamaConfig | GPTConfig, batch: int, length: int, kind: str, device: str
) -> dict[str, float | None]:
    """Seconds of one layer's attention, forward and backward, by kernel; None where the kernel cannot."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    kv_heads = getattr(shape, "num_kv_heads", shape.num_heads)
    q, k, v = (
        torch.randn(batch, heads, length, shape.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (shape.num_heads, kv_heads, kv_heads)
    )

    def both() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != shape.num_heads)
        torch.autograd.grad(out, (q, k, v), out)

    found: dict[str, float | None] = {}
    for name in ATTENTION_BACKENDS:
        if name == "math" and length > 2048:
            continue  # it holds all pairs of tokens
        try:
            with attention_backend(name):
                found[name] = seconds(both, device)
        except RuntimeError:
            found[name] = None
    return found


def copy_rate(device: str) -> float:
    """Bytes read and written a second, by a copy much larger than any cache."""
    place = torch.empty(2**28 if device == "cuda" else 2**25, device=device)
    other = torch.empty_like(place)
    return 2 * place.numel() * 4 / seconds(lambda: other.copy_(place), device)


def measure(model: Model, device: str, kinds: list[str]) -> dict[str, Any]:
    """All limits, and the floor for each kind of product."""
    shape, tokens = shape_of(model), model.micro_batch_size * model.seq_len
    bytes_per_second = copy_rate(device)
    result: dict[str, Any] = {
        "device": device_name(torch.device(device)), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "model_shape": model.shape, "tokens": tokens, "copy_bytes_per_second": bytes_per_second, "kinds": {},
    }  # fmt: skip
    for kind in kinds:
        products = {}
        for name, (outputs, inputs) in (shape.block_matrices() | {"output": (shape.vocab_size, shape.dim)}).items():
            kind_here = "bfloat16" if kind == "float8" and name == "output" else kind  # the head stays
            took = product(tokens, outputs, inputs, kind_here, device)
            products[name] = {"seconds": took, "flops_per_second": 6 * tokens * outputs * inputs / took}
        by_kernel = attention(shape, model.micro_batch_size, model.seq_len, kind, device)
        best = min(value for value in by_kernel.values() if value is not None)
        blocks = sum(one["seconds"] for name, one in products.items() if name != "output")
        # Gradient, weight and both averages read, weight and averages written, in float32; once a step.
        optimizer = 7 * 4 * shape.num_parameters() / bytes_per_second
        least = shape.num_layers * (blocks + best) + products["output"]["seconds"]
        total = 6 * shape.num_matmul_parameters() * tokens
        took = shape.num_layers * blocks + products["output"]["seconds"]
        result["kinds"][kind] = {
            "products": products,
            "products_flops_per_second": total / took,
            "attention_seconds": by_kernel,
            "optimizer_seconds": optimizer,
            "floor_seconds_per_token": (least + optimizer * model.micro_batch_size / model.batch_size) / tokens,
        }
    return result


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="cpu_6m")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kinds", help="float32, bfloat16, float8")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    kinds = (arguments.kinds or ("bfloat16,float8" if arguments.device == "cuda" else "float32,bfloat16")).split(",")
    found = {"model": arguments.model, **measure(model, arguments.device, kinds)}
    peak = peak_flops(found["device"])
    for kind, one in found["kinds"].items():
        rate = one["products_flops_per_second"]
        print(
            f"{arguments.model} {kind}: products {rate / 1e12:.3g} TFLOP/s"
            + (f" ({rate / peak:.0%} of the data sheet's bfloat16)" if peak else "")
            + f", at most {1 / one['floor_seconds_per_token']:,.0f} tokens/s; attention, ms: "
            + ", ".join(f"{k} {1e3 * v:.2f}" if v else f"{k} cannot" for k, v in one["attention_seconds"].items())
        )
    print(f"copy {found['copy_bytes_per_second'] / 1e9:.3g} GB/s")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
