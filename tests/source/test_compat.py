"""Private APIs of torch: the installed version has all of them, and one that lacks some is reported by name."""

import ast
import inspect
from typing import Any

import pytest
import torch

from titanlike.tools.planning import torch_internals
from titanlike.utils import compat


def test_the_installed_torch_has_every_private_api() -> None:
    assert compat.missing((*compat.REQUIRED, *torch_internals.REQUIRED)) == []


def test_a_torch_that_lacks_one_is_named_with_what_needs_it() -> None:
    required = [
        ("torch", "_foreach_norm", "norms"),
        ("torch", "Tensor._nope", "one"),
        ("torch._nope", "value", "other"),
    ]
    assert compat.missing(required) == [
        f"torch {torch.__version__} has no torch.Tensor._nope, which is required for: one",
        f"torch {torch.__version__} has no torch._nope.value, which is required for: other",
    ]


@pytest.mark.parametrize("module", [compat, torch_internals])
def test_every_private_name_is_probed_or_optional(module: Any) -> None:
    """Names that `REQUIRED` does not list are read by `getattr` or `hasattr`, or set: their absence has no effect."""
    probed = {part for name, path, _ in module.REQUIRED for part in f"{name}.{path}".split(".")}
    optional = {
        "_get_init_p2p_neighbors_ops", "_upstream_group", "_partial_reduce_output", "_unsharded_param", "_input_metadata",
    }  # only set, read by `hasattr`, or probed when used  # fmt: skip
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    # `_timeout` is an attribute of an instance, and `ops.aten` resolves names when they are used: both have tests that run them.
    assert read - optional - {"_timeout", "_scaled_dot_product_flash_attention"} <= probed


def test_buffers_are_not_donated_to_a_backward_pass_that_runs_twice() -> None:
    with torch._functorch.config.patch(donated_buffer=True):
        compat.disable_donated_buffers()
        assert not torch._functorch.config.donated_buffer


class Stage:
    """Detaches its outputs after the first of two backward passes, as torch's pipeline stages do."""

    def backward_maybe_with_nosync(self, kind: str, arguments: dict[str, Any], last_backward: bool) -> Any:
        for output in arguments["stage_output"]:
            output.detach_()
        return (), [{}]


def test_a_stage_keeps_its_graph_for_the_second_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails with torch 2.11 if the graph is not kept."""
    monkeypatch.setattr(compat, "functions_outlive_their_graph", lambda: False)
    stage, x = Stage(), torch.zeros(1, requires_grad=True)
    compat.keep_graph_for_weights(stage)
    output = compat._Identity.apply(x)
    node = output.grad_fn
    _, groups = stage.backward_maybe_with_nosync("input", {"stage_output": [output]}, last_backward=False)
    assert len(groups[0]["nodes"]) == 1
    edge = torch.autograd.graph.GradientEdge(node, 0)
    assert torch.autograd.grad([edge], x, torch.full((1,), 3.0))[0] == 3.0
