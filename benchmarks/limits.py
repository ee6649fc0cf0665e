"""Measures the machine's rates at a model's shapes, and from them a lower bound on the time per token (roofline).

    python -m benchmarks.limits --model llama3_1b --device cuda --out limits.json

Measures the matmuls of each matrix, forward and backward, in float32 (on a CPU), bfloat16 and float8; attention, forward and
backward, with each kernel; and the bandwidth of a copy. The roofline time is the sum of the matmuls and of the fastest attention
kernel at these rates, and of the memory traffic of the optimizer. It excludes everything else, so no program reaches it.
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

from benchmarks.models import MODELS, Model, config_of
from titanlike.metrics.hardware import device_name, peak_flops
from titanlike.models.common.layers import ATTENTION_BACKENDS, attention_backend
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LlamaConfig


def seconds(function: Callable[[], Any], device: str, repeats: int = 7) -> float:
    """Returns the median time of a call, after two warm-up calls."""
    found = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def matmul(tokens: int, outputs: int, inputs: int, kind: str, device: str) -> float:
    """Returns the seconds of a linear layer's three matmuls: output, input gradient, weight gradient."""
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
    config: LlamaConfig | GPTConfig, batch: int, length: int, kind: str, device: str
) -> dict[str, float | None]:
    """Returns the seconds of one layer's attention, forward and backward, by kernel; None where it is not supported."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    kv_heads = config.num_kv_heads
    q, k, v = (
        torch.randn(batch, heads, length, config.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (config.num_heads, kv_heads, kv_heads)
    )

    def forward_backward() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != config.num_heads)
        torch.autograd.grad(out, (q, k, v), out)

    found: dict[str, float | None] = {}
    for name in ATTENTION_BACKENDS:
        if name == "math" and length > 2048:
            continue  # its memory is quadratic in the sequence length
        try:
            with attention_backend(name):
                found[name] = seconds(forward_backward, device)
        except RuntimeError:
            found[name] = None
    return found


def copy_rate(device: str) -> float:
    """Returns the bytes read and written per second by a copy that is much larger than any cache."""
    source = torch.empty(2**28 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), device)


def measure(model: Model, device: str, kinds: list[str]) -> dict[str, Any]:
    """Measures all rates, and computes the roofline time for each precision."""
    config, tokens = config_of(model), model.micro_batch_size * model.seq_len
    bytes_per_second = copy_rate(device)
    result: dict[str, Any] = {
        "device": device_name(torch.device(device)), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "model_config": model.config, "tokens": tokens, "copy_bytes_per_second": bytes_per_second, "kinds": {},
    }  # fmt: skip
    for kind in kinds:
        matmuls = {}
        for name, (outputs, inputs) in (config.block_matrices() | {"output": (config.vocab_size, config.dim)}).items():
            precision = "bfloat16" if kind == "float8" and name == "output" else kind  # the head is not converted
            took = matmul(tokens, outputs, inputs, precision, device)
            matmuls[name] = {"seconds": took, "flops_per_second": 6 * tokens * outputs * inputs / took}
        by_kernel = attention(config, model.micro_batch_size, model.seq_len, kind, device)
        best = min(value for value in by_kernel.values() if value is not None)
        blocks = sum(one["seconds"] for name, one in matmuls.items() if name != "output")
        # Reads gradient, weight and both moments, writes weight and moments, in float32; once a step.
        optimizer = 7 * 4 * config.num_parameters() / bytes_per_second
        forward_backward = config.num_layers * (blocks + best) + matmuls["output"]["seconds"]
        total = 6 * config.num_matmul_parameters() * tokens
        took = config.num_layers * blocks + matmuls["output"]["seconds"]
        result["kinds"][kind] = {
            "matmuls": matmuls,
            "matmul_flops_per_second": total / took,
            "attention_seconds": by_kernel,
            "optimizer_seconds": optimizer,
            "roofline_seconds_per_token": (forward_backward + optimizer * model.micro_batch_size / model.batch_size)
            / tokens,
        }
    return result


def main() -> None:
    """Measures, prints and writes the results."""
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
        rate = one["matmul_flops_per_second"]
        print(
            f"{arguments.model} {kind}: matmuls {rate / 1e12:.3g} TFLOP/s"
            + (f" ({rate / peak:.0%} of the bfloat16 peak)" if peak else "")
            + f", at most {1 / one['roofline_seconds_per_token']:,.0f} tokens/s; attention, ms: "
            + ", ".join(
                f"{k} {1e3 * v:.2f}" if v else f"{k} not supported" for k, v in one["attention_seconds"].items()
            )
        )
    print(f"copy {found['copy_bytes_per_second'] / 1e9:.3g} GB/s")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
