"""What `titanlike verify` says of records of ranks, without processes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlike.tools.verify import comparison as phases
from titanlike.tools.verify.comparison import Comparison, Difference, ProcessRecord, compare, difference_of
from titanlike.tools.verify.diagnosis import Diagnosis, first_finding, shown_factor, usual_cause

SIZES = {"data": 2, "tensor": 4}


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


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (2.0, "2"),
        (0.5, "1/2"),
        (1 / 3, "1/3"),
        (-1.0, "-1"),
        (-0.25, "-1/4"),
        (1e-5, "0"),
        (1.4142, "1.414"),
        (2.1, "2.1"),
        (0.45, "0.45"),
        (7.9999, "8"),
    ],
)
def test_factors_are_shown_as_a_reader_knows_them(factor: float, text: str) -> None:
    assert shown_factor(factor) == text


def test_shards_are_assembled_along_the_dimension_that_agrees() -> None:
    whole = torch.randn(8, 8)
    for shards in (whole.chunk(2, 0), whole.chunk(2, 1)):
        assert found(phases.GRADIENTS, {"w": whole}, *({"w": shard} for shard in shards)) is None
    gate, up = whole.chunk(2)
    fused = [torch.cat(each) for each in zip(gate.chunk(2), up.chunk(2), strict=True)]
    assert found(phases.GRADIENTS, {"w": whole}, *({"w": shard} for shard in fused)) is None


def test_shards_may_be_of_different_sizes() -> None:
    whole = torch.randn(5, 3)
    assert found(phases.GRADIENTS, {"w": whole}, {"w": whole[:3]}, {"w": whole[3:]}) is None


def test_an_output_that_is_reduced_over_the_rows_of_each_rank_is_not_compared() -> None:
    one, *ranks = ({"": torch.tensor(each)} for each in (2.0, 1.0, 3.0))
    assert found(phases.OUTPUTS, one, *ranks, dimension="data") is None
    assert found(phases.OUTPUTS, one, *ranks) is not None


def test_shards_over_two_dimensions() -> None:
    whole = torch.randn(8, 8)
    copies = []
    for data, rows in enumerate(whole.chunk(2, 0)):
        copies += [({"data": data, "tensor": tensor}, each) for tensor, each in enumerate(rows.chunk(2, 1))]
    assert difference_of("w", whole, copies, 0.0, 1e-6).size == 0.0


@pytest.mark.parametrize(("factor", "text"), [(2.0, "w is 2 times"), (-1.0, "w is -1 times"), (0.0, "w is 0 times")])
def test_a_multiple(factor: float, text: str) -> None:
    one = torch.randn(4, 4)
    finding = found(phases.GRADIENTS, {"w": one}, {"w": factor * one}, {"w": factor * one})
    assert finding and text in finding.detail


def test_rounding_of_a_gradient_that_is_zero_is_not_an_error() -> None:
    one = {"w": torch.ones(4), "bias": torch.tensor([1e-10, -1e-10])}
    assert found(phases.GRADIENTS, one, {"w": torch.ones(4), "bias": torch.tensor([-3e-10, 2e-9])}) is None


def test_copies_that_are_not_reduced() -> None:
    parts = torch.randn(2, 4)
    for combined, one in (("sum", parts.sum(0)), ("mean", parts.mean(0))):
        finding = found(phases.GRADIENTS, {"w": one, "v": one}, *({"w": part, "v": one} for part in parts))
        assert finding and finding.first.across == ("tensor",) and finding.first.combined == combined
        assert (
            f"w differs between the ranks of tensor; the {combined} over them is that of one process" in finding.detail
        )
        assert finding.detail.endswith("(the other one agrees)")


def test_the_first_gradient_is_the_last_of_the_network() -> None:
    one = {name: torch.randn(3) for name in ("c", "a", "b")}
    wrong = {name: 2 * each for name, each in one.items()}
    for kind, first in ((phases.GRADIENTS, "c"), (phases.WEIGHTS, "a")):
        finding = found(kind, one, wrong, order=["a", "b", "c"])
        assert finding and finding.first.name == first
        assert "(all 3 are wrong, in the same way)" in finding.detail


def test_a_part_that_is_wrong() -> None:
    one = torch.randn(6, 6)
    rows, columns = one.clone(), one.clone()
    rows[2:4] += torch.randn(2, 6)
    columns[:, 5:] += 1.0
    for wrong, part in ((rows, "[2:4]"), (columns, "[:, 5:6]")):
        finding = found(phases.INITIAL, {"w": one}, {"w": wrong})
        assert finding and f"w is wrong in {part}" in finding.detail


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


def test_names_of_a_tied_weight_are_copies_of_it() -> None:
    parts = torch.randn(2, 4)
    one = record(phases.GRADIENTS, embed=parts.sum(0))
    one.ties = {"head": "embed"}
    ranks = [
        record(phases.GRADIENTS, at={"pipeline": 0}, embed=parts[0]),
        record(phases.GRADIENTS, at={"pipeline": 1}, head=parts[1]),
    ]
    finding = first_finding(compare(one, ranks), {"pipeline": 2}, [])
    assert finding and "embed differs between the modules that share it; the sum over them is" in finding.detail
    for each, name in zip(ranks, ("embed", "head"), strict=True):
        each.tensors[phases.GRADIENTS, 1][name] = parts.sum(0)
    assert first_finding(compare(one, ranks), {"pipeline": 2}, []) is None


@pytest.mark.parametrize(("losses", "is_equal"), [((1.0, 3.0), True), ((0.5, 1.5), True), ((1.0, 2.0), False)])
def test_losses_may_be_means_or_parts_of_the_batch(losses: tuple[float, float], is_equal: bool) -> None:
    ranks = [{"loss": torch.tensor(each)} for each in losses]
    assert (found(phases.LOSS, {"loss": torch.tensor(2.0)}, *ranks, dimension="data") is None) == is_equal


def test_losses_of_ranks_with_one_batch_agree() -> None:
    finding = found(phases.LOSS, {"loss": torch.tensor(2.0)}, {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(3.0)})
    assert finding and "loss differs between the ranks of tensor" in finding.detail


@pytest.mark.parametrize(
    ("kind", "difference", "num_wrong", "text"),
    [
        (phases.GRADIENTS, Difference("w", 1.0, 2.0), 4, "summed over the 2 ranks that share the batch"),
        (phases.GRADIENTS, Difference("w", 1.0, 0.5), 4, "divided by 2 twice"),
        (phases.GRADIENTS, Difference("w", 1.0, 4.0), 1, "summed over tensor"),
        (phases.GRADIENTS, Difference("w", 1.0, 0.25), 1, "averaged over tensor"),
        (phases.GRADIENTS, Difference("w", 1.0, 2.0), 1, "that of an expert"),
        (phases.GRADIENTS, Difference("w", 1.0, 8.0), 4, "8 micro-batches are accumulated"),
        (phases.GRADIENTS, Difference("w", 1.0, -1.0), 4, "the sign"),
        (phases.GRADIENTS, Difference("w", 1.0, 1.3), 4, "scaled twice"),
        (phases.GRADIENTS, Difference("w", 1e-3), 4, "low precision"),
        (phases.GRADIENTS, Difference("w", 1.0, part="[0:1]"), 1, "a part of it is lost"),
        (phases.GRADIENTS, Difference("w", 1.0, across=("data",), combined="mean"), 1, "its own part of the batch: average it"),
        (phases.OUTPUTS, Difference("w", 1.0, 4.0), 1, "summed over 4 ranks"),
        (phases.OUTPUTS, Difference("w", 1.0, across=("tensor",)), 1, "not all-reduced over tensor"),
        (phases.LOSS, Difference("loss", 1.0, 1.1), 1, "the outputs agree"),
        (phases.NORM, Difference("norm", 1.0, 1.1), 1, "squares of replicated gradients"),
        (phases.WEIGHTS, Difference("w", 1.0, across=("data",)), 1, "copies are updated otherwise"),
        (phases.INITIAL, Difference("w", 1.0), 1, "a seed per rank"),
        (phases.BUFFERS, Difference("w", 1.0), 1, "its own part of the batch"),
    ],
)  # fmt: skip
def test_usual_causes(kind: str, difference: Difference, num_wrong: int, text: str) -> None:
    comparison = Comparison(kind, 1, 4, 1.0, (difference,) * num_wrong)
    assert text in usual_cause(comparison, difference, SIZES, ["data"])


def test_dropout_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, masks = torch.randn(2, 64, generator=generator), torch.rand(2, 64, generator=generator) > 0.5

    def finding(same_input: bool, same_mask: bool) -> Diagnosis | None:
        ranks = []
        for rank in range(2):
            each = record(phases.DROPOUT, 0, {"tensor": rank}, **{"drop #0": masks[0 if same_mask else rank]})
            each.dropout_inputs = {"drop #0": inputs[0 if same_input else rank]}
            ranks.append(each)
        return first_finding(compare(ProcessRecord(), ranks), {"tensor": 2}, [])

    assert finding(True, True) is None and finding(False, False) is None
    assert "the mask of drop differs on the ranks of tensor" in str(finding(True, False))
    assert "the mask of drop is the same on the ranks of tensor" in str(finding(False, True))
