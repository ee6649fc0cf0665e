"""FSDP gathers the weights of a unit while the unit before it computes, in the forward and in the backward pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import FULL, SELECTIVE
from tests.pool import Ranks
from tests.training import LLAMA, Observer, build, tiny
from titanlike.config.sections import Parallelism
from titanlike.data.batches.loader import Batch
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.recipe import PretrainRecipe


def _events(recipe: PretrainRecipe, num_microbatches: int = 1) -> list[str]:
    """Returns all-gathers and the starts of the forward and backward passes of this rank's units, in the second of two steps."""
    model, _ = build(recipe)
    events: list[str] = []

    def see_gather(func: Any, *_: Any) -> None:
        if func.overloadpacket.__name__ == "_allgather_base_":
            events.append("gather")

    def observe(name: str, unit: nn.Module) -> None:
        forward = unit.forward

        def observed(*args: Any, **kwargs: Any) -> Any:
            events.append(f"forward {name}")
            return forward(*args, **kwargs)

        def observe_backward(module: nn.Module, args: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda gradient: events.append(f"backward {name}"))

        # Both run after FSDP's hooks of the unit, which gather its weights and prefetch.
        unit.forward = observed  # type: ignore[method-assign]
        unit.register_forward_hook(observe_backward)

    for name in ("tok_embeddings", "output", *(f"layers.{index}" for index in range(recipe.model.num_layers))):
        unit = dict(model.named_modules()).get(name)
        if unit is not None:
            observe(name.removeprefix("layers."), unit)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    for _ in range(2):
        events.clear()
        with Observer(see_gather):
            if isinstance(model, Pipeline):
                batch = Batch({"tokens": tokens, "position_ids": torch.arange(32).expand(2, -1)}, tokens)
                model.forward_backward([batch] * num_microbatches, lambda loss: loss)
            else:
                model(tokens=tokens, labels=tokens).backward()
    return events


FORWARD = [
    "gather",
    "gather", "forward tok_embeddings",
    "gather", "forward 0",
    "gather", "forward 1",
    "gather", "forward 2",
    "forward output",
]  # fmt: skip
BACKWARD = ["gather", "backward output", "gather", "backward 2", "gather", "backward 1", "backward 0"]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="eager"),
        pytest.param(FULL, id="full checkpointing"),
        pytest.param(SELECTIVE, id="selective checkpointing"),
    ],
)
def test_units_are_gathered_one_ahead(ranks: Ranks, tmp_path: Path, sections: dict[str, Any]) -> None:
    """Not the head, which is kept for the backward pass, nor the embedding, which that does not read."""
    recipe = tiny(tmp_path, "run", model=replace(LLAMA, num_layers=3), parallelism=Parallelism(shard=2), **sections)
    for events in ranks(2).run(_events, recipe):
        assert [event for event in events if event != "backward tok_embeddings"] == FORWARD + BACKWARD


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_stages_of_a_pipeline_are_gathered_once(ranks: Ranks, tmp_path: Path, schedule: str) -> None:
    layout = dict(pipeline=2, shard=2, pipeline_schedule=schedule)
    recipe = tiny(tmp_path, "run", model=replace(LLAMA, num_layers=4), parallelism=Parallelism(**layout))
    for rank, events in enumerate(ranks(4).run(_events, recipe, 2)):
        assert events.count("gather") == (4 if schedule == "zbv" and rank < 2 else 2 if schedule == "zbv" else 3)
        assert "gather" not in events[next(i for i, event in enumerate(events) if event.startswith("backward")) :]
