"""T5 under every kind of layout that it has: parity with one process, on corrupted spans and on pairs of texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity import COMPILED, DEFAULT, EVERY, FULL, MUON, SELECTIVE, SLOW, Parity, Tier, parallelism_of, rows_of
from tests.training import T5, tiny

# The tier, the layout, the number of sequences in a micro-batch, and other sections of a recipe.
LAYOUTS: dict[str, tuple[Tier, dict[str, Any], int, dict[str, Any]]] = {
    "FSDP": (DEFAULT, dict(shard=2), 2, {}),
    "DDP": (EVERY, dict(replicate=2, shard=1), 2, {}),
    "HSDP": (SLOW, dict(replicate=2, shard=2), 1, {}),
    "TP": (DEFAULT, dict(tensor=2), 4, {}),
    "TP of 4": (EVERY, dict(tensor=4), 4, {}),
    "TP x FSDP": (EVERY, dict(tensor=2, shard=2), 2, {}),
    "TP x FSDP, full checkpointing": (SLOW, dict(tensor=2, shard=2), 2, FULL),
    "TP x FSDP, compiled, selective": (EVERY, dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "FSDP, compiled": (EVERY, dict(shard=2), 2, COMPILED),
    "TP x FSDP, Muon": (EVERY, dict(tensor=2, shard=2), 2, {"optimizer": MUON}),
    # With pairs of texts.
    "FSDP, pairs": (EVERY, dict(shard=2), 2, {}),
    "TP, pairs": (DEFAULT, dict(tensor=2), 4, {}),
    "TP, compiled, selective, pairs": (SLOW, dict(tensor=2), 4, COMPILED | SELECTIVE),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A section of data with pairs of several lengths."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [
        json.dumps({"source": f"{number} " * (1 + number % 7), "target": f"{number * number} " * (1 + number % 3)})
        for number in range(200)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    paths = {"path": str(folder / "pairs.jsonl"), "cache": str(folder)}
    return dict(source="text", prompt_field="source", text_field="target", **paths)


@pytest.mark.parametrize(("layout", "size", "sections"), rows_of(LAYOUTS))
def test_layout_matches_one_process(
    parity: Parity, pairs: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest,
    layout: dict[str, Any], size: int, sections: dict[str, Any],
) -> None:  # fmt: skip
    case = request.node.callspec.id
    if case.endswith("pairs"):
        sections = sections | {"data": pairs}
    training = dict(steps=2, local_batch_size=size)
    recipe = tiny(tmp_path, "run", model=T5, parallelism=parallelism_of(layout), training=training, **sections)
    found = parity(recipe, case, "t5")
    # The biases of positions are constants before the first step, and each head and most buckets have a gradient.
    for name in ("encoder_bias.weight", "decoder_bias.weight"):
        weights = found.state["model"][name]
        assert weights.shape == (16, 4) and bool((weights.std(0) > 0).all())
