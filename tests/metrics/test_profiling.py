"""Traces: which steps are traced, where their time goes, and `titanlike profile`."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlike.config import UserError
from titanlike.config.sections import Profiling
from titanlike.metrics.monitor import DATA_WAIT
from titanlike.metrics.profiler import Profiler, trace_name
from titanlike.tools.trace import read_profile, traces

HOST, STREAM, OTHER_STREAM = 1, 7, 20


def event(category: str, name: str, start: float, duration: float, thread: int = HOST, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / trace_name(5, 3)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


GPU_TRACE = [
    event("user_annotation", "step 5", 0, 100),
    event("user_annotation", "step 6", 100, 100),
    event("user_annotation", DATA_WAIT, 0, 20),  # of which 10 while the GPU computes
    event("cpu_op", "aten::mm", 20, 5),  # the launch on the host does not count
    event("kernel", "sm90_xmma_gemm_bf16", 10, 30, STREAM),
    event("kernel", "flash_fwd_kernel", 35, 15, STREAM),  # the first 5 beside the matmul
    event("kernel", "triton_poi_fused_add_0", 50, 10, STREAM),
    event("kernel", "ncclDevKernel_AllGather_RING_LL", 55, 25, OTHER_STREAM, **{"Process Group Description": "shard"}),
    event("kernel", "ncclDevKernel_ReduceScatter", 100, 10, OTHER_STREAM, **{"Process Group Description": "tensor"}),
    event("gpu_user_annotation", "Optimizer.step#AdamW.step", 150, 50, STREAM),
    event("kernel", "multi_tensor_apply_kernel", 150, 40, STREAM),
    event("kernel", "sm90_xmma_gemm_bf16", 300, 30, STREAM),  # after the traced steps
]


def test_every_moment_of_a_gpu_trace_counts_once(tmp_path: Path) -> None:
    found = read_profile(write(tmp_path, GPU_TRACE))
    microseconds = {name: round(seconds * 2e6, 6) for name, seconds in found.parts.items()}
    assert microseconds == {
        "data": 10.0, "matmul": 25.0, "attention": 15.0, "elementwise": 10.0, "exposed shard": 20.0, "exposed tensor": 10.0,
        "optimizer": 40.0, "host gaps": 70.0,
    }  # fmt: skip
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(100e-6)
    assert {axis: round(seconds * 2e6, 6) for axis, seconds in found.hidden.items()} == {"shard": 5.0}
    assert (found.rank, found.num_steps) == (3, 2)
    assert found.longest[0] == ("sm90_xmma_gemm_bf16", 2, pytest.approx(60e-6))


def test_collectives_without_a_name_are_those_of_the_only_dimension(tmp_path: Path) -> None:
    unnamed = [event("user_annotation", "step 1", 0, 10), event("kernel", "ncclDevKernel_AllReduce", 0, 10, STREAM)]
    assert set(read_profile(write(tmp_path, unnamed)).parts) == {"exposed communication"}
    assert set(read_profile(write(tmp_path, unnamed), "replicate").parts) == {"exposed replicate"}


def test_a_cpu_trace_counts_the_host_thread_and_collectives_beside_it(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "step 5", 0, 100),
        event("cpu_op", "aten::linear", 0, 30),
        event("cpu_op", "aten::mm", 5, 20),
        event("cpu_op", "aten::scaled_dot_product_attention", 30, 20),
        event("cpu_op", "aten::bmm", 35, 10),  # a part of attention
        event("cpu_op", "aten::view", 50, 5),
        event("user_annotation", "gloo:all_gather", 45, 20, OTHER_STREAM),
        event("cpu_op", "aten::mm", 60, 5, OTHER_STREAM),  # of a data loader, not of the host thread
        event("cpu_op", "## Call CompiledFxGraph abc ##", 65, 20),
        event("cpu_op", "aten::addmm", 70, 5),
    ]
    found = read_profile(write(tmp_path, events), "shard")
    assert {name: round(seconds * 1e6, 6) for name, seconds in found.parts.items()} == {
        "matmul": 25.0, "attention": 20.0, "elementwise": 15.0, "exposed shard": 15.0, "host gaps": 25.0,
    }  # fmt: skip


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GPU_TRACE)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        read_profile(path)
    with pytest.raises(UserError, match="no complete step"):
        read_profile(write(tmp_path, GPU_TRACE[2:]))


def run_steps(folder: Path, last: int, **keys: Any) -> dict[tuple[int, int], Path]:
    left, right = torch.ones(2, 128, 128)
    with Profiler(Profiling(**keys), folder, torch.device("cpu")) as profiler:
        for step in range(1, last + 1):
            profiler.step(step)
            for _ in range(step):
                left @ right
    return traces(folder)


def test_the_steps_and_ranks_of_the_recipe_are_traced(tmp_path: Path) -> None:
    found = run_steps(tmp_path, 9, steps=(2, 8), num_steps=3)
    assert list(found) == [(2, 0), (8, 0)]
    first, last = map(read_profile, found.values())
    # Each step multiplies as often as its number says: the trace has steps 2 to 4, and 8 to the end of the run.
    assert {name: calls for name, calls, _ in first.longest}["aten::mm"] == 2 + 3 + 4
    assert {name: calls for name, calls, _ in last.longest}["aten::mm"] == 8 + 9
    assert (first.num_steps, last.num_steps) == (3, 2)
    assert not run_steps(tmp_path / "none", 3)
    assert not run_steps(tmp_path / "others", 3, steps=(1,), ranks=(1,))


def test_a_trace_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("a file where the directory would be")
    assert not run_steps(tmp_path, 3, steps=(1,), num_steps=1)
    assert "step-1-rank-0.json.gz cannot be written: " in capsys.readouterr().out
