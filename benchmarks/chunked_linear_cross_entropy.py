"""The head and its loss in pieces of different sizes, against torch's own of all logits at once, forward and backward.

python -m benchmarks.chunked_linear_cross_entropy --device cpu --out benchmarks/results/head_loss_cpu.json
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

from titanlike.models.loss import chunked_linear_cross_entropy

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Tokens, width, words.
SIZES = {"cpu": [(2048, 256, 4096), (2048, 512, 16384)], "cuda": [(8192, 2048, 128256), (8192, 4096, 128256)]}
ROUNDS = 9


def by_torch(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss as it is usually written."""
    return F.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")


def measure(device: str, backend: str) -> list[dict[str, Any]]:
    """Seconds of each, as shares of torch's own in the same round."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, width, words in SIZES[device]:
            x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
            weight = (0.02 * torch.randn(words, width, device=device)).to(dtype).requires_grad_()
            labels = torch.randint(0, words, (tokens,), device=device)
            ways: dict[str, Any] = {"torch": by_torch if not backend else torch.compile(by_torch, backend=backend)}
            for chunk in CHUNKS:
                if chunk <= tokens:
                    ways[str(chunk)] = lambda *inputs, chunk=chunk: chunked_linear_cross_entropy(
                        *inputs, chunk=chunk, backend=backend
                    )
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS + 1):
                for name, way in ways.items():
                    start = time.perf_counter()
                    torch.autograd.grad(way(x, weight, labels), (x, weight))
                    if device == "cuda":
                        torch.cuda.synchronize()
                    times[name].append(time.perf_counter() - start)
            ratios = {
                name: statistics.median(a / b for a, b in zip(some[1:], times["torch"][1:], strict=True))
                for name, some in times.items()
            }
            found.append(
                {"dtype": str(dtype), "tokens": tokens, "width": width, "words": words,
                 "torch_seconds": statistics.median(times["torch"][1:]), "of_torch": ratios}
            )  # fmt: skip
            shown = ", ".join(f"{name} {share:.2f}" for name, share in ratios.items() if name != "torch")
            print(f"{dtype} {tokens} x {width} x {words}: {shown}", flush=True)
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="", help="compile with this backend, such as inductor")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.device, arguments.backend)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
