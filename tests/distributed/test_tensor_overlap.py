"""Tensor-parallel collectives: copies that they need, and what async tensor parallelism makes of the compiled graphs."""

import copy
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import compile_fx, config
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch.distributed import _symmetric_memory
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training import GPT_, LLAMA
from titanlike.config.sections import Float8
from titanlike.float8.linear import apply_float8
from titanlike.float8.tensor_parallel import share_scales
from titanlike.models.common.init import initialize
from titanlike.models.common.rope import rotary_angles
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.tensor import apply_tensor
from titanlike.parallelisms.tensor_overlap import overlap_tensor
from titanlike.utils import compat

TENSOR, LENGTH = 2, 32


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """A process group of ranks that do not exist: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TENSOR)
    yield
    dist.destroy_process_group()


def fused_graphs(model_config: Any, batch: int, float8: bool, mesh: Any) -> list[Counter[str]]:
    """Returns the operations in the forward and the backward graph of a tensor-parallel block, as inductor lowers them."""
    graphs = []

    def lower(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        fused = copy.deepcopy(graph)
        compile_fx.view_to_reshape(fused)
        mode = detect_fake_mode([node.meta["val"] for node in fused.graph.nodes if node.op == "placeholder"])
        with V.set_fake_mode(mode), config.patch(_micro_pipeline_tp=True):
            post_grad.post_grad_passes(fused, False)
        targets = (node.target for node in fused.graph.nodes if node.op == "call_function")
        graphs.append(Counter(str(target).rpartition(".")[0].rpartition(".")[2] for target in targets))
        return make_boxed_func(graph.forward)  # the unfused one: there are no other ranks

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=lower)

    with torch.device("meta"):
        model: Any = build_model(model_config)
    if float8:
        apply_float8(model, Float8(scaling="tensorwise", layers=("*",)))
    apply_tensor(model, model.tensor_plan, mesh)
    overlap_tensor(model, SimpleNamespace(device_type="cuda", get_group=mesh.get_group))  # type: ignore[arg-type]
    if float8:
        share_scales(blocks(model)["0"], mesh.get_group(), overlap=True)
    initialize(model, torch.device("cpu"), 0)
    block: Any = blocks(model)["0"]
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    x = torch.randn(batch, LENGTH // TENSOR, model_config.dim, requires_grad=True)
    extra = [rotary_angles(model_config, torch.arange(LENGTH)[None])] if model_config is LLAMA else []
    block(x, *extra).sum().backward()
    torch._dynamo.reset()
    return graphs


@pytest.mark.filterwarnings("ignore:erase_node.* on an already erased node")  # torch 2.11
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
@pytest.mark.parametrize(
    ("model_config", "batch", "float8"),
    [
        (LLAMA, 1, False),
        pytest.param(LLAMA, 2, True, marks=pytest.mark.slow),
        pytest.param(GPT_, 1, False, marks=pytest.mark.slow),
    ],
    ids=["llama", "llama of two sequences float8", "gpt"],
)
def test_async_tensor_parallelism_fuses_the_collectives_of_a_block(
    fake_ranks: None, monkeypatch: pytest.MonkeyPatch, model_config: Any, batch: int, float8: bool
) -> None:
    """The pass of the compiler runs on a CPU; what it makes of the graphs can only be run on GPUs."""
    mesh = build_mesh("cpu", tensor=TENSOR).tensor
    enabled: list[str] = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(compat, "enable_async_tensor_parallel", enabled.append)
    with _symmetric_memory._test_mode():
        forward, backward = fused_graphs(model_config, batch, float8, mesh)
    assert enabled == [mesh.get_group().group_name]
    # Forward: the gathers before wq, wk, wv and before w1, w3; the reductions after wo and w2. torch fuses no matmul with a bias.
    matmul = "scaled_matmul" if float8 else "matmul"
    gathers = 2 if model_config is LLAMA else 0
    assert forward[f"fused_all_gather_{matmul}"] == gathers
    assert forward[f"fused_{matmul}_reduce_scatter"] == 2
    assert forward["all_gather_into_tensor"] == 2 - gathers
    assert forward["mm"] == forward["_scaled_mm"] == forward["reduce_scatter_tensor"] == 0
    # Backward: the gathers of the gradients of wo's and w2's outputs. The gradient of a gathered input is a sum over several
    # matmuls, whose reduction torch does not fuse either.
    assert backward[f"fused_all_gather_{matmul}"] == 2
    assert backward["all_gather_into_tensor"] == 0
