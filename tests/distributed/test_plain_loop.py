"""The recipe against a plain PyTorch training loop, which shares only the model and the data."""

from pathlib import Path

import pytest

from tests.plain_loop import plain_loop
from tests.pool import Ranks
from tests.training import MODELS, tiny, train


@pytest.mark.parametrize(("model", "processes"), [("gpt", 1), ("llama", 2)])
def test_recipe_matches_a_plain_loop(ranks: Ranks, tmp_path: Path, model: str, processes: int) -> None:
    recipe = tiny(tmp_path, "run", model=MODELS[model], training=dict(steps=8, local_batch_size=2))
    losses, norms = plain_loop(recipe)
    found = train(ranks(processes), recipe)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.gradient_norms == pytest.approx(norms, rel=1e-4)
