"""Handwritten kernels without a GPU: in Triton's interpreter against what they replace, and compiled for a GPU."""

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.launching import ROOT
from titanlike.losses import IGNORE
from titanlike.losses.cross_entropy import cross_entropy_inplace

pytest.importorskip("triton", reason="needs a torch with Triton")


def ptx(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> str:
    """Returns the code of a kernel for an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    assert kernel.cache_key  # reads what the function names, as a launch does
    signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize("aligned", [False, True])
def test_adamw_loads_16_bytes_where_it_can(aligned: bool) -> None:
    from titanlike.optim.fused_adamw import DTYPES, OPTIONS, SIZE, _update

    types = {"pointers": "*i64", "chunks": "*i32", "factor": "*fp32"}
    constants = {"DTYPE": DTYPES[torch.float32], "ALIGNED": aligned, "SIZE": SIZE}
    assert ("ld.global.v4" in ptx(_update, types, constants, OPTIONS)) == aligned


def test_cross_entropy_compiles_for_a_gpu() -> None:
    from titanlike.losses.fused_cross_entropy import LANES, OPTIONS, WIDTH, _rows

    types = {"logits": "*bf16", "labels": "*i64"} | dict.fromkeys(("scales", "losses", "z_losses"), "*fp32")
    code = ptx(_rows, types, {"SIZE": 128256, "SCALES": 0, "LANES": LANES, "WIDTH": WIDTH}, OPTIONS)
    assert "ex2.approx" in code


def test_cross_entropy_equals_what_it_replaces() -> None:
    """In a process of its own: Triton decides at its import whether it interprets."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare_cross_entropy() -> None:
    """For sizes with and without a rest, labels at both ends, rows without a label, huge and missing logits."""
    from titanlike.losses import fused_cross_entropy

    fused_cross_entropy.LANES = 16
    scales = (None, torch.rand(5), torch.tensor(0.3).expand(5))
    kinds = ((torch.float32, 0.1, 1e-5), (torch.bfloat16, None, 1e-2))
    cases = [*itertools.product((100, 1000, 1024), scales[:1], kinds), *itertools.product((100,), scales[1:], kinds)]
    for size, scale, (dtype, z_loss, rtol) in cases:
        labels = torch.tensor([0, IGNORE, size - 1, 7, 50])
        logits = (torch.randn(5, size) * torch.tensor([5.0, 5.0, 1e4, 5.0, 0.1])[:, None]).to(dtype)
        logits[3, 20:60] = float("-inf")
        found, expected = logits.clone(), logits.clone()
        one = fused_cross_entropy.cross_entropy_inplace(found, labels, None, z_loss, 0.0, scale)
        other = cross_entropy_inplace(expected, labels, None, z_loss, 0.0, scale)
        torch.testing.assert_close((found, *one), (expected, *other), rtol=rtol, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    compare_cross_entropy()
