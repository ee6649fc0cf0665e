"""Float8 layer selection, validation and numerics in a single process."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.training import Observer, Operations, resume
from titanlike.checkpoint import CheckpointMetadata
from titanlike.config import UserError
from titanlike.config.sections import Float8
from titanlike.float8.all_gather import Float8Shard, wrap_weights
from titanlike.float8.linear import EPS, WEIGHT, Float8Linear, apply_float8, check_hardware, scale_of, to_float8
from titanlike.float8.selection import matches, skip_reasons, summary_lines
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.registry import build_model
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_machine
from titanlike.run.run_dir import recipe_as_json

LARGE = LlamaConfig(dim=4096, num_heads=32, num_kv_heads=8, ffn_dim=14336, num_layers=2)
TENSORWISE = Float8(scaling="tensorwise")


def recipe(float8: dict[str, Any], **sections: Any) -> PretrainRecipe:
    base = PretrainRecipe(model=LARGE, float8=Float8(**{"scaling": "tensorwise", "emulate": True} | float8))
    changed = {n: replace(getattr(base, n), **v) if isinstance(v, dict) else v for n, v in sections.items()}
    return replace(base, **changed)


def selected(float8: Float8, model: LlamaConfig | GPTConfig) -> set[str]:
    reasons = skip_reasons(float8, model.matrices(), model.tied_head)
    return {name for name, reason in reasons.items() if not reason}


@pytest.mark.parametrize(
    "model", [LlamaConfig(), LlamaConfig(tied_head=True), GPTConfig(), LARGE], ids=["llama", "tied", "gpt", "large"]
)
def test_config_lists_the_matrices_of_the_model(model: LlamaConfig | GPTConfig) -> None:
    with torch.device("meta"):
        built = build_model(model)
    found = {n: tuple(m.weight.shape) for n, m in built.named_modules() if isinstance(m, nn.Linear) or n == "output"}
    assert found == model.matrices()


def test_small_unselected_and_head_matrices_are_skipped() -> None:
    block = {"attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
    both = {f"layers.{n}.{name}" for n in (0, 1) for name in block}
    assert selected(TENSORWISE, LARGE) == both  # wk and wv, 1024 x 4096, are too small
    assert selected(replace(TENSORWISE, layers=("*",)), LARGE) == set(LARGE.matrices()) - {"output"}
    assert selected(replace(TENSORWISE, layers=("wk",)), LARGE) == {f"layers.{n}.attention.wk" for n in (0, 1)}
    assert selected(replace(TENSORWISE, head=True), LARGE) == both | {"output"}
    assert selected(replace(TENSORWISE, head=True, layers=("*",)), LARGE) == set(LARGE.matrices())
    assert selected(replace(TENSORWISE, layers=("feed_forward",), skip=("layers.1", "w3")), LARGE) == {
        "layers.0.feed_forward.w1",
        "layers.0.feed_forward.w2",
    }
    assert "output" not in selected(replace(TENSORWISE, head=True, layers=("*",)), GPTConfig())


@pytest.mark.parametrize(
    ("scaling", "size", "small"),
    [
        ("tensorwise", (1024, 4096), True), ("tensorwise", (1040, 4096), False), ("tensorwise", (1024, 4112), False),
        ("rowwise", (2048, 8192), True), ("rowwise", (4096, 2048), True), ("rowwise", (4096, 4096), False),
        ("rowwise", (8192, 1024), True), ("rowwise", (8192, 2048), False), ("rowwise_with_gw_hp", (2048, 8192), True),
    ],
)  # fmt: skip
def test_size_thresholds(scaling: Any, size: tuple[int, int], small: bool) -> None:
    reasons = skip_reasons(Float8(scaling=scaling), {"layers.0.wq": size}, tied_head=False)
    assert reasons == {"layers.0.wq": "too small" if small else ""}


@pytest.mark.parametrize(
    ("pattern", "matrix", "expected"),
    [
        ("wq", "layers.0.attention.wq", True), ("attention", "layers.0.attention.wq", True),
        ("layers.1", "layers.10.attention.wq", False), ("layers.*.attention", "layers.10.attention.wq", True),
        ("w", "layers.0.attention.wq", False), ("w*", "layers.0.attention.wq", True), ("q", "layers.0.wq", False),
    ],
)  # fmt: skip
def test_patterns_match_full_components_of_a_name(pattern: str, matrix: str, expected: bool) -> None:
    assert matches(pattern, matrix) is expected


def test_startup_summary_lists_converted_and_skipped_matrices() -> None:
    float8 = replace(TENSORWISE, all_gather=True, skip=("layers.1.attention.wq",))
    lines = summary_lines(float8, LARGE.matrices(), False, compiled=True, sharded=True)
    assert [line.strip() for line in lines] == [
        "float8  tensorwise; weights are all-gathered in float8",
        "converted: attention.wq of block 0, attention.wo, feed_forward.w1, feed_forward.w2, feed_forward.w3",
        "skipped: attention.wk, attention.wv (too small)",
        "skipped: attention.wq of block 1 (in float8.skip)",
        "skipped: output (the head; float8.head is false)",
    ]
    assert (
        "EMULATED"
        in summary_lines(replace(float8, emulate=True), LARGE.matrices(), False, compiled=True, sharded=True)[-1]
    )
    assert "no all-gather" in summary_lines(float8, LARGE.matrices(), False, compiled=True, sharded=False)[0]
    assert "NOT COMPILED" in summary_lines(float8, LARGE.matrices(), False, compiled=False, sharded=False)[-1]
    assert summary_lines(Float8(), LARGE.matrices(), False, compiled=False, sharded=True) == []


@pytest.mark.parametrize(
    ("scaling", "capability", "message"),
    [
        ("tensorwise", None, "of compute capability 8.9 or later (Ada, Hopper, Blackwell), but X has no float8; set float8.s"),
        ("tensorwise", (8, 0), "but X has 8.0; set float8.scaling = 'none', or float8.emulate = true to measure"),
        ("rowwise", (8, 9), ""), ("tensorwise", (9, 0), ""), ("mxfp8", (10, 0), ""), ("none", None, ""),
        ("mxfp8", (9, 0), "of compute capability 10.0 or later (Blackwell), but X has 9.0; set"),
    ],
)  # fmt: skip
def test_hardware_without_float8_is_refused(scaling: Any, capability: tuple[int, int] | None, message: str) -> None:
    found = Float8(scaling=scaling).hardware_problem("X", capability)
    assert (message in found) if message else not found
    assert not Float8(scaling=scaling, emulate=True).hardware_problem("X", capability)


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = dict(run=dict(dir=str(tmp_path)))
    with pytest.raises(UserError, match="but the CPU has no float8; set"):
        check_machine(recipe(dict(emulate=False), **options))
    check_machine(recipe({}, **options))
    with pytest.raises(UserError, match="but the CPU has no float8; set"):
        check_hardware("cpu", TENSORWISE)


def test_a_checkpoint_without_float8_keys_resumes() -> None:
    facts = {"device": "cpu", "torch": "2.13.0"}
    for model in (GPTConfig(dropout=0.1), GPTConfig()):
        now = PretrainRecipe(model=model)
        old = recipe_as_json(now)
        del old["float8"], old["optimizer"]["state_dtype"], old["model"]["dropout"]
        saved = CheckpointMetadata(1, old, "x", {"shard": 1}, facts)
        if model.dropout:
            with pytest.raises(UserError, match=r"another recipe: model.dropout was 0.0, now 0.1. Restore"):
                resume(saved, now, "x", {"shard": 1}, facts)
        else:
            assert resume(saved, now, "x", {"shard": 1}, facts) == []


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Emulates a float8 cast: scales the largest magnitude to the maximum of the dtype, rounds, and scales back."""
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / amax.double()
    if dim is not None:
        scale = 2.0 ** scale.log2().floor()
    scale = scale.float()
    return (x * scale).to(dtype).float() / scale


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_in_float32_are_near_those_in_float64(dtype: torch.dtype) -> None:
    exponents = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 50 - 12
    amax = torch.cat([torch.tensor([0.0, 1e-30, EPS]), 10.0**exponents])
    for values in (amax, amax.bfloat16()):
        found = scale_of(values, dtype)
        assert found.dtype == torch.float32
        in_float64 = torch.finfo(dtype).max / values.double().clamp(min=EPS)
        torch.testing.assert_close(found.double(), in_float64, rtol=2**-22, atol=0.0)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_matches_manual_rounding(scaling: Any, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=bias)
    model = nn.ModuleDict({"wq": plain})
    x, gradient = torch.randn(4, 8, 64, requires_grad=True), torch.randn(4, 8, 96)
    exact = plain(x)
    expected = torch.autograd.grad(exact, (x, plain.weight), gradient)
    parameters = dict(model.named_parameters())
    apply_float8(model, Float8(scaling=scaling, layers=("*",), emulate=True))
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    out = model["wq"](x)
    found = torch.autograd.grad(out, (x, plain.weight), gradient)
    assert model["wq"](x.bfloat16()).dtype == torch.bfloat16  # parameters in float32 are cast

    def relative_error(a: Tensor, b: Tensor) -> float:
        return ((a - b).norm() / b.norm()).item()

    assert all(1e-3 < relative_error(a, b) < 0.1 for a, b in zip((out, found[0]), (exact, expected[0]), strict=True))
    unrounded = scaling == "rowwise_with_gw_hp"
    assert (
        (relative_error(found[1], expected[1]) < 1e-6)
        if unrounded
        else (1e-3 < relative_error(found[1], expected[1]) < 0.1)
    )
    if scaling == "tensorwise":
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        flat, wide, deep = rounded(x, e4m3).flatten(0, 1), rounded(plain.weight, e4m3), rounded(gradient, e5m2)
        by_hand = flat @ wide.T + (0 if plain.bias is None else plain.bias)
        torch.testing.assert_close(out.flatten(0, 1), by_hand)
        torch.testing.assert_close(found[0].flatten(0, 1), deep.flatten(0, 1) @ wide)
        torch.testing.assert_close(found[1], deep.flatten(0, 1).T @ flat)
    if scaling == "rowwise":
        e4m3 = torch.float8_e4m3fn
        by_hand = rounded(x, e4m3, -1) @ rounded(plain.weight, e4m3, -1).T + (0 if plain.bias is None else plain.bias)
        torch.testing.assert_close(out, by_hand)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_emulated_matmul_matches_the_float8_operator(scaling: Any) -> None:
    """torch implements `_scaled_mm` on a CPU too, so this covers the call that GPUs use."""
    torch.manual_seed(0)
    plain, x, gradient = nn.Linear(64, 96), torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    found = []
    for emulate in (True, False):
        model = nn.ModuleDict({"wq": nn.Linear(64, 96)})
        model.load_state_dict({f"wq.{name}": value for name, value in plain.state_dict().items()})
        apply_float8(model, Float8(scaling=scaling, layers=("*",), emulate=emulate))
        matrix: Any = model["wq"]
        assert isinstance(matrix, Float8Linear)
        try:
            out = matrix(x)
        except RuntimeError as error:
            assert scaling == "rowwise" and "only supports per-tensor scaling for CPU" in str(error)
            pytest.skip("torch 2.11 has no rowwise _scaled_mm on a CPU")
        found.append((out, *torch.autograd.grad(out, (x, matrix.weight), gradient)))
    tolerance = 1e-5 if scaling == "tensorwise" else 1e-2  # rowwise returns bfloat16
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("emulate", [True, False])
def test_gradients_have_the_dtype_of_their_weight(emulate: bool) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(32, 96).bfloat16()
    model = nn.ModuleDict({"wq": nn.Linear(64, 96, bias=False)})
    apply_float8(model, Float8(scaling="tensorwise", layers=("*",), emulate=emulate))
    matrix: Any = model["wq"]
    maxima = []
    with Observer(
        lambda func, args, result: maxima.append(args[0].shape) if func is torch.ops.aten.max.default else None
    ):
        (found,) = torch.autograd.grad(matrix(x), matrix.weight, gradient, retain_graph=True)
    assert maxima == [(32, 64), (96, 64), (32, 96)]  # of each tensor once
    assert found.dtype == torch.float32
    deep, flat = rounded(gradient.float(), torch.float8_e5m2), rounded(x.detach().float(), torch.float8_e4m3fn)
    torch.testing.assert_close(found, deep.T @ flat)  # not rounded to bfloat16
    matrix.weight.data = matrix.weight.data.bfloat16()  # as FSDP gathers it
    (in_bfloat16,) = torch.autograd.grad(matrix(x), matrix.weight, gradient)
    assert torch.equal(in_bfloat16, found.bfloat16())


def test_frozen_inputs_and_weights_have_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"wq": nn.Linear(64, 96)})
    apply_float8(model, Float8(scaling="tensorwise", layers=("*",), emulate=True))
    x, matrix = torch.randn(32, 64, requires_grad=True), cast(Any, model["wq"])
    expected = torch.autograd.grad(matrix(x).square().sum(), (x, matrix.weight))
    for first, second, both in ((x, matrix.weight, expected), (matrix.weight, x, expected[::-1])):
        second.requires_grad_(False)
        with Operations() as operations:
            (found,) = torch.autograd.grad(matrix(x).square().sum(), first)
        second.requires_grad_()
        assert torch.equal(found, both[0])
        assert operations.counts["mm"] == 2  # the output, and one gradient


def test_selective_checkpointing_keeps_maxima() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(64, 96)})})
    apply_float8(model, Float8(scaling="tensorwise", layers=("*",), emulate=True))
    block = cast(Any, model["blocks"])
    apply_activation_checkpoint(block, mode="selective")
    with Operations() as operations:
        block["0"](torch.randn(32, 64)).sum().backward()
    assert operations.counts["max"] == 3  # of the input, the weight and the gradient


def test_operations_of_fsdp_and_of_initialization_keep_the_wrapper() -> None:
    linear = nn.ModuleDict({"wq": nn.Linear(16, 16)})
    apply_float8(linear, Float8(scaling="tensorwise", layers=("*",), emulate=True))
    wrap_weights(linear)
    assert type(linear.state_dict()["wq.weight"]) is Tensor
    shard: Any = linear["wq"].weight.detach()  # type: ignore[union-attr]
    kept = [
        shard, torch.empty_like(shard), shard.new_zeros(2, 16), shard[1:], shard.copy_(shard), shard.view(-1),
        shard.as_strided((2, 2), (2, 1)), shard.to(torch.bfloat16), *shard.split(9), shard.clone(),
    ]  # fmt: skip
    assert all(isinstance(each, Float8Shard) and each.weight_scale is shard.weight_scale for each in kept)
    stored = torch.empty(8, 4, dtype=torch.bfloat16, device="meta").t()[1:].requires_grad_()
    wrapper = Float8Shard(stored, shard.weight_scale)
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(wrapper, name) == getattr(stored, name), name
    assert (wrapper.stride(), wrapper.storage_offset()) == (stored.stride(), stored.storage_offset())
    assert type(shard + 1.0) is Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_cast_as_a_whole_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 64).to(dtype)
    weight[6, 5] = 5.0  # the largest, on the second rank
    expected: Any = to_float8(weight, WEIGHT, None)
    scale = cast(Any, SimpleNamespace(scale=expected._scale, updater=SimpleNamespace(update=lambda: None)))
    two_ranks = SimpleNamespace(size=lambda: 2)
    gathered = [
        Float8Shard(rows, scale).fsdp_pre_all_gather(two_ranks, weight.shape, None, nn.Module(), None)
        for rows in weight.split(4)
    ]
    assert [(data.shape, data.dtype) for (data,), _ in gathered] == [((4, 64), torch.uint8)] * 2
    data = torch.cat([data for (data,), _ in gathered])[:7]
    assert torch.equal(data, expected._data.view(torch.uint8))


def test_a_weight_that_lost_its_wrapper_is_an_error_at_the_first_forward_pass(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    apply_float8(model, Float8(scaling="tensorwise", layers=("*",), emulate=True))
    wrap_weights(model)
    model[1].weight = nn.Parameter(model[1].weight.detach() + 0.0)  # an operation that unwraps
    apply_fsdp(model, init_device_mesh("cpu", (1,)), compute_dtype=torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"^1\.weight was replaced after `wrap_weights`, and FSDP would all-gather it"
    ):
        model(torch.randn(4, 16))
    wrapped = nn.Sequential(nn.Linear(16, 16))
    apply_float8(wrapped, Float8(scaling="tensorwise", layers=("*",), emulate=True))
    wrap_weights(wrapped)
    apply_fsdp(wrapped, init_device_mesh("cpu", (1,)), compute_dtype=torch.bfloat16)
    for _ in range(2):
        wrapped(torch.randn(4, 16)).sum().backward()
