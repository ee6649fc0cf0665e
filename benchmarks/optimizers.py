"""Memory and validation loss of low-precision optimizers: 200 steps of AdamW with the debug model for each, on a CPU.

    python -m benchmarks.optimizers --out docs/optimizers.json      # measures, writes the JSON and prints the table
    python -m benchmarks.optimizers --table docs/optimizers.json    # prints the table of an existing JSON

Counts the bytes of the last checkpoint.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import losses, script, train
from benchmarks.common import table as table_of
from titanlike.checkpoint.loader import read_whole

BF16 = {"training.master_dtype": "bfloat16"}
STOCHASTIC = BF16 | {"optimizer.stochastic_rounding": True}
SETTINGS = {
    "training.steps": 200, "training.global_batch_size": 16, "training.max_norm": 1.0, "optimizer.lr": 1.5e-3,
    "optimizer.groups": [], "schedule.warmup_steps": 20, "schedule.decay": "cosine", "schedule.min_ratio": 0.1,
    "validation.batches": 4,
}  # fmt: skip
VARIANTS = {
    "float32 weights": {},
    "float32 weights, bfloat16 moments": {"optimizer.state_dtype": "bfloat16"},
    "float32 weights, 8-bit moments": {"optimizer.state_dtype": "8bit"},
    "bfloat16 weights, round to nearest": BF16,
    "bfloat16 weights, stochastic rounding": STOCHASTIC,
    "bfloat16 weights, stochastic rounding, 8-bit moments": STOCHASTIC | {"optimizer.state_dtype": "8bit"},
}


def measure_variant(changes: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes per parameter of weights and moments, and the final validation loss, of one run."""
    with tempfile.TemporaryDirectory() as runs:
        records = train("debug", SETTINGS | changes, folder=Path(runs))
        state = read_whole(sorted(Path(runs, "run/checkpoints").glob("step-*[0-9]"))[-1])
    num_parameters = sum(tensor.numel() for tensor in state["model"].values())
    num_bytes = {
        kind: sum(t.numel() * t.element_size() for name, t in tensors.items() if kind == "model" or ".exp_avg" in name)
        for kind, tensors in state.items()
    }
    return {
        "weights": num_bytes["model"] / num_parameters,
        "moments": num_bytes["optimizer"] / num_parameters,
        "validation_loss": [*losses(records, "validation_loss").values()][-1],
    }


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """Runs all variants."""
    return {"variants": {name: measure_variant(changes) for name, changes in VARIANTS.items()}}


def table(measured: dict[str, Any]) -> str:
    """Returns the table of docs/results.md."""
    rows = []
    for name, found in measured["variants"].items():
        total = f"{found['weights']:.2f} + {found['moments']:.2f} = {found['weights'] + found['moments']:.2f}"
        rows.append((name, total, f"{found['validation_loss']:.3f}"))
    return table_of(("Precision", "Bytes per parameter: weights + moments", "Validation loss"), rows)


if __name__ == "__main__":
    script(__doc__, measure, table)
