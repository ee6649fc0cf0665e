"""Attention within documents: FlexAttention with a block mask, and scaled dot product attention with a dense mask, against causal
attention without documents. Time of forward and backward, and peak memory, which must not grow with the square of the length.

python -m benchmarks.document_masks --device cuda --out document_masks.json
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
from torch import Tensor

from titanlike.models.common.document_mask import block_mask_attention, document_block_mask, document_dense_mask
from titanlike.models.common.layers import attention_backend

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of Llama 3 8B
LENGTHS = {"cpu": (256, 512), "cuda": (2048, 8192, 32768)}
MEAN_DOCUMENT = 1000  # tokens
ROUNDS = 10


def measure(device: torch.device, length: int) -> dict[str, Any]:
    """Returns milliseconds and bytes of each kind of attention for a sequence of this length."""
    heads, dtype = (HEADS, torch.bfloat16) if device.type == "cuda" else (4, torch.float32)
    shapes = [(1, heads, length, HEAD_DIM), *[(1, heads * KV_HEADS // HEADS, length, HEAD_DIM)] * 2]
    backward = device.type == "cuda"  # FlexAttention has no backward pass on a CPU
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for shape in shapes)
    ids = (torch.rand(1, length, device=device) < 1 / MEAN_DOCUMENT).cumsum(1)
    positions = torch.arange(length, device=device)

    def dense(mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

    kinds: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
        "causal": (lambda *_: None, dense),
        "dense mask": (document_dense_mask, dense),
        "block mask": (document_block_mask, lambda mask: block_mask_attention(q, k, v, mask)),
    }
    results: dict[str, Any] = {"dtype": str(dtype), "heads": heads, "backward": backward}
    for name, (make, attend) in kinds.items():
        times: dict[str, list[float]] = {"make": [], "attend": []}
        for round_number in range(ROUNDS + 2):
            if round_number == 2:  # compiled and warm
                before = reset_memory(device)
            started = now(device)
            mask = make(positions, positions, ids, ids)
            times["make"].append(now(device) - started)
            started = now(device)
            with attention_backend("auto"):
                out = attend(mask)
            if backward:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            times["attend"].append(now(device) - started)
            del out, mask
        found = {f"{key}_milliseconds": 1000 * statistics.median(value[2:]) for key, value in times.items()}
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
        results[name] = found | {"peak_bytes": peak}
        print(f"{length} tokens, {name}: {results[name]}", flush=True)
    return results


def now(device: torch.device) -> float:
    """Returns the time in seconds after all kernels have finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_memory(device: torch.device) -> int:
    """Resets the peak, and returns the allocated bytes."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def main() -> None:
    """Measures all lengths and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = {str(length): measure(torch.device(arguments.device), length) for length in LENGTHS[arguments.device]}
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
