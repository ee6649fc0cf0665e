"""`titanlike verify` on modules and plans that are not ours: each silent bug is found, and its correct version accepted."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks import silent_bugs
from tests.launching import ROOT
from tests.pool import Ranks
from titanlike.config import UserError
from titanlike.tools.verify.comparison import ProcessRecord
from titanlike.tools.verify.module import Report, compare_records, load
from titanlike.tools.verify.options import parse_mesh
from titanlike.tools.verify.record import Functions, batch_dimensions, record

MEASURED = json.loads((ROOT / "benchmarks/results/silent_bugs_cpu.json").read_text())
NUMBER = r"\d\.\d+(e-\d+)?"


def net() -> nn.Module:
    return nn.Linear(8, 8)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, 8)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["shard"])


def compared(functions: Functions, layout: str, found: list[ProcessRecord]) -> Report:
    sizes = parse_mesh(layout)
    return compare_records(record(functions, steps=2), found, sizes, batch_dimensions(functions, sizes))


class Dropping(nn.Module):
    """Dropout of what has zeros, of whole channels, without zeros, and of attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(8, 32), nn.Linear(32, 8)
        kinds = {"relu": nn.Dropout, "channels": nn.Dropout1d, "alpha": nn.AlphaDropout}
        self.drop = kinds.get(kind, nn.Identity)(0.4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)  # (B, T, 32)
        if self.kind == "attention":
            heads = hidden[:, None]  # (B, H, T, D)
            return self.down(F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4, is_causal=True)[:, 0])
        return self.down(self.drop(hidden if self.kind == "alpha" else hidden.relu()))


def dropping_record(kind: str, layout: str, seeds: tuple[int, int]) -> ProcessRecord:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        if "data" in layout:
            fully_shard(model, mesh=mesh)
        torch.manual_seed(seeds[mesh.get_rank()])

    return record(Functions(lambda: Dropping(kind), batch, parallelize), silent_bugs.mesh_of(layout), steps=2)


@pytest.mark.parametrize(
    ("kind", "layout", "seeds", "problem"),
    [
        ("relu", "data=2", (7, 7), "is the same on the ranks of data"),
        ("relu", "data=2", (7, 8), ""),
        ("channels", "tensor=2", (7, 8), "differs on the ranks of tensor"),
        ("channels", "tensor=2", (7, 7), ""),
        ("alpha", "tensor=2", (7, 8), "differs on the ranks of tensor"),
        ("attention", "data=2", (7, 7), "is the same on the ranks of data"),
        ("attention", "data=2", (7, 8), ""),
    ],
)
def test_masks_of_dropout_are_compared_whatever_its_input(
    ranks: Ranks, kind: str, layout: str, seeds: tuple[int, int], problem: str
) -> None:
    result = compared(
        Functions(lambda: Dropping(kind), batch), layout, ranks(2).run(dropping_record, kind, layout, seeds)
    )
    assert (result.finding is not None) == bool(problem), str(result)
    assert not problem or re.search(f"dropout: the mask of .* {problem}", str(result)), str(result)


@pytest.mark.parametrize("name", silent_bugs.BUGS)
def test_a_silent_bug_is_found(ranks: Ranks, name: str) -> None:
    accepted = silent_bugs.check(name, False, ranks)
    assert accepted.finding is None, str(accepted)
    result = silent_bugs.check(name, True, ranks)
    assert result.finding is not None
    # The file has what is printed; rounding may differ on another machine.
    assert re.sub(NUMBER, "0", str(result.finding)) == re.sub(NUMBER, "0", MEASURED["bugs"][name])


def test_all_silent_bugs_are_recorded() -> None:
    assert list(MEASURED["bugs"]) == list(silent_bugs.BUGS), f"record again: {MEASURED['command']}"
    assert len({each.link for each in silent_bugs.BUGS.values()}) == len(silent_bugs.BUGS) >= 20


def refused(functions: Functions, layout: str = "") -> str:
    with pytest.raises(UserError) as caught:
        if layout:
            batch_dimensions(functions, parse_mesh(layout))
        else:
            record(functions, steps=1)
    return str(caught.value)


def rows_record() -> str:
    with pytest.raises(UserError) as caught:
        record(Functions(net, lambda step: torch.randn(3, 8), shard), silent_bugs.mesh_of("shard=2"), steps=1)
    return str(caught.value)


class Returns(nn.Linear):
    """Returns a value, whatever it gets."""

    def __init__(self, value: Any) -> None:
        super().__init__(1, 1)
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


def test_all_generators_are_seeded(ranks: Ranks) -> None:
    """The model and the batch of a rank are those of one process, whichever generator they are drawn with."""
    for draw in (random.random, np.random.rand, lambda: float(torch.rand(()))):

        class Noisy(nn.Linear):
            def forward(self, x: Tensor, draw: Any = draw) -> Tensor:
                return super().forward(x) + draw()

        assert "the loss of one process depends on the random state" in refused(
            Functions(lambda noisy=Noisy: noisy(8, 8), batch)
        )
    found = ranks(2).run(drawn_record)
    result = compared(Functions(drawn_model, drawn_batch), "data=2", found)
    assert result.finding is None, str(result)


def drawn_model() -> nn.Module:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.random.randn(8, 8)))
        model.bias.fill_(random.random())
    return model


def drawn_batch(step: int) -> Tensor:
    return torch.from_numpy(np.random.randn(8, 8)).float() * random.random()


def drawn_record() -> ProcessRecord:
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    functions = Functions(drawn_model, drawn_batch, lambda model, mesh: fully_shard(model, mesh=mesh) and None)
    return record(functions, silent_bugs.mesh_of("data=2"), steps=2)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (Functions(lambda: nn.Linear(8, 8, device="meta"), batch), "on the meta device; return it with"),
        (Functions(lambda: 3, batch), "returned int; return a torch.nn.Module"),  # type: ignore[arg-type,return-value]
        (Functions(lambda: Returns({}), batch), "returned dict, and no floating-point tensor"),
        (Functions(lambda: Returns(torch.arange(3)), batch), "returned a tensor of torch.int64, and no floating-point"),
        (Functions(lambda: Returns(torch.rand(())), lambda step: torch.ones(1)), "the loss does not depend on the parameters"),
        (Functions(net, batch, loss=lambda model, batch: model(batch)), "the loss has the shape (8, 4, 8) and is torch.float32"),
        (Functions(net, batch, clip=lambda model: None), "clip(model) returned NoneType; return the norm"),
    ],
)  # fmt: skip
def test_what_a_function_returns_is_checked(functions: Functions, message: str) -> None:
    assert message in refused(functions)


def test_a_batch_that_does_not_fit_the_layout_is_refused(ranks: Ranks) -> None:
    assert "layout context=2: define shard_batch(batch, mesh)" in refused(Functions(net, batch), "context=2")
    assert "a batch of 3 rows is not divisible by the 2 ranks" in ranks(2).run(rows_record)[0]


def test_functions_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    file = tmp_path / "build_of_test.py"
    file.write_text("from torch import nn\ndef model():\n    return nn.Linear(2, 2)\n")
    for target, message in (
        (f"{file}:modl", "has no function modl, which returns the module; did you mean model?"),
        (f"{file}:model", "has no function batch: define batch(step), which returns the global batch"),
        (f"{tmp_path}/nope.py:model", "does not exist; give a Python file"),
    ):
        with pytest.raises(UserError) as caught:
            load(target)
        assert message in str(caught.value)


@pytest.mark.parametrize("layout", ["tensor", "tensor=1", "tensor=0", "tensor=2,tensor=2", "2=2", "tensor=64", ""])
def test_an_invalid_mesh_is_reported(layout: str) -> None:
    with pytest.raises(UserError, match="--layout"):
        parse_mesh(layout)
