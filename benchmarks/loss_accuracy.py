"""The chunked loss in bfloat16 at a vocabulary of 128,256 against a float64 reference: errors of the gradients, time and memory
of float32 and bfloat16 accumulation, and of torch's `linear_cross_entropy`.

python -m benchmarks.loss_accuracy --out benchmarks/results/loss_accuracy_cpu.json

The accuracy of the head's gradient depends on the number of chunks: 8 chunks are 8,192 tokens in the default chunks of 1,024.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import script
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import CrossEntropy, cross_entropy_inplace

VOCAB, DIM, TOKENS = 128_256, 64, 1024
CHUNKS = (8, 64)  # numbers of chunks
ROUNDS = 2

Gradients = tuple[Tensor, Tensor, Tensor]  # loss, gradients of the hidden states and of the weight


def reference(x: Tensor, weight: Tensor, labels: Tensor) -> Gradients:
    """Computes everything in float64, for some tokens at a time."""
    x, weight = x.double(), weight.double()
    loss, x_grad, weight_grad = torch.zeros((), dtype=torch.float64), torch.zeros_like(x), torch.zeros_like(weight)
    for rows in torch.arange(len(x)).split(256):
        logits = x[rows] @ weight.t()
        loss += F.cross_entropy(logits, labels[rows], reduction="sum")
        logits = logits.softmax(-1)
        logits[torch.arange(len(rows)), labels[rows]] -= 1.0
        x_grad[rows] = logits @ weight
        weight_grad.addmm_(logits.t(), x[rows])
    return loss, x_grad, weight_grad


def bfloat16_accumulation(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Gradients:
    """The chunked loss with a bfloat16 sum of the weight's gradient."""
    loss, x_grad, weight_grad = torch.zeros(()), torch.zeros_like(x), torch.zeros_like(weight)
    for rows in torch.arange(len(x)).split(chunk):
        logits = x[rows] @ weight.t()
        loss += cross_entropy_inplace(logits, labels[rows])[0]
        x_grad[rows] = logits @ weight
        weight_grad.addmm_(logits.t(), x[rows])
    return loss, x_grad, weight_grad


def by_autograd(loss: Tensor, x: Tensor, weight: Tensor) -> Gradients:
    """Returns the loss and its gradients."""
    x_grad, weight_grad = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), x_grad, weight_grad


def variants(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> dict[str, Callable[[], Gradients]]:
    """Returns what is compared, by name. `weight` is in float32, and its values are those of bfloat16 numbers."""
    leaf = x.requires_grad_()
    low = weight.bfloat16().requires_grad_()
    full = weight.clone().requires_grad_()

    def ours(weight: Tensor, chunk: int) -> Gradients:
        return by_autograd(CrossEntropy(chunk=chunk)(Logits(leaf[None], weight), labels[None]), leaf, weight)

    found: dict[str, Callable[[], Gradients]] = {
        "ours": lambda: ours(low, chunk),
        "ours, float32 weight": lambda: ours(full, chunk),
        "ours, one chunk": lambda: ours(low, 0),
        "bfloat16 accumulation": lambda: bfloat16_accumulation(x.detach(), low.detach(), labels, chunk),
    }
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)  # torch 2.13 or later
    if options:
        chunked = options(batch_chunk_size=chunk, chunking_method=None, acc_policy="accurate", acc_dtype=torch.float32)
        found["torch, accurate"] = lambda: by_autograd(
            F.linear_cross_entropy(leaf, low, labels, reduction="sum", options=chunked), leaf, low
        )
    return found


def peak_memory() -> int:
    """Returns the largest resident memory in bytes since the last `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Resets the peak to the present resident memory, and returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def error(found: Tensor, exact: Tensor) -> float:
    """Returns the error relative to the norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def measure_variants(chunks: int) -> dict[str, Any]:
    """Returns errors, processor time and memory of each variant for a number of chunks."""
    vocab, dim, tokens = VOCAB, DIM, TOKENS
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, dim, generator=generator).bfloat16()
    weight = (torch.randn(vocab, dim, generator=generator) * 2 / dim**0.5).bfloat16().float()  # logits of deviation 2
    frequencies = 1.0 / torch.arange(1, vocab + 1)  # of the tokens of a language
    labels = torch.multinomial(frequencies, tokens, replacement=True, generator=generator)
    exact = reference(x, weight, labels)
    rare = labels.bincount(minlength=vocab) == 0  # rows that get only the small gradients of wrong tokens
    results: dict[str, Any] = {}
    for name, run in variants(x, weight, labels, tokens // chunks).items():
        run()
        seconds = []
        before = reset_peak()
        for _ in range(ROUNDS):
            start = time.process_time()  # of all threads: other load on the machine does not count
            loss, x_grad, weight_grad = run()
            seconds.append(time.process_time() - start)
        results[name] = {
            "loss_error": error(loss, exact[0]), "hidden_error": error(x_grad, exact[1]),
            "weight_error": error(weight_grad, exact[2]), "weight_error_rare": error(weight_grad[rare], exact[2][rare]),
            "cpu_seconds": min(seconds), "peak_bytes": peak_memory() - before,
        }  # fmt: skip
        print(f"{chunks} chunks, {name}: {results[name]}", flush=True)
    return results


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """Measures all variants."""
    sizes = {"vocab_size": VOCAB, "dim": DIM, "tokens": TOKENS}
    return {"sizes": sizes} | {f"{chunks} chunks": measure_variants(chunks) for chunks in CHUNKS}


if __name__ == "__main__":
    script(__doc__, measure, lambda measured: json.dumps(measured, indent=1))
