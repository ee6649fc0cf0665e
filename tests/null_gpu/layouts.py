"""Trains a tiny model under each layout over NCCL, in the processes that torchrun starts on null GPUs."""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import pretrain
from tests.parity import FULL, SCHEDULES, SELECTIVE
from tests.training import GPT_, LLAMA, QWEN3_MOE, mesh_of, tiny
from titanlike.distributed import process_group

BF16: dict[str, Any] = {"training": dict(compute_dtype="bfloat16")}  # FSDP casts the parameters
FOUR_BLOCKS = replace(GPT_, num_layers=4)

# Of 4 processes: the model, the layout, and other sections of a recipe.
LAYOUTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "FSDP": (LLAMA, dict(shard=4), {}),
    "HSDP": (GPT_, dict(replicate=2, shard=2), {}),
    "TP x FSDP": (LLAMA, dict(tensor=2, shard=2), SELECTIVE),
    "CP x FSDP": (LLAMA, dict(context=2, shard=2), {}),
    **{f"PP {name} x FSDP": (FOUR_BLOCKS, dict(pipeline=2, pipeline_schedule=name, shard=2), {}) for name in SCHEDULES},
    "PP 1f1b x TP": (LLAMA, dict(pipeline=2, tensor=2), {}),
    "EP x FSDP": (QWEN3_MOE, dict(shard=4, expert=2), FULL),
    "EP x TP": (QWEN3_MOE, dict(shard=2, tensor=2, expert=2), SELECTIVE | BF16),
}


def train(folder: Path, name: str) -> None:
    """Trains under one layout for two steps, with a validation and a checkpoint."""
    model, layout, sections = LAYOUTS[name]
    training = dict(steps=2, local_batch_size=1) | sections.get("training", {})
    sections = sections | {"training": training, "validation": dict(interval=2, batches=1)}
    recipe = tiny(folder, name.replace(" ", "-"), model=model, parallelism=layout, **sections)
    pretrain.build_mesh = mesh_of  # type: ignore[assignment]
    pretrain.main(replace(recipe, run=replace(recipe.run, device="cuda")))


if __name__ == "__main__":
    with process_group.session("cuda"):
        for each in sys.argv[2:] or LAYOUTS:
            if process_group.is_main():
                print("layout", each, flush=True)
            train(Path(sys.argv[1]), each)
            gc.collect()  # frees the optimizer: the record counts the steps of one optimizer, and then of the next
