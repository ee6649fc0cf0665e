"""Performance regressions that do not depend on the machine, for shrunk shipped recipes under each layout.

Counts host synchronizations, graph breaks, recompilations and collectives. A host synchronization with a GPU is detected on a CPU
too: an operation that reads a value from a tensor, or whose output size depends on values.
"""

from pathlib import Path
from typing import TypeVar

import pytest
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Ranks
from tests.shrunk import LAYOUTS, WARM, before_each_step, small
from tests.training import Operations, train_on_rank
from titanlike.recipe import PretrainRecipe

Mode = TypeVar("Mode", bound=TorchDispatchMode)


# Operations that return a value or a size to the host.
SYNCHRONIZING = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "bincount", "repeat_interleave",
}  # fmt: skip

# Each layout with one or two recipes, and each recipe with at least one layout.
CASES = [
    ("llama3_8b_float8", "TP"),
    ("gpt2_124m", "FSDP"),
    ("llama3_1b", "CP"),
    ("llama3_8b", "PP"),
    pytest.param("llama3_1b", "PP-TP", marks=pytest.mark.slow),
    pytest.param("llama3_8b", "HSDP", marks=pytest.mark.slow),
    pytest.param("llama3_8b_float8", "TP-FSDP", marks=pytest.mark.slow),
    pytest.param("llama3_70b", "CP-TP", marks=pytest.mark.slow),
    pytest.param("study/baseline", "TP-FSDP", marks=pytest.mark.slow),
]


def _in_one_step(mode: Mode, recipe: PretrainRecipe) -> Mode:
    """Runs the recipe with the dispatch mode in one step after warm-up."""

    def before(step: int) -> None:
        if step == WARM:
            mode.__enter__()
        elif step == WARM + 1:
            mode.__exit__(None, None, None)

    with before_each_step(before):
        train_on_rank(recipe)
    return mode


def _operations(recipe: PretrainRecipe) -> dict[str, int]:
    """Returns the operations of one step after warm-up."""
    return dict(_in_one_step(Operations(), recipe).counts)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_no_host_synchronization_in_a_step(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    recipe = small(tmp_path, name, layout, **{"compile.mode": "none"})
    for counts in ranks(LAYOUTS[layout][0]).run(_operations, recipe):
        assert sum(counts.values()) > 100
        assert {operation: counts[operation] for operation in SYNCHRONIZING & counts.keys()} == {}


def _compiled(recipe: PretrainRecipe) -> tuple[int, int, int]:
    """Returns the graphs compiled during and after warm-up, and the graph breaks."""
    counters.clear()
    graphs = {}

    def before(step: int) -> None:
        graphs[step] = counters["stats"]["unique_graphs"]

    with before_each_step(before):
        train_on_rank(recipe)
    return graphs[WARM], counters["stats"]["unique_graphs"] - graphs[WARM], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2_124m", "FSDP"),
        pytest.param("llama3_8b_float8", "TP", marks=pytest.mark.slow),
        pytest.param("llama3_70b", "CP-TP", marks=pytest.mark.slow),
    ],
)
def test_no_recompilation_and_no_graph_breaks(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    recipe = small(tmp_path, name, layout)
    for first, later, breaks in ranks(LAYOUTS[layout][0]).run(_compiled, recipe):
        assert first >= 1
        assert (later, breaks) == (0, 0)
