"""Chunked linear cross-entropy with different chunk sizes against torch's unchunked one, forward and backward.

python -m benchmarks.chunked_linear_cross_entropy --device cpu --out benchmarks/results/chunked_linear_cross_entropy_cpu.json
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
# (tokens, dim, vocab_size)
SIZES = {"cpu": [(2048, 256, 4096), (2048, 512, 16384)], "cuda": [(8192, 2048, 128256), (8192, 4096, 128256)]}
ROUNDS = 9


def by_torch(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Computes the loss from the full logits."""
    return F.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")


def measure(device: str, backend: str) -> list[dict[str, Any]]:
    """Returns the time of each chunk size relative to torch in the same round."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, dim, vocab_size in SIZES[device]:
            x = torch.randn(tokens, dim, device=device, dtype=dtype, requires_grad=True)
            weight = (0.02 * torch.randn(vocab_size, dim, device=device)).to(dtype).requires_grad_()
            labels = torch.randint(0, vocab_size, (tokens,), device=device)
            variants: dict[str, Any] = {"torch": by_torch if not backend else torch.compile(by_torch, backend=backend)}
            for chunk in CHUNKS:
                if chunk <= tokens:
                    loss = CrossEntropy(chunk=chunk, backend=backend)
                    variants[str(chunk)] = lambda x, weight, labels, loss=loss: loss(
                        Logits(x[None], weight), labels[None]
                    )
            times: dict[str, list[float]] = {name: [] for name in variants}
            for _ in range(ROUNDS + 1):
                for name, function in variants.items():
                    start = time.perf_counter()
                    torch.autograd.grad(function(x, weight, labels), (x, weight))
                    if device == "cuda":
                        torch.cuda.synchronize()
                    times[name].append(time.perf_counter() - start)
            ratios = {
                name: statistics.median(a / b for a, b in zip(seconds[1:], times["torch"][1:], strict=True))
                for name, seconds in times.items()
            }
            results.append(
                {"dtype": str(dtype), "tokens": tokens, "dim": dim, "vocab_size": vocab_size,
                 "torch_seconds": statistics.median(times["torch"][1:]), "of_torch": ratios}
            )  # fmt: skip
            ratios_text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "torch")
            print(f"{dtype} {tokens} x {dim} x {vocab_size}: {ratios_text}", flush=True)
    return results


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="", help="torch.compile backend, such as inductor; default: not compiled")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.device, arguments.backend)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
