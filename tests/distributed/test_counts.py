"""Performance regressions that do not depend on the machine, for shrunk shipped recipes under each layout.

Counts host synchronizations, graph breaks, recompilations and collectives. A host synchronization with a GPU is detected on a CPU
too: an operation that reads a value from a tensor, or whose output size depends on values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tomli
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pool
from tests.training import Operations, train_on_rank
from titanlike.config import PretrainRecipe, load, to_toml
from titanlike.data.batches.loader import BatchLoader
from titanlike.tools.small_recipe import shrink
from titanlike.tools.verify import _toml

Ranks = Callable[[int], Pool]
Mode = TypeVar("Mode", bound=TorchDispatchMode)

FOLDER = Path(__file__).parents[2] / "train_configs"
MICROBATCHES = 2  # per step, under any layout
WARM = 3  # the first step after warm-up
STEPS = 4

# Operations that return a value or a size to the host.
SYNCHRONIZING = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "bincount", "repeat_interleave",
}  # fmt: skip
NOT_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}

# The recipes below cover each kind; others differ only in sizes.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "FSDP": (2, dict(shard=2)),
    "TP": (2, dict(tensor=2)),
    "CP": (2, dict(context=2)),
    "PP": (2, dict(pipeline=2)),
    "HSDP": (4, dict(replicate=2, shard=2)),
    "TP-FSDP": (4, dict(tensor=2, shard=2)),
    "CP-TP": (4, dict(context=2, tensor=2)),
    "PP-TP": (4, dict(pipeline=2, tensor=2)),
}
# Each layout with one or two recipes, and each recipe with at least one layout. QUICK is the default run, MORE the slow run.
QUICK = [
    ("llama3_8b_float8", "one"),
    ("llama3_8b_float8", "TP"),
    ("gpt2_124m", "FSDP"),
    ("llama3_1b", "CP"),
    ("llama3_8b", "PP"),
]
MORE = [
    ("debug", "one"), ("gpt2_124m", "CP-TP"), ("llama3_1b", "PP-TP"), ("llama3_8b", "HSDP"), ("llama3_8b_float8", "TP-FSDP"),
    ("llama3_8b_float8", "PP-TP"), ("llama3_70b", "CP-TP"), ("study/baseline", "TP-FSDP"),
]  # fmt: skip
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] if case in MORE else [], id="-".join(case)) for case in QUICK + MORE
]


def small(folder: Path, name: str, layout: str, **changes: Any) -> PretrainRecipe:
    """Returns a shipped recipe, shrunk like `titanlike verify` does, with all settings that affect speed restored."""
    processes, dimensions = LAYOUTS[layout]
    keys = {f"parallelism.{key}": str(value) for key, value in dimensions.items()}
    recipe = load(PretrainRecipe, FOLDER / f"{name}.toml", keys)
    smaller = shrink(tomli.loads(to_toml(recipe)), processes, STEPS)
    smaller |= {
        "training.compute_dtype": recipe.training.compute_dtype,
        "training.global_batch_size": MICROBATCHES * processes,
        "training.local_batch_size": processes // (dimensions.get("replicate", 1) * dimensions.get("shard", 1)),
        "compile.mode": recipe.compile.mode,
        # Traces and partitions like inductor, without code generation.
        "compile.backend": "aot_eager_decomp_partition",
        "activation_checkpoint.mode": recipe.activation_checkpoint.mode,
        "float8.scaling": recipe.float8.scaling,
        "float8.all_gather": recipe.float8.all_gather,
        "float8.emulate": recipe.float8.scaling != "none",
        "float8.layers": ["*"],
        "optimizer.state_dtype": recipe.optimizer.state_dtype,
        "validation.interval": 0,
        "checkpoint.enabled": False,
        "metrics.interval": STEPS,
        "run.dir": str(folder),
        "run.name": "run",
    } | changes
    return load(PretrainRecipe, FOLDER / f"{name}.toml", keys | {key: _toml(value) for key, value in smaller.items()})


@contextmanager
def before_each_step(before: Callable[[int], None]) -> Iterator[None]:
    """Calls `before(step)` before each step reads its data."""
    original = BatchLoader.microbatches

    def patched(self: Any, step: int) -> Any:
        before(step)
        return original(self, step)

    BatchLoader.microbatches = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchLoader.microbatches = original  # type: ignore[method-assign]


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


def _operations(recipe: PretrainRecipe) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the operations of one step after warm-up, and the bytes of its collectives."""
    operations = _in_one_step(Operations(), recipe)
    return dict(operations.counts), dict(operations.bytes)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_no_host_synchronization_in_a_step(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    recipe = small(tmp_path, name, layout, **{"compile.mode": "none"})
    for counts, _ in ranks(LAYOUTS[layout][0]).run(_operations, recipe):
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


# Compiling is slow, so the default and slow runs have fewer of these.
COMPILED_QUICK = [("llama3_8b_float8", "TP"), ("gpt2_124m", "FSDP")]
COMPILED_MORE = [("llama3_8b_float8", "TP-FSDP"), ("llama3_70b", "CP-TP"), ("llama3_1b", "PP-TP")]
COMPILED = [
    pytest.param(
        *case,
        marks=[] if case in COMPILED_QUICK else [pytest.mark.slow if case in COMPILED_MORE else pytest.mark.every],
    )
    for case in QUICK + MORE
    if case[0] not in ("debug", "study/baseline")
]


@pytest.mark.parametrize(("name", "layout"), COMPILED)
def test_no_recompilation_and_no_graph_breaks(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    recipe = small(tmp_path, name, layout)
    for first, later, breaks in ranks(LAYOUTS[layout][0]).run(_compiled, recipe):
        assert first >= 1
        assert (later, breaks) == (0, 0)


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param("llama3_8b", "TP", marks=pytest.mark.slow), ("llama3_8b", "CP"), ("llama3_8b_float8", "TP")],
)
def test_selective_checkpointing_repeats_no_collective(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    collectives = []
    for mode in ("none", "selective"):
        options = {"compile.mode": "none", "activation_checkpoint.mode": mode}
        ((counts, sizes), _) = ranks(2).run(_operations, small(tmp_path, name, layout, **options))
        collectives.append({operation: counts[operation] for operation in sizes if operation not in NOT_COLLECTIVES})
    without, selective = collectives
    assert selective == without
    assert without["all_gather_into_tensor"] > 0
