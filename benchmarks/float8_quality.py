"""The effect of float8 on the loss: the study's four recipes on a small model, two processes on a CPU, 500 steps.

    python -m benchmarks.float8_quality --folder docs/float8
    python -m benchmarks.float8_quality --folder docs/float8/high_lr --lr 1.5e-3

Writes the metrics of each, and prints the table of docs/results.md.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import losses, parser_of, table, train

VARIANTS = ["baseline", "compile", "float8", "float8_all_gather"]

# The model and data of the debug recipe; all other settings are the study's. Float8 is emulated, which rounds alike.
SMALL: dict[str, Any] = {
    "model.size": "debug",
    "tokenizer.encoding": "bytes",
    "data.source": "python_stdlib",
    "training.steps": 500,
    "training.seq_len": 128,
    "training.global_batch_size": 16,
    "training.local_batch_size": 8,
    "schedule.warmup_steps": 100,  # after an unstable start, rounding alone makes equal runs diverge
    "activation_checkpoint.mode": "none",
    "validation.interval": 25,
    "validation.batches": 8,
    "metrics.interval": 5,
}
FLOAT8 = {"float8.emulate": True, "float8.layers": ["*"]}


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Reads the validation losses of each variant, by step."""
    lines = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in VARIANTS}
    return {name: losses(map(json.loads, of_run), "validation_loss") for name, of_run in lines.items()}


def row(folder: Path, lr: str) -> list[str]:
    """Returns a row of the table: the last loss of the baseline, and the relative differences from it."""
    last = [of_run[SMALL["training.steps"]] for of_run in read(folder).values()]
    return [lr, f"{last[0]:.4f}", *(f"{100 * (loss / last[0] - 1):+.2f}%" for loss in last[1:])]


def table_of(folders: Mapping[str, Path]) -> str:
    """Returns the table of these folders, by learning rate."""
    return table(("Learning rate", *VARIANTS), (row(folder, lr) for lr, folder in folders.items()))


def main() -> None:
    """Trains the variants."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lr", default="6e-4")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in VARIANTS:
        keys = SMALL | {"optimizer.lr": arguments.lr} | (FLOAT8 if name.startswith("float8") else {})
        records = train(f"study/{name}", keys, processes=2)
        (arguments.folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    print(table_of({arguments.lr: arguments.folder}))


if __name__ == "__main__":
    main()
