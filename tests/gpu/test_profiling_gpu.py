"""Traces, memory snapshots and out-of-memory errors of a GPU."""

import pickle
from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, records, run
from titanlike.tools.null_gpu.values import compare_values
from titanlike.tools.trace import read_profile, traces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("mode", ["none", "block"])
def test_a_profile_has_the_kernels_of_the_step(tmp_path: Path, mode: str) -> None:
    keys = {
        "model.dim": "512", "model.ffn_dim": "1536", "training.seq_len": "512", "training.compute_dtype": "bfloat16",
    }  # fmt: skip
    profiling = {"profiling.steps": "[4]", "profiling.num_steps": "2", "compile.mode": mode, "profiling.memory": "true"}
    done = run(tmp_path, variables=ON_GPU, real=True, **SMALL | keys | profiling | {"run.name": "r"})
    assert done.returncode == 0, done.stderr
    (path,) = traces(tmp_path / "runs/r").values()
    found = read_profile(path)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert {"matmul", "attention", "elementwise", "optimizer"} <= set(found.parts)
    seconds = {record["step"]: record["step_seconds"] for record in records(tmp_path / "runs/r") if "loss" in record}
    with compare_values():
        assert found.seconds < 20 * (seconds[2] + seconds[3])  # of a step, not of the start of the profiler
    snapshot = pickle.loads(path.with_name("step-4-rank-0.pickle").read_bytes())
    assert snapshot["device_traces"][0]


@pytest.mark.whole_gpu
def test_an_out_of_memory_error_names_three_keys_and_writes_a_snapshot(tmp_path: Path) -> None:
    keys = {
        "model.dim": "4096", "model.num_heads": "32", "model.ffn_dim": "16384", "model.vocab_size": "65536",
        "training.local_batch_size": "64", "training.global_batch_size": "64", "training.seq_len": "8192",
        "training.loss_chunk": "0", "profiling.memory": "true",
    }  # fmt: skip
    done = run(tmp_path, variables=ON_GPU, real=True, **SMALL | keys | {"run.name": "r"})
    assert done.returncode == 2
    assert "rank 0 is out of memory: CUDA out of memory" in done.stderr
    assert done.stderr.count(" GiB") >= 4  # the cause, the plan's peak and what each change saves
    assert "saves" in done.stderr
    assert (tmp_path / "runs/r/profile/out_of_memory-rank-0.pickle").stat().st_size > 0
