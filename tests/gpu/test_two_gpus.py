"""Training on two GPUs: pipeline schedules over NCCL, and async tensor parallelism."""

from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, losses, run
from titanlike.config.layout import SCHEDULES
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
ON_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1", "NPROC": "2"}
MODEL = SMALL | {"model.num_layers": "4", "model.num_kv_heads": "2", "training.local_batch_size": "1"}


def trained(folder: Path, name: str, **options: str) -> dict[int, float]:
    done = run(folder, variables=ON_GPUS, real=True, **MODEL | options | {"run.name": name})
    assert done.returncode == 0, done.stderr
    return losses(folder / "runs" / name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_schedule_over_nccl(tmp_path: Path, schedule: str) -> None:
    eager = {"compile.mode": "none", "run.hang_timeout": "120"}
    expected = trained(tmp_path, "data", **eager)
    pipeline = {"parallelism.pipeline": "2", "parallelism.pipeline_schedule": schedule}
    validation = {"validation.interval": "3", "validation.batches": "2"}
    found = trained(tmp_path, "pipeline", **eager | pipeline | validation)
    assert found.keys() == expected.keys()
    with compare_values():
        assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("scaling", ["none", "tensorwise"])
def test_async_tensor_parallelism(tmp_path: Path, scaling: str) -> None:
    options = {
        "compile.mode": "block", "parallelism.tensor": "2", "model.dim": "512", "model.ffn_dim": "1024", "training.seq_len": "512",
        "training.compute_dtype": "bfloat16", "float8.scaling": scaling,
    }  # fmt: skip
    if scaling != "none":
        options["float8.layers"] = '["*"]'
    expected = trained(tmp_path, "tensor", **options)
    found = trained(tmp_path, "overlapped", **options | {"parallelism.async_tensor_parallel": "true"})
    assert found.keys() == expected.keys()
    with compare_values():
        assert found == pytest.approx(expected, rel=1e-2)
