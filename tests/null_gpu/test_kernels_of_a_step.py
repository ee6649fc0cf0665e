"""Bytes and launches of a step, by which a lost fusion is noticed."""

import pytest

from tests.null_gpu.recording import require_null_gpu
from titanlike.config.shipped import recipe_path
from titanlike.tools.null_gpu import ledger

TWO_BLOCKS = ("--model.num_layers=2", "--training.seq_len=2048", "--training.local_batch_size=2")
DENSE = (*TWO_BLOCKS, "--training.global_batch_size=4", "--activation_checkpoint.mode=none")


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize(
    ("recipe", "gpus", "options", "gigabytes", "launches"),
    [
        pytest.param("llama3_1b", 1, DENSE, 27.68, 311, marks=pytest.mark.every),
        ("llama3_8b_float8", 1, DENSE, 193.57, 513),
        ("llama3_8b", 8, (*TWO_BLOCKS, "--training.global_batch_size=32"), 67.24, 341),
    ],
    ids=["bfloat16", "float8", "FSDP"],
)  # fmt: skip
def test_a_step_moves_no_more_bytes_and_launches_no_more_kernels(
    recipe: str, gpus: int, options: tuple[str, ...], gigabytes: float, launches: int
) -> None:
    require_null_gpu()
    found = ledger.summary(*ledger.measure(recipe_path(recipe), options, gpus, "h200", instructions=False))
    assert (found["GB"], found["launches"]) == (pytest.approx(gigabytes, rel=0.001), launches)
