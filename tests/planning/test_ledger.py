"""The ledger of a step: classes of kernels, bytes from Triton's IR, predicted times, and what streams wait for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_plans import FOLDER, ledger_seconds
from titanlike.config.shipped import recipe_path
from titanlike.tools.null_gpu import predicted_trace
from titanlike.tools.null_gpu.instructions import Binary
from titanlike.tools.null_gpu.kernels import Kernel, Parameters, class_of
from titanlike.tools.null_gpu.ledger import Call, Ledger, kernel_of
from titanlike.tools.null_gpu.rates import Rates
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.programs import load_known
from titanlike.tools.trace import read_profile

# Of Llama 3.2 1B: the embedding and LM head, w1 and w2, wq and wo, wk and wv, the norms.
PARAMETERS = Parameters(128256, [2048, 512 * 2048, 2048 * 2048, 8192 * 2048, 128256 * 2048], [128256 * 2048])
F32, BF16, F8 = "float32", "bfloat16", "float8_e4m3fn"
X, HIDDEN, LOGITS, HEAD = (2, 8192, 2048), (16384, 8192), (4096, 128256), (128256, 2048)


def kernel(name: str, *tensors: tuple[tuple[int, ...], str], size: int = 0, **facts: object) -> Kernel:
    return Kernel("triton" if name.startswith("triton") else "operator", name, tensors, size, **facts)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("matmul", kernel("mm", (X[1:], BF16), (X[2:] + HIDDEN[1:], BF16))),
        ("matmul", kernel("_scaled_mm", (HIDDEN, F8), (X[2:] + HIDDEN[1:], F8))),
        ("attention", kernel("_scaled_dot_product_cudnn_attention_backward", ((2, 32, 8192, 64), BF16))),
        ("SwiGLU or GELU", kernel("triton_poi_fused__unsafe_view_mul_silu_8", (HIDDEN, BF16), (HIDDEN, BF16))),
        ("RoPE", kernel("triton_poi_fused__to_copy_add_cat_mul_neg_slice_4", ((2, 32, 8192, 64), BF16), (X, BF16))),
        ("RoPE", kernel("mul", ((2, 8192, 32, 32), "complex64"))),
        ("norm and residual", kernel("triton_red_fused__fused_rms_norm__to_copy_0", (X, BF16), ((2048,), F32), (X, BF16))),
        ("norm and residual", kernel("triton_poi_fused__unsafe_view_add_9", (X, BF16), (X, BF16))),
        ("cross-entropy", kernel("triton_red_fused__to_copy_amax_eq_exp_log_mul_0", (LOGITS, BF16), ((4096,), "int64"))),
        ("cross-entropy", kernel("copy_", (LOGITS, BF16), (LOGITS, BF16))),
        ("head and embedding", kernel("_to_copy", (HEAD, F32), (HEAD, BF16))),
        ("casts and sums of weights and gradients", kernel("triton_poi_fused__to_copy_t_6", ((8192, 2048), F32))),
        ("casts and sums of weights and gradients", kernel("add_", ((8192, 2048), F32), ((8192, 2048), F32))),
        ("casts to float8", kernel("triton_poi_fused_silu_mul_clamp_3", (HIDDEN, BF16), (HIDDEN, F8))),
        ("maxima for float8", kernel("triton_red_fused_abs_amax_clamp_exp2_floor_log2_7", (HIDDEN, BF16))),  # scales of rows
        ("maxima for float8", kernel("triton_red_fused__to_copy_abs_max_t_12", ((14336, 4096), F32))),
        ("FSDP copies", kernel("split_with_sizes_copy", ((10**8,), BF16))),
        ("norm and clipping of gradients", kernel("_foreach_norm", (HEAD, F32))),
        ("optimizer", kernel("triton_for_fused_addcdiv_0", (HEAD, F32), optimizer=True)),
        ("other", kernel("cos", ((2, 1, 8192, 32), F32))),
    ],
)  # fmt: skip
def test_a_kernel_has_the_class_of_what_it_computes(expected: str, found: Kernel) -> None:
    assert class_of(found, PARAMETERS) == expected


# Two loops over rows of `logits`, which the second one writes.
IR = """\
  tt.func public @softmax(%logits: !tt.ptr<bf16> {tt.divisibility = 16 : i32}, %labels: !tt.ptr<i64>, %size: i32) {
    %c0_i32 = arith.constant 0 : i32
    %c2048_i32 = arith.constant 2048 : i32
    %c128256_i32 = arith.constant 128256 : i32
    %row = tt.addptr %logits, %offset : !tt.ptr<bf16>, i32
    %label = tt.load %labels : !tt.ptr<i64>
    %sum = scf.for %first = %c0_i32 to %c128256_i32 step %c2048_i32 iter_args(%s = %zero) -> (tensor<1x2048xf32>)  : i32 {
      %p = tt.splat %row : !tt.ptr<bf16> -> tensor<1x2048x!tt.ptr<bf16>>
      %q = tt.addptr %p, %lane : tensor<1x2048x!tt.ptr<bf16>>, tensor<1x2048xi32>
      %x = tt.load %q, %mask, %cst : tensor<1x2048x!tt.ptr<bf16>>
      scf.yield %x : tensor<1x2048xf32>
    }
    scf.for %first = %c0_i32 to %c128256_i32 step %c2048_i32  : i32 {
      %p2 = tt.splat %row : !tt.ptr<bf16> -> tensor<1x2048x!tt.ptr<bf16>>
      %x2 = tt.load %p2, %mask, %cst : tensor<1x2048x!tt.ptr<bf16>>
      tt.store %p2, %y, %mask : tensor<1x2048x!tt.ptr<bf16>>
    }
"""


def test_long_rows_that_two_loops_read_count_twice(tmp_path: Path) -> None:
    folder = tmp_path / "triton" / "AA"  # the hash 00 in base 32
    folder.mkdir(parents=True)
    (folder / "softmax.cubin").touch()
    (folder / "softmax.ttir").write_text(IR)
    binary = Binary(folder / "softmax.cubin")
    assert (binary.passes("%logits"), binary.passes("%labels")) == ((2, 1), (1, 0))

    def moved(logits: list[int], gigabytes: float | None) -> int:
        tensors = [(logits, BF16), ([logits[0]], "int64")]
        facts = {"kind": "triton", "name": "softmax", "hashes": ["00"], "elements": 1, "gigabytes": gigabytes}
        return kernel_of(facts | {"tensors": tensors, "optimizer": False}, tmp_path, count=False).bytes

    row = 128256 * 2
    assert moved([4, 128256], None) == 4 * (3 * row + 8)  # read twice and written
    assert moved([4, 128256], 4 * 2 * row / 1e9) == 4 * 3 * row  # inductor counts what is read twice once
    assert moved([4, 128256], 1.0) == 4 * (3 * row + 8)  # and a tensor once for each of its views
    assert moved([4, 2048], None) == 4 * (2 * 4096 + 8)  # a short row is in a cache


@pytest.fixture
def rates() -> Rates:
    overrides = {"training.global_batch_size": "4"}
    return Rates(Job(load_known(recipe_path("llama3_1b"), overrides), 1), load_hardware("h200"), "h200")


def test_predictions_are_within_one_percent_of_the_h200(rates: Rates) -> None:
    """To which the constants are fitted, but for the last one: this shows that the arithmetic stays the same."""
    seconds = ledger_seconds(rates.job)
    assert len(seconds) == 11
    for (file, row), found in seconds.items():
        measured = json.loads((FOLDER / f"{file}.json").read_text())
        expected = measured["tokens_per_step"] / measured["rows"][row]["tokens_per_second"]
        assert found == pytest.approx(expected, rel=0.03 if file == "1b_flash" else 0.01), (file, row)


def test_a_stream_waits_for_the_events_of_another(rates: Rates) -> None:
    copies = [kernel("copy_", size=size * 295 * 10**7) for size in (1, 2, 3)]  # of so many milliseconds
    compute, other = 0, 7
    calls = [
        Call("run", 0, compute), Call("record", 5, compute), Call("wait", 5, other), Call("run", 2, other),
        Call("record", 6, other), Call("run", 1, compute), Call("wait", 6, compute), Call("run", 0, compute),
    ]  # fmt: skip
    spans = Ledger(copies, calls, PARAMETERS, "").timeline(rates)
    assert [(round(1e3 * span.start), round(1e3 * span.end)) for span in spans] == [(0, 1), (1, 4), (1, 3), (4, 5)]


def test_a_predicted_trace_has_the_parts_of_a_profile(rates: Rates, tmp_path: Path) -> None:
    milliseconds = 295 * 10**7  # of a copy
    weights = Kernel(
        "collective", "_allgather_base_", ((X, BF16),), 2 * 10**9, collective="all-gather", group=("shard", 8)
    )
    rates = replace(rates, job=Job(rates.job.recipe, 2))
    kernels = [
        kernel("copy_", (X, BF16), size=milliseconds),
        weights,
        kernel("_fused_adamw_", size=milliseconds, optimizer=True),
    ]
    calls = [
        Call("run", 1, 9), Call("run", 0, 0), Call("record", 3, 9), Call("wait", 3, 0), Call("run", 2, 0), Call("run", 1, 9)
    ]  # fmt: skip
    ledger = Ledger(kernels, calls, PARAMETERS, "")
    file = tmp_path / "profile" / "step-1-rank-0.json.gz"
    predicted_trace.write(file, ledger, rates)
    profile, gather = read_profile(file), rates.seconds(weights)
    assert gather > 2e-3
    # The first all-gather begins with the copy, which hides a part of it; the second one with the update.
    assert profile.parts == pytest.approx(
        {"elementwise": 1e-3, "optimizer": 1e-3, "exposed shard": 2 * gather - 2e-3}, rel=1e-3
    )
    assert profile.hidden == pytest.approx({"shard": 2e-3}, rel=1e-3)
    assert profile.seconds == pytest.approx(2 * gather, rel=1e-3)
