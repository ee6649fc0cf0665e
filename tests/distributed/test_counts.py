"""What makes a step slow without changing a number, counted: each shipped recipe's model, made small, under each layout.

A time would depend on the machine; these do not. Where the host would wait for a GPU is seen on a CPU too: it is where a
number is taken out of a tensor, or the size of a result depends on its values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics

from recipes import pretrain
from tests.pool import Pool
from tests.training import Operations, train_here
from titanlike.config import PretrainRecipe, load, to_toml
from titanlike.config.model_configs import LlamaConfig
from titanlike.models import blocks
from titanlike.models.llama import Llama
from titanlike.parallelisms.compile import apply_compile
from titanlike.verify import _toml, shrink

Ranks = Callable[[int], Pool]

FOLDER = Path(__file__).parents[2] / "train_configs"
PASSES = 2  # in a step, under any layout
WARM = 3  # the first step that nothing is excused in
STEPS = 4

# Operations that hand a number, or a size, to the host.
TO_THE_HOST = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "bincount", "repeat_interleave",
}  # fmt: skip
NOT_TALK = {"wait_tensor", "_wrap_tensor_autograd"}

# The recipes below are one of each kind; the others differ in sizes alone.
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
# Each layout with one recipe or two, and each recipe with one layout or more: a few in every run, the others in the second tier.
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
    """A shipped recipe, as `titanlike verify` makes it small, with all that may slow a step put back."""
    processes, dimensions = LAYOUTS[layout]
    keys = {f"parallelism.{key}": str(value) for key, value in dimensions.items()}
    recipe = load(PretrainRecipe, FOLDER / f"{name}.toml", keys)
    smaller = shrink(tomli.loads(to_toml(recipe)), processes, STEPS)
    smaller |= {
        "training.compute_dtype": recipe.training.compute_dtype,
        "training.global_batch_size": PASSES * processes,
        "training.local_batch_size": processes // (dimensions.get("replicate", 1) * dimensions.get("shard", 1)),
        "compile.mode": recipe.compile.mode,
        # Captures and partitions as the real compiler does, and leaves out the generating of code.
        "compile.backend": "aot_eager_decomp_partition",
        "activation_checkpoint.mode": recipe.activation_checkpoint.mode,
        "float8.scaling": recipe.float8.scaling,
        "float8.all_gather": recipe.float8.all_gather,
        "float8.emulate": recipe.float8.scaling != "none",
        "float8.skip_small": False,
        "optimizer.state_dtype": recipe.optimizer.state_dtype,
        "validation.interval": 0,
        "checkpoint.enabled": False,
        "metrics.interval": STEPS,
        "run.dir": str(folder),
        "run.name": "run",
    } | changes
    return load(PretrainRecipe, FOLDER / f"{name}.toml", keys | {key: _toml(value) for key, value in smaller.items()})


@contextmanager
def steps_watched(before: Callable[[int], None]) -> Iterator[None]:
    """Call something at the beginning of each step of the program, from its data on."""
    original = pretrain.BatchLoader.microbatches

    def watched(self: Any, step: int) -> Any:
        before(step)
        return original(self, step)

    pretrain.BatchLoader.microbatches = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        pretrain.BatchLoader.microbatches = original  # type: ignore[method-assign]


def _operations(recipe: PretrainRecipe) -> tuple[dict[str, int], dict[str, int]]:
    """All that the program does in one step after the first ones, up to the next one's data, and the bytes of its talk."""
    operations = Operations()

    def before(step: int) -> None:
        if step == WARM:
            operations.__enter__()
        elif step == WARM + 1:
            operations.__exit__(None, None, None)

    with steps_watched(before):
        train_here(recipe)
    return dict(operations.counts), dict(operations.bytes)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_host_never_waits_in_a_step(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    recipe = small(tmp_path, name, layout, **{"compile.mode": "none"})
    for counts, _ in ranks(LAYOUTS[layout][0]).run(_operations, recipe):
        assert sum(counts.values()) > 100
        assert {operation: counts[operation] for operation in TO_THE_HOST & counts.keys()} == {}


def _compiled(recipe: PretrainRecipe) -> tuple[int, int, int]:
    """Graphs compiled in the first steps and after them, and graph breaks."""
    counters.clear()
    graphs = {}

    def before(step: int) -> None:
        graphs[step] = counters["stats"]["unique_graphs"]

    with steps_watched(before):
        train_here(recipe)
    return graphs[WARM], counters["stats"]["unique_graphs"] - graphs[WARM], sum(counters["graph_break"].values())


# Compiling takes longest: fewer of the quick ones here.
COMPILED = [
    pytest.param(*case, marks=[] if case in (("llama3_8b_float8", "TP"), ("gpt2_124m", "FSDP")) else [pytest.mark.slow])
    for case in QUICK + MORE
    if case[0] not in ("debug", "study/baseline")
]


@pytest.mark.parametrize(("name", "layout"), COMPILED)
def test_nothing_is_compiled_again_and_no_graph_breaks(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    recipe = small(tmp_path, name, layout)
    for first, later, breaks in ranks(LAYOUTS[layout][0]).run(_compiled, recipe):
        assert first >= 1
        assert (later, breaks) == (0, 0)


BLOCKS = 3


@pytest.mark.parametrize("layout", ["FSDP", "TP", "CP", "PP"])
def test_ranks_talk_as_often_and_as_much_as_the_layout_needs(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    recipe = small(
        tmp_path, "llama3_8b", layout,
        **{"compile.mode": "none", "activation_checkpoint.mode": "none", "model.num_layers": BLOCKS},
    )  # fmt: skip
    shape = recipe.model
    tokens = recipe.training.seq_len * recipe.training.local_batch_size  # of a pass
    stream = 2 * tokens * shape.dim  # its bytes, in bfloat16
    embedding = shape.vocab_size * shape.dim
    head = embedding + shape.dim  # with the norm before it
    matrices = shape.dim**2 * 2 + 2 * shape.dim * shape.num_kv_heads * shape.head_dim + 3 * shape.dim * shape.ffn_dim
    weights = embedding + BLOCKS * (matrices + 2 * shape.dim) + head
    units = BLOCKS + 2  # that FSDP gathers, both ends among them
    expected: dict[str, tuple[int, int]] = {}  # by operation: times, bytes
    if layout in ("FSDP", "CP"):  # gathered for each pass, and all but the head once more for its way back
        expected["_allgather_base_"] = (PASSES * (2 * units - 1), PASSES * 2 * (2 * weights - head))
        expected["_reduce_scatter_base_"] = (PASSES * units, PASSES * 4 * weights)  # gradients in float32
    if layout == "TP":  # twice a block and once at each end, forward and backward
        moves = PASSES * 2 * (2 * BLOCKS + 1)
        expected["all_gather_into_tensor"] = expected["reduce_scatter_tensor"] = (moves, moves * stream)
        # The norms' gradients; three numbers a token for the loss.
        norms = 2 * BLOCKS + 1
        expected["all_reduce"] = (PASSES * (norms + 3), PASSES * (norms * 2 * shape.dim + (4 + 4 + 2) * tokens))
    if layout == "CP":  # keys and values
        moves = PASSES * 2 * BLOCKS
        half = stream * shape.num_kv_heads // shape.num_heads
        expected["all_gather_into_tensor"] = expected["reduce_scatter_tensor"] = (moves, moves * half)
    if layout == "PP":  # the stream one way, its gradient the other
        expected["send"] = expected["recv_"] = (PASSES, PASSES * stream)
    for counts, sizes in ranks(2).run(_operations, recipe):
        few = counts.pop("allreduce_", 0), sizes.pop("allreduce_", 0)
        assert few <= (4, 24), "loss, tokens, norm, and whether to stop: a number each"
        assert {name: (counts[name], sizes[name]) for name in sizes if name not in NOT_TALK} == expected


@pytest.mark.slow
def test_a_block_is_a_few_kernels_however_many_there_are() -> None:
    counts = []
    for num_blocks in (1, 3):
        torch._dynamo.reset()
        metrics.reset()
        model = Llama(
            LlamaConfig(dim=64, num_layers=num_blocks, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320)
        )
        apply_compile(model, blocks(model), mode="block")
        model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
        counts.append(metrics.generated_kernel_count)
    assert counts[0] == counts[1] > 0
    assert counts[0] <= 37  # loops of both passes with torch 2.13; more would mean that less is done in one go
