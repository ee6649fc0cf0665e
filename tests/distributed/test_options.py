"""Options of a recipe under some layouts: parity with one process. test_parity.py covers all layouts without them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity import (
    CLIP,
    DEFAULT,
    DOCUMENTS,
    EVERY,
    MOE_MODELS,
    MUON,
    SELECTIVE,
    SLOW,
    Parity,
    Row,
    parallelism_of,
    rows_of,
)
from tests.training import GPT_, LLAMA, deep, tiny
from titanlike.config.optimizer import OptimizerGroup

FOUR = replace(LLAMA, num_layers=4)
Z_LOSS: dict[str, Any] = {"training": dict(z_loss=0.1, loss_chunk=20)}
RAMP: dict[str, Any] = {"training": dict(steps=4, batch_ramp=((2, 4),))}
# Only the first pipeline stage has matrices that Muon updates.
FIRST_BLOCK = CLIP | dict(groups=(OptimizerGroup(pattern="layers.0", optimizer="muon"),))
ONE_STAGE_OF_EXPERTS = dict(shard=2, expert=2, pipeline=2, pipeline_split=(1, 3))  # the first has the dense block

CASES: dict[str, Row] = {
    "8 micro-batches": (DEFAULT, LLAMA, {}, 1, {}),
    "FSDP, never resharded": (DEFAULT, LLAMA, dict(shard=4, reshard_after_forward="never"), 2, {}),
    "FSDP, always resharded": (SLOW, GPT_, dict(shard=4, reshard_after_forward="always"), 2, {}),
    "FSDP, selective checkpointing": (DEFAULT, LLAMA, dict(shard=2), 4, SELECTIVE),
    "TP, inductor": (EVERY, LLAMA, dict(tensor=2), 4, {"compile": dict(mode="block", backend="inductor")}),
    "CP x FSDP, documents": (DEFAULT, LLAMA, dict(context=2, shard=2), 2, DOCUMENTS),
    "TP x FSDP, documents": (SLOW, GPT_, dict(tensor=2, shard=2), 2, DOCUMENTS),
    "PP zbv x TP, documents": (SLOW, FOUR, dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, DOCUMENTS),
    "TP, z-loss": (DEFAULT, LLAMA, dict(tensor=2), 2, Z_LOSS),
    "PP zbv x TP, z-loss": (SLOW, FOUR, dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, Z_LOSS),
    "PP 1f1b, batch ramp": (DEFAULT, LLAMA, dict(pipeline=2, pipeline_schedule="1f1b"), 2, RAMP),
    "HSDP, batch ramp": (EVERY, LLAMA, dict(replicate=2, shard=2), 1, RAMP),
    "TP x FSDP, Muon": (DEFAULT, FOUR, dict(tensor=2, shard=2), 2, {"optimizer": MUON}),
    "PP zbv x FSDP, Muon": (SLOW, FOUR, dict(pipeline=2, pipeline_schedule="zbv", shard=2), 1, {"optimizer": MUON}),
    "PP, QK-clip in the first stage": (DEFAULT, FOUR, dict(pipeline=2), 2, {"optimizer": FIRST_BLOCK}),
    "EP x PP, a stage without experts": (SLOW, deep(MOE_MODELS["deepseek_v3"]), ONE_STAGE_OF_EXPERTS, 1, {}),
}


@pytest.mark.parametrize(("model", "layout", "size", "sections"), rows_of(CASES))
def test_layout_matches_one_process(
    parity: Parity, tmp_path: Path, model: Any, layout: dict[str, Any], size: int, sections: dict[str, Any]
) -> None:
    training = dict(steps=2, local_batch_size=size) | sections.get("training", {})
    recipe = tiny(tmp_path, "run", model=model, parallelism=parallelism_of(layout), **sections | {"training": training})
    parity(recipe)
