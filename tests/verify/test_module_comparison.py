"""How `titanlike verify` compares records of ranks, without processes. benchmarks/silent_bugs.py has what it says of them."""

import math
from typing import Any

import torch
from torch import Tensor

from titanlike.tools.verify import comparison as phases
from titanlike.tools.verify.comparison import ProcessRecord, compare, difference_of
from titanlike.tools.verify.diagnosis import Diagnosis, first_finding


def record(
    kind: str, step: int = 1, at: dict[str, int] | None = None, order: Any = (), **tensors: Tensor
) -> ProcessRecord:
    named = {name.replace("__", "."): each for name, each in tensors.items()}
    return ProcessRecord(at or {}, {(kind, step): named}, list(order))


def found(
    kind: str, one: dict[str, Tensor], *ranks: dict[str, Tensor], order: Any = (), dimension: str = "tensor"
) -> Diagnosis | None:
    sizes = {dimension: len(ranks)}
    comparisons = compare(
        record(kind, order=order, **one),
        [record(kind, at={dimension: number}, **each) for number, each in enumerate(ranks)],
        [each for each in sizes if each == "data"],
    )
    return first_finding(comparisons, sizes, [each for each in sizes if each == "data"])


def test_shards_may_be_of_different_sizes() -> None:
    whole = torch.randn(5, 3)
    assert found(phases.GRADIENTS, {"w": whole}, {"w": whole[:3]}, {"w": whole[3:]}) is None


def test_shards_over_two_dimensions() -> None:
    whole = torch.randn(8, 8)
    copies = []
    for data, rows in enumerate(whole.chunk(2, 0)):
        copies += [({"data": data, "tensor": tensor}, each) for tensor, each in enumerate(rows.chunk(2, 1))]
    assert difference_of("w", whole, copies, 0.0, 1e-6).size == 0.0


def test_rounding_of_a_gradient_that_is_zero_is_not_an_error() -> None:
    one = {"w": torch.ones(4), "bias": torch.tensor([1e-10, -1e-10])}
    assert found(phases.GRADIENTS, one, {"w": torch.ones(4), "bias": torch.tensor([-3e-10, 2e-9])}) is None


def test_missing_and_further_parameters_and_shapes() -> None:
    one = torch.randn(6)
    for ranks, text in (
        ({}, "w exists in one process only"),
        ({"w": one, "v": one}, "v exists under the layout only"),
        ({"w": torch.randn(5)}, "w has the shape (5,), in one process (6,)"),
    ):
        finding = found(phases.INITIAL, {"w": one}, ranks)
        assert finding and text in finding.detail


def test_nan_is_wrong() -> None:
    finding = found(phases.WEIGHTS, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.nan])})
    assert finding and finding.first.size == math.inf


def test_outputs_name_the_first_module_and_need_not_be_comparable() -> None:
    whole = torch.randn(4, 4)
    one = {"first": whole, "second": whole, "strange": torch.randn(3), "": whole}
    ranks = [{"first": part, "second": 3 * part, "strange": torch.randn(7), "": 3 * part} for part in whole.chunk(2)]
    finding = found(phases.OUTPUTS, one, *ranks, order=["first", "strange", "second", ""], dimension="data")
    assert finding and finding.first.name == "second"
    right = [each | {"": part} for each, part in zip(ranks, whole.chunk(2), strict=True)]
    assert found(phases.OUTPUTS, one, *right, dimension="data") is None
    partial = [{"first": each, "": whole} for each in (whole - 1.0, torch.ones(4, 4))]  # sums of a row-parallel layer
    assert found(phases.OUTPUTS, one, *partial) is None
