"""Layouts that are compared with one process, and the table of the measured differences in docs/results.md.

Record the differences, then print the table and the summary for README.md:

    pytest -n 0 -m "every or not every" tests/distributed/test_parity.py --record docs/parity.json
    python -m tests.parity docs/parity.json
"""

import json
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Ranks
from tests.training import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    MIXTRAL,
    MULTI_TOKEN,
    QWEN3_MOE,
    SHARED_EXPERTS,
    assert_same,
    train,
    world_size,
)
from titanlike.config.optimizer import OptimizerGroup
from titanlike.config.sections import ActivationCheckpoint, Compile, Parallelism, Training
from titanlike.recipe import PretrainRecipe
from titanlike.tools.verify.recipe import Result, differences

# Captures and partitions the graph as inductor does, without the half minute of code generation.
FAST = "aot_eager_decomp_partition"
COMPILED: dict[str, Any] = {"compile": dict(mode="block", backend=FAST)}
SELECTIVE: dict[str, Any] = {"activation_checkpoint": dict(mode="selective")}
FULL: dict[str, Any] = {"activation_checkpoint": dict(mode="full")}
LORA: dict[str, Any] = {"lora": dict(rank=4)}
# Sections.
MUON: dict[str, Any] = dict(groups=(OptimizerGroup(pattern="layers", optimizer="muon"),))
MUON_ATTENTION: dict[str, Any] = dict(groups=(OptimizerGroup(pattern="attention", optimizer="muon"),))
# Far below the logits of the first step, so that it scales the weights of many heads.
CLIP: dict[str, Any] = MUON_ATTENTION | dict(muon_qk_clip=0.02)
FLOAT8: dict[str, Any] = dict(scaling="tensorwise", layers=("*",), emulate=True)
ALL_GATHER: dict[str, Any] = FLOAT8 | dict(all_gather=True)

MOE_MODELS: dict[str, Any] = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL, "shared experts": SHARED_EXPERTS}
MOE_MODELS |= {"deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS}
MOE_MODELS["multi-token"] = MULTI_TOKEN
MOE_MODELS["few experts"] = replace(QWEN3_MOE, num_experts=3)

# The model, the layout, the number of sequences in a micro-batch, and other sections of a recipe.
MOE_CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "FSDP": ("shared experts", dict(shard=2), 2, {}),
    "FSDP, fewer experts than ranks": ("few experts", dict(shard=4), 1, {}),
    "HSDP": ("qwen3_moe", dict(replicate=2, shard=2), 1, {}),
    "TP": ("shared experts", dict(tensor=2), 4, {}),
    "CP": ("qwen3_moe", dict(context=2), 4, {}),
    "PP 1f1b": ("shared experts", dict(pipeline=2), 2, {}),
    "TP x FSDP": ("qwen3_moe", dict(tensor=2, shard=2), 2, {}),
    "CP x TP": ("shared experts", dict(context=2, tensor=2), 4, {}),
    "PP zbv": ("shared experts", dict(pipeline=2, pipeline_schedule="zbv"), 2, {}),
    "PP zbv x TP": ("qwen3_moe", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "TP x FSDP, compiled, selective": ("shared experts", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "FSDP, compiled": ("qwen3_moe", dict(shard=2), 2, COMPILED),
    "EP": ("shared experts", dict(shard=2, expert=2), 2, {}),
    "EP of 4": ("qwen3_moe", dict(shard=4, expert=4), 1, {}),
    "EP x FSDP": ("shared experts", dict(shard=4, expert=2), 1, {}),
    "EP x HSDP": ("qwen3_moe", dict(replicate=2, shard=2, expert=2), 1, {}),
    "EP x CP": ("qwen3_moe", dict(context=2, expert=2), 4, {}),
    "EP x CP x FSDP": ("shared experts", dict(context=2, shard=2, expert=4), 2, {}),
    "EP x TP": ("shared experts", dict(shard=2, tensor=2, expert=2), 2, {}),
    "EP x TP x FSDP": ("qwen3_moe", dict(shard=4, tensor=2, expert=2), 1, {}),
    "EP x PP 1f1b": ("shared experts", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "EP x PP zbv": ("qwen3_moe", dict(pipeline=2, pipeline_schedule="zbv", shard=2, expert=2), 1, {}),
    "EP x PP 1f1b x TP": ("shared experts", dict(pipeline=2, shard=2, tensor=2, expert=2), 1, {}),
    "EP, selective checkpointing": ("qwen3_moe", dict(shard=2, expert=2), 2, SELECTIVE),
    "EP x FSDP, full checkpointing": ("shared experts", dict(shard=4, expert=2), 1, FULL),
    "EP x TP, shared experts, selective": ("shared experts", dict(shard=2, tensor=2, expert=2), 2, SELECTIVE),
    "EP x TP, compiled": ("shared experts", dict(shard=2, tensor=2, expert=2), 2, COMPILED),
    "EP x FSDP, compiled, selective": ("qwen3_moe", dict(shard=4, expert=2), 1, COMPILED | SELECTIVE),
    "EP, compiled, full": ("shared experts", dict(shard=2, expert=2), 2, COMPILED | FULL),
    "FSDP, Muon": ("shared experts", dict(shard=2), 2, {"optimizer": MUON}),
    "EP x FSDP, Muon": ("qwen3_moe", dict(shard=4, expert=2), 1, {"optimizer": MUON}),
    "EP x TP, LoRA": ("shared experts", dict(shard=2, tensor=2, expert=2), 2, LORA),
    "EP x CP, documents": ("qwen3_moe", dict(context=2, expert=2), 4, {"data": dict(document_masks=True)}),
    "MLA, FSDP": ("deepseek_v3", dict(shard=2), 2, {}),
    "MLA, TP": ("deepseek_v2", dict(tensor=2), 4, {}),
    "MLA, CP x TP": ("deepseek_v3", dict(context=2, tensor=2), 4, {}),
    "MLA, CP, documents": ("deepseek_v2", dict(context=2), 4, {"data": dict(document_masks=True)}),
    "MLA, PP zbv x TP": ("deepseek_v3", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "MLA, EP x TP": ("deepseek_v3", dict(shard=2, tensor=2, expert=2), 2, {}),
    "MLA, EP x PP 1f1b": ("deepseek_v2", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "MLA, EP x FSDP, full checkpointing": ("deepseek_v3", dict(shard=4, expert=2), 1, FULL),
    "MLA, TP x FSDP, compiled, selective": ("deepseek_v3", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "MLA, EP x TP, compiled": ("deepseek_v2", dict(shard=2, tensor=2, expert=2), 2, COMPILED),
    "MLA, TP x FSDP, Muon": ("deepseek_v3", dict(tensor=2, shard=2), 2, {"optimizer": MUON_ATTENTION}),
    "MTP, FSDP": ("multi-token", dict(shard=2), 2, {}),
    "MTP, CP x TP, documents": ("multi-token", dict(context=2, tensor=2), 4, {"data": dict(document_masks=True)}),
    "MTP, EP x TP": ("multi-token", dict(shard=2, tensor=2, expert=2), 2, {}),
    "MTP, EP x FSDP, full checkpointing": ("multi-token", dict(shard=4, expert=2), 1, FULL),
    "MTP, TP x FSDP, compiled, selective": ("multi-token", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "MLA, TP x FSDP, QK-clip": ("deepseek_v3", dict(tensor=2, shard=2), 2, {"optimizer": CLIP}),
    "MLA, TP x FSDP, QK-clip, compiled, selective": (
        "deepseek_v3",
        dict(tensor=2, shard=2),
        2,
        {"optimizer": CLIP} | COMPILED | SELECTIVE,
    ),
    "CP x TP, QK-clip, documents": (
        "mixtral",
        dict(context=2, tensor=2),
        4,
        {"optimizer": CLIP, "data": dict(document_masks=True)},
    ),
    "CP x TP, QK-clip, full checkpointing": ("mixtral", dict(context=2, tensor=2), 4, {"optimizer": CLIP} | FULL),
    "PP x FSDP, QK-clip": ("mixtral", dict(pipeline=2, shard=2), 1, {"optimizer": CLIP}),
    "MLA, EP x TP, LoRA": ("deepseek_v3", dict(shard=2, tensor=2, expert=2), 2, LORA),
    "Sinks, FSDP": ("gpt_oss", dict(shard=2), 2, {}),
    "Sinks, TP": ("gpt_oss", dict(tensor=2), 4, {}),
    "Sinks, CP x TP": ("gpt_oss", dict(context=2, tensor=2), 4, {}),
    "Sinks, CP, documents": ("gpt_oss", dict(context=2), 4, {"data": dict(document_masks=True)}),
    "Sinks, PP zbv x TP": ("gpt_oss", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "Sinks, EP x TP": ("gpt_oss", dict(shard=2, tensor=2, expert=2), 2, {}),
    "Sinks, EP x PP 1f1b": ("gpt_oss", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "Sinks, TP x FSDP, compiled, selective": ("gpt_oss", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "Sinks, EP x FSDP, compiled, full": ("gpt_oss", dict(shard=4, expert=2), 1, COMPILED | FULL),
    "Sinks, EP x FSDP, Muon": ("gpt_oss", dict(shard=4, expert=2), 1, {"optimizer": MUON}),
    "Sinks, EP x TP, LoRA": ("gpt_oss", dict(shard=2, tensor=2, expert=2), 2, LORA),
}


def tiers(cases: Collection[str], quick: Collection[str], slow: Collection[str] = ()) -> list[Any]:
    """Returns parameters of a test: cases of the default tests, those of the slow tests, and the others, for `-m every`."""
    assert {*quick, *slow} <= {*cases}
    marks = {case: [] if case in quick else [pytest.mark.slow if case in slow else pytest.mark.every] for case in cases}
    return [pytest.param(case, marks=marks[case]) for case in cases]


def parallelism_of(layout: dict[str, Any]) -> Parallelism:
    """Returns a section with one rank along each dimension that is not given."""
    return Parallelism(**({"shard": 1} | layout))


@dataclass(frozen=True)
class Case:
    """A layout and the other settings of its recipe."""

    name: str
    layout: dict[str, Any]
    local: int = 0  # micro-batch size, of 8 sequences in a step; 0: two micro-batches per rank
    sections: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    """Of the GPT: Llama has none, and does not run such a case."""
    tier: str = "both"
    """`both`: both models in the default tests. `one`, `slow`: one model in the default or the slow tests. The others run with
    `-m every`."""

    @property
    def models(self) -> tuple[str, ...]:
        return ("gpt",) if self.dropout else ("llama", "gpt")

    @property
    def parallelism(self) -> Parallelism:
        return parallelism_of(self.layout)

    @property
    def local_batch_size(self) -> int:
        if self.local or self.layout.get("pipeline", 1) > 1:
            return self.local or 2
        return max(1, 4 // math.prod(self.layout.get(name, 1) for name in ("replicate", "shard")))


class Parity:
    """Trains recipes, and compares each with one process."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.results: dict[str, Result] = {}
        self.measured: dict[str, dict[str, Any]] = {}  # of each case

    def one_process(self, recipe: PretrainRecipe) -> Result:
        """Returns the results of one process that takes the global batch as one micro-batch, without what changes no result."""
        size, chunk = recipe.training.global_batch_size, Training().loss_chunk
        recipe = replace(
            recipe,
            run=replace(recipe.run, dir=str(self.folder), name="one"),
            parallelism=Parallelism(),
            training=replace(recipe.training, local_batch_size=size, loss_chunk=chunk),
            activation_checkpoint=ActivationCheckpoint(),
            compile=Compile(mode="none"),
        )
        key = repr(recipe)
        if key not in self.results:
            recipe = replace(recipe, run=replace(recipe.run, name=f"one-{len(self.results)}"))
            self.results[key] = train(self.ranks(1), recipe)
        return self.results[key]

    def __call__(self, recipe: PretrainRecipe, case: str = "", model: str = "", **tolerances: float) -> Result:
        """Asserts that the results of a recipe are those of one process, and returns them."""
        processes = world_size(recipe)
        found, expected = train(self.ranks(processes), recipe), self.one_process(recipe)
        measured = {metric: worst for metric, (worst, _) in differences(found, expected).items()}
        self.measured.setdefault(case, {"processes": processes})[model] = measured
        if any(group.optimizer == "muon" for group in recipe.optimizer.groups):
            tolerances = {"weights": 1e-3} | tolerances
        assert_same(found, expected, **tolerances)
        return found


SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved_1f1b": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 1}
WITH_FSDP = {"interleaved_1f1b": "slow", "zbv": "one"}

CASES = [
    Case("FSDP", dict(shard=2)),
    Case("DDP", dict(replicate=2, shard=1), tier="one"),
    Case("HSDP", dict(replicate=2, shard=2), tier="one"),
    Case("TP", dict(tensor=2)),
    Case("CP", dict(context=2), tier="one"),
    *(
        Case(f"PP {name}", dict(pipeline=2, pipeline_schedule=name), local, tier="slow" if name == "gpipe" else "one")
        for name, local in SCHEDULES.items()
    ),
    Case("PP 1f1b, 4 stages of 1 block", dict(pipeline=4), tier="slow"),
    Case("PP 1f1b, stages of 1 + 3 blocks", dict(pipeline=2, pipeline_split=(1, 3)), tier="slow"),
    Case("TP x FSDP", dict(tensor=2, shard=2), tier="one"),
    Case("TP x HSDP", dict(tensor=2, replicate=2, shard=2), tier="slow"),
    *(
        Case(
            f"PP {name} x FSDP",
            dict(pipeline=2, pipeline_schedule=name, shard=2),
            local,
            tier=WITH_FSDP.get(name, "every"),
        )
        for name, local in SCHEDULES.items()
    ),
    Case("PP 1f1b x HSDP", dict(pipeline=2, replicate=2, shard=2), local=1, tier="every"),
    Case("PP 1f1b x TP", dict(pipeline=2, tensor=2), tier="one"),
    Case("PP zbv x TP", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), tier="every"),
    Case("CP x FSDP", dict(context=2, shard=2), tier="one"),
    Case("CP x HSDP", dict(context=2, replicate=2, shard=2), tier="every"),
    Case("CP of 4", dict(context=4), tier="slow"),
    Case("CP x TP", dict(context=2, tensor=2), tier="one"),
    Case("PP 1f1b x CP", dict(pipeline=2, context=2), tier="one"),
    Case("PP 1f1b x TP x FSDP", dict(pipeline=2, tensor=2, shard=2), tier="every"),
    Case("PP zbv x CP x TP", dict(pipeline=2, pipeline_schedule="zbv", context=2, tensor=2), tier="slow"),
    Case("CP x TP x FSDP", dict(context=2, tensor=2, shard=2), tier="every"),
    Case("TP x FSDP, 4 micro-batches", dict(tensor=2, shard=2), local=1, tier="every"),
    Case("CP x FSDP, 4 micro-batches", dict(context=2, shard=2), local=1, tier="every"),
    Case("PP 1f1b x FSDP, 4 micro-batches", dict(pipeline=2, shard=2), local=1, tier="one"),
    Case("TP x FSDP, selective checkpointing", dict(tensor=2, shard=2), sections=SELECTIVE, tier="every"),
    Case("CP x FSDP, selective checkpointing", dict(context=2, shard=2), sections=SELECTIVE, tier="every"),
    Case("PP 1f1b x FSDP, selective checkpointing", dict(pipeline=2, shard=2), sections=SELECTIVE, tier="slow"),
    Case("PP zbv, full checkpointing", dict(pipeline=2, pipeline_schedule="zbv"), sections=FULL, tier="slow"),
    Case("TP, compiled", dict(tensor=2), sections=COMPILED, tier="one"),
    Case("TP x FSDP, compiled, selective", dict(tensor=2, shard=2), sections=COMPILED | SELECTIVE, tier="slow"),
    Case("TP, compiled, full", dict(tensor=2), sections=COMPILED | FULL, tier="every"),
    Case("CP x FSDP, compiled", dict(context=2, shard=2), sections=COMPILED, tier="slow"),
    Case("PP zbv, compiled", dict(pipeline=2, pipeline_schedule="zbv"), sections=COMPILED, tier="every"),
    Case("FSDP, dropout", dict(shard=2), dropout=0.1, tier="one"),
    Case("CP x TP, dropout", dict(context=2, tensor=2), dropout=0.1, tier="every"),
    Case("PP 1f1b x TP, dropout", dict(pipeline=2, tensor=2), dropout=0.1, tier="every"),
    Case("TP x FSDP, dropout, full checkpointing", dict(tensor=2, shard=2), sections=FULL, dropout=0.1, tier="slow"),
    Case("CP x TP, deterministic", dict(context=2, tensor=2), sections={"run": dict(deterministic=True)}, tier="slow"),
]


def table(measured: dict[str, Any]) -> str:
    """Returns a row per case: the largest relative differences from one process in losses, gradient norms and weights."""
    lines = ["| Layout | Processes | Llama: loss / norm / weights | GPT: loss / norm / weights |", "|---|---|---|---|"]
    for name, case in measured["cases"].items():
        cells = [
            " / ".join(f"{case[model][metric]:.0e}" for metric in ("loss", "gradient norm", "weights"))
            if model in case
            else ""
            for model in ("llama", "gpt")
        ]
        lines.append(f"| {name} | {case['processes']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def moe_table(measured: dict[str, Any]) -> str:
    """Returns a row per case of a mixture-of-experts model, of which each has one."""
    lines = ["| Layout | Processes | Model | Loss | Gradient norm | Weights |", "|---|---|---|---|---|---|"]
    for name, case in measured["cases"].items():
        (model,) = case.keys() - {"processes"}
        cells = " | ".join(f"{case[model][metric]:.0e}" for metric in ("loss", "gradient norm", "weights"))
        lines.append(f"| {name} | {case['processes']} | {model} | {cells} |")
    return "\n".join(lines)


def summary(measured: dict[str, Any]) -> str:
    """Returns the largest differences of all cases as a sentence."""
    cases = measured["cases"].values()
    loss, norm, weights = (
        max(case[model][quantity] for case in cases for model in ("llama", "gpt") if model in case)
        for quantity in ("loss", "gradient norm", "weights")
    )
    return (
        f"In {len(cases)} cases (layouts, some with dropout or activation checkpointing), a small Llama and GPT were trained in "
        f"float32 over gloo on 2 to {max(case['processes'] for case in cases)} processes: losses differ from those of one process "
        f"by at most {_rounded_up(loss)}, gradient norms by {_rounded_up(norm)} and weights by {_rounded_up(weights)} (relative)"
    )


def _rounded_up(value: float) -> str:
    """Returns a number with one digit that is not smaller."""
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit) * unit:.0e}"


if __name__ == "__main__":
    recorded = json.loads(Path(sys.argv[1]).read_text())
    is_dense = all("gpt" in case for case in recorded["cases"].values())
    print(f"{table(recorded)}\n\n{summary(recorded)}" if is_dense else moe_table(recorded))
