"""Float8 on a GPU: hardware matmuls, kernels, memory, time of a block, and the compiled optimizer.

pytest tests/gpu/test_float8_gpu.py --record float8.json        writes the measurements
"""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titanlike.distributed import process_group
from titanlike.float8.linear import apply_float8
from titanlike.models.common.init import initialize
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.registry import build_model
from titanlike.optim.low_precision_adamw import LowPrecisionAdamW
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.tools.null_gpu.values import compare_values

HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not HAS_FLOAT8, reason="needs a CUDA GPU of compute capability 8.9 or later")

# Two blocks of Llama 3 8B, with a small vocabulary.
CONFIG = LlamaConfig(
    dim=4096, num_layers=2, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=1024, max_seq_len=8192
)
TENSORWISE = Float8(scaling="tensorwise")
VARIANTS = {
    "bfloat16": Float8(),
    "tensorwise": TENSORWISE,
    "tensorwise, all-gather": replace(TENSORWISE, all_gather=True),
    "rowwise": Float8(scaling="rowwise"),
    "rowwise_with_gw_hp": Float8(scaling="rowwise_with_gw_hp"),
}


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with process_group.session("cuda") as found:
        yield found


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    measured: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    yield measured
    path = request.config.getoption("--record")
    if path:
        Path(path).write_text(json.dumps(measured, indent=1) + "\n")


def build(device: torch.device, float8: Float8, compiled: bool = True, reshard: Any = "auto") -> nn.Module:
    torch._dynamo.reset()
    gc.collect()  # a test that failed may have left its model
    with torch.device("meta"):
        model: nn.Module = build_model(CONFIG)
    model = parallelize(
        model, build_mesh("cuda"), split=[CONFIG.num_layers], training=Training(),
        parallelism=Parallelism(shard=1, reshard_after_forward=reshard), float8=float8,
        activation_checkpoint=ActivationCheckpoint(), compile=Compile(mode="block" if compiled else "none"),
    )  # fmt: skip
    initialize(model, device, 0)
    return model


def run(model: nn.Module, device: torch.device, length: int = 2048) -> Tensor:
    tokens = torch.randint(0, 1024, (1, length), device=device, generator=torch.Generator(device).manual_seed(0))
    logits: Tensor = model(tokens=tokens)
    logits.float().square().mean().backward()
    return logits.detach().float()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_hardware_matmul_matches_emulation(device: torch.device, scaling: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 512, device=device, dtype=torch.bfloat16)
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(64, 512, device=device, dtype=torch.bfloat16)
    found = []
    for emulate in (True, False):
        model = nn.ModuleDict({"wq": nn.Linear(256, 512, device=device, dtype=torch.bfloat16)})
        model.load_state_dict({f"wq.{name}": value for name, value in plain.state_dict().items()})
        apply_float8(model, Float8(scaling=scaling, layers=("*",), emulate=emulate))
        out = model["wq"](x)
        found.append((out, *torch.autograd.grad(out, (x, model["wq"].weight), gradient)))
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        with compare_values():
            assert ((one.float() - other.float()).norm() / other.float().norm()).item() < 1e-2


def test_each_linear_runs_three_float8_matmuls(device: torch.device, record: dict[str, Any]) -> None:
    model = build(device, replace(TENSORWISE, all_gather=True))
    run(model, device)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities()), acc_events=True) as profile:
        run(model, device)
    events = profile.key_averages()
    matmuls = sum(event.count for event in events if event.key == "aten::_scaled_mm")
    assert matmuls == 3 * 5 * CONFIG.num_layers  # all linears but wk and wv, which are too small
    on_gpu = sorted(
        (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: -event.self_device_time_total,
    )
    record["kernels"] = {event.key: event.count for event in on_gpu[:20]}
    with compare_values():  # a null GPU reports no kernels to the profiler
        assert on_gpu


def test_float8_stays_near_bfloat16(device: torch.device) -> None:
    """Emulated in float32 on a CPU, the logits differ by 0.18 with random weights."""
    expected = run(build(device, Float8()), device)
    for name, float8 in VARIANTS.items():
        for compiled in (True, False):
            found = run(build(device, float8, compiled), device)
            assert found.shape == expected.shape, (name, compiled)
            with compare_values():
                assert ((found - expected).norm() / expected.norm()).item() < 0.2, (name, compiled)


def test_gathered_weights_take_one_byte_an_element(device: torch.device, record: dict[str, Any]) -> None:
    model = build(device, VARIANTS["tensorwise, all-gather"], reshard="never")
    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    x @ x  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(tokens=torch.zeros(1, 2048, device=device, dtype=torch.long))
    allocated = torch.cuda.memory_allocated() - before
    record["bytes held by gathered weights"] = allocated
    converted = CONFIG.num_layers * (2 * CONFIG.dim**2 + 3 * CONFIG.dim * CONFIG.ffn_dim)
    others = sum(weight.numel() for weight in model.parameters()) - converted  # in bfloat16
    assert allocated == pytest.approx(converted + 2 * others, rel=0.01)


@pytest.mark.whole_gpu
def test_float8_is_faster(device: torch.device, record: dict[str, Any]) -> None:
    """Forward and backward pass of two blocks with 8192 tokens; the variants take turns."""
    models = {name: build(device, float8) for name, float8 in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(13):
        for name, model in models.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(model, device, 8192)
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end))
    found = {name: median(values) for name, values in times.items()}
    record["milliseconds of two blocks, 8192 tokens"] = found
    with compare_values():
        assert found["tensorwise"] < found["bfloat16"]


@pytest.mark.parametrize("state_dtype", ["full", "bfloat16", "8bit"])
def test_compiled_optimizer_matches_eager(device: torch.device, state_dtype: Any) -> None:
    results = []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape).bfloat16().to(where)) for shape in ((128, 256), (96, 64), (48,))]
        optimizer = LowPrecisionAdamW(
            [{"params": weights, "weight_decay": 0.1}],
            lr=1e-2, betas=(0.9, 0.95), eps=1e-8, state_dtype=state_dtype, seeds={w: n for n, w in enumerate(weights)},
        )  # fmt: skip
        for step in range(4):
            for weight in weights:
                gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
                weight.grad = gradient.bfloat16().to(where)
            optimizer.step()
        results.append([weight.detach().float().cpu() for weight in weights])
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        with compare_values():
            assert (
                (one - other).abs() > 1e-2 * one.abs() + 1e-3
            ).float().mean() < 0.01  # a few round to the other side
