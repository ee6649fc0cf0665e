"""Layouts that are compared with one process, and the table of the measured differences in docs/results.md.

Record the differences, then print the table and the summary for README.md:

    pytest -n 0 -m "every or not every" tests/distributed/test_parity.py --record docs/parity.json
    python -m tests.parity docs/parity.json
"""

import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

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
    train_unsaved,
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
# Values of sections.
MUON: dict[str, Any] = dict(groups=(OptimizerGroup(pattern="layers", optimizer="muon"),))
MUON_ATTENTION: dict[str, Any] = dict(groups=(OptimizerGroup(pattern="attention", optimizer="muon"),))
# Far below the logits of the first step, so that it scales the weights of many heads.
CLIP: dict[str, Any] = MUON_ATTENTION | dict(muon_qk_clip=0.02)
QK_CLIP: dict[str, Any] = {"optimizer": CLIP}
DOCUMENTS: dict[str, Any] = {"data": dict(document_masks=True)}
FLOAT8: dict[str, Any] = dict(scaling="tensorwise", layers=("*",), emulate=True)
ALL_GATHER: dict[str, Any] = FLOAT8 | dict(all_gather=True)

MOE_MODELS: dict[str, Any] = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL, "shared experts": SHARED_EXPERTS}
MOE_MODELS |= {"deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS}
MOE_MODELS["multi-token"] = MULTI_TOKEN
MOE_MODELS["few experts"] = replace(QWEN3_MOE, num_experts=3)

Tier = tuple[pytest.MarkDecorator, ...]
# The tests that have a row of a table: the default ones, the slow ones, or those of `-m every`.
DEFAULT: Tier = ()
SLOW = (pytest.mark.slow,)
EVERY = (pytest.mark.every,)

# The tier, the model, the layout, the number of sequences in a micro-batch, and other sections of a recipe.
Row = tuple[Tier, Any, dict[str, Any], int, dict[str, Any]]

MOE_CASES: dict[str, Row] = {
    "FSDP": (EVERY, "shared experts", dict(shard=2), 2, {}),
    "FSDP, fewer experts than ranks": (SLOW, "few experts", dict(shard=4), 1, {}),
    "HSDP": (EVERY, "qwen3_moe", dict(replicate=2, shard=2), 1, {}),
    "TP": (EVERY, "shared experts", dict(tensor=2), 4, {}),
    "CP": (EVERY, "qwen3_moe", dict(context=2), 4, {}),
    "PP 1f1b": (EVERY, "shared experts", dict(pipeline=2), 2, {}),
    "TP x FSDP": (DEFAULT, "qwen3_moe", dict(tensor=2, shard=2), 2, {}),
    "CP x TP": (EVERY, "shared experts", dict(context=2, tensor=2), 4, {}),
    "PP zbv": (SLOW, "shared experts", dict(pipeline=2, pipeline_schedule="zbv"), 2, {}),
    "PP zbv x TP": (EVERY, "qwen3_moe", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "TP x FSDP, compiled, selective": (EVERY, "shared experts", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "FSDP, compiled": (EVERY, "qwen3_moe", dict(shard=2), 2, COMPILED),
    "EP": (EVERY, "shared experts", dict(shard=2, expert=2), 2, {}),
    "EP of 4": (EVERY, "qwen3_moe", dict(shard=4, expert=4), 1, {}),
    "EP x FSDP": (EVERY, "shared experts", dict(shard=4, expert=2), 1, {}),
    "EP x HSDP": (SLOW, "qwen3_moe", dict(replicate=2, shard=2, expert=2), 1, {}),
    "EP x CP": (EVERY, "qwen3_moe", dict(context=2, expert=2), 4, {}),
    "EP x CP x FSDP": (SLOW, "shared experts", dict(context=2, shard=2, expert=4), 2, {}),
    "EP x TP": (DEFAULT, "shared experts", dict(shard=2, tensor=2, expert=2), 2, {}),
    "EP x TP x FSDP": (EVERY, "qwen3_moe", dict(shard=4, tensor=2, expert=2), 1, {}),
    "EP x PP 1f1b": (EVERY, "shared experts", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "EP x PP zbv": (EVERY, "qwen3_moe", dict(pipeline=2, pipeline_schedule="zbv", shard=2, expert=2), 1, {}),
    "EP x PP 1f1b x TP": (EVERY, "shared experts", dict(pipeline=2, shard=2, tensor=2, expert=2), 1, {}),
    "EP, selective checkpointing": (EVERY, "qwen3_moe", dict(shard=2, expert=2), 2, SELECTIVE),
    "EP x FSDP, full checkpointing": (EVERY, "shared experts", dict(shard=4, expert=2), 1, FULL),
    "EP x TP, shared experts, selective": (SLOW, "shared experts", dict(shard=2, tensor=2, expert=2), 2, SELECTIVE),
    "EP x TP, compiled": (EVERY, "shared experts", dict(shard=2, tensor=2, expert=2), 2, COMPILED),
    "EP x FSDP, compiled, selective": (SLOW, "qwen3_moe", dict(shard=4, expert=2), 1, COMPILED | SELECTIVE),
    "EP, compiled, full": (EVERY, "shared experts", dict(shard=2, expert=2), 2, COMPILED | FULL),
    "FSDP, Muon": (EVERY, "shared experts", dict(shard=2), 2, {"optimizer": MUON}),
    "EP x FSDP, Muon": (SLOW, "qwen3_moe", dict(shard=4, expert=2), 1, {"optimizer": MUON}),
    "EP x TP, LoRA": (SLOW, "shared experts", dict(shard=2, tensor=2, expert=2), 2, LORA),
    "EP x CP, documents": (EVERY, "qwen3_moe", dict(context=2, expert=2), 4, DOCUMENTS),
    "MLA, FSDP": (EVERY, "deepseek_v3", dict(shard=2), 2, {}),
    "MLA, TP": (EVERY, "deepseek_v2", dict(tensor=2), 4, {}),
    "MLA, CP x TP": (EVERY, "deepseek_v3", dict(context=2, tensor=2), 4, {}),
    "MLA, CP, documents": (EVERY, "deepseek_v2", dict(context=2), 4, DOCUMENTS),
    "MLA, PP zbv x TP": (SLOW, "deepseek_v3", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "MLA, EP x TP": (DEFAULT, "deepseek_v3", dict(shard=2, tensor=2, expert=2), 2, {}),
    "MLA, EP x PP 1f1b": (EVERY, "deepseek_v2", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "MLA, EP x FSDP, full checkpointing": (EVERY, "deepseek_v3", dict(shard=4, expert=2), 1, FULL),
    "MLA, TP x FSDP, compiled, selective": (EVERY, "deepseek_v3", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "MLA, EP x TP, compiled": (EVERY, "deepseek_v2", dict(shard=2, tensor=2, expert=2), 2, COMPILED),
    "MLA, TP x FSDP, Muon": (SLOW, "deepseek_v3", dict(tensor=2, shard=2), 2, {"optimizer": MUON_ATTENTION}),
    "MTP, FSDP": (EVERY, "multi-token", dict(shard=2), 2, {}),
    "MTP, CP x TP, documents": (SLOW, "multi-token", dict(context=2, tensor=2), 4, DOCUMENTS),
    "MTP, EP x TP": (SLOW, "multi-token", dict(shard=2, tensor=2, expert=2), 2, {}),
    "MTP, EP x FSDP, full checkpointing": (EVERY, "multi-token", dict(shard=4, expert=2), 1, FULL),
    "MTP, TP x FSDP, compiled, selective": (EVERY, "multi-token", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "MLA, TP x FSDP, QK-clip": (EVERY, "deepseek_v3", dict(tensor=2, shard=2), 2, QK_CLIP),
    "MLA, TP x FSDP, QK-clip, compiled, selective": (
        SLOW,
        "deepseek_v3",
        dict(tensor=2, shard=2),
        2,
        QK_CLIP | COMPILED | SELECTIVE,
    ),
    "CP x TP, QK-clip, documents": (
        SLOW,
        "mixtral",
        dict(context=2, tensor=2),
        4,
        QK_CLIP | DOCUMENTS,
    ),
    "CP x TP, QK-clip, full checkpointing": (
        DEFAULT,
        "mixtral",
        dict(context=2, tensor=2),
        4,
        QK_CLIP | FULL,
    ),
    "PP x FSDP, QK-clip": (EVERY, "mixtral", dict(pipeline=2, shard=2), 1, QK_CLIP),
    "MLA, EP x TP, LoRA": (EVERY, "deepseek_v3", dict(shard=2, tensor=2, expert=2), 2, LORA),
    "Sinks, FSDP": (EVERY, "gpt_oss", dict(shard=2), 2, {}),
    "Sinks, TP": (EVERY, "gpt_oss", dict(tensor=2), 4, {}),
    "Sinks, CP x TP": (SLOW, "gpt_oss", dict(context=2, tensor=2), 4, {}),
    "Sinks, CP, documents": (EVERY, "gpt_oss", dict(context=2), 4, DOCUMENTS),
    "Sinks, PP zbv x TP": (EVERY, "gpt_oss", dict(pipeline=2, pipeline_schedule="zbv", tensor=2), 2, {}),
    "Sinks, EP x TP": (DEFAULT, "gpt_oss", dict(shard=2, tensor=2, expert=2), 2, {}),
    "Sinks, EP x PP 1f1b": (EVERY, "gpt_oss", dict(pipeline=2, shard=2, expert=2), 1, {}),
    "Sinks, TP x FSDP, compiled, selective": (EVERY, "gpt_oss", dict(tensor=2, shard=2), 2, COMPILED | SELECTIVE),
    "Sinks, EP x FSDP, compiled, full": (EVERY, "gpt_oss", dict(shard=4, expert=2), 1, COMPILED | FULL),
    "Sinks, EP x FSDP, Muon": (SLOW, "gpt_oss", dict(shard=4, expert=2), 1, {"optimizer": MUON}),
    "Sinks, EP x TP, LoRA": (EVERY, "gpt_oss", dict(shard=2, tensor=2, expert=2), 2, LORA),
}


def rows_of(table: dict[str, Any]) -> list[Any]:
    """Returns parameters of a test, of a table whose rows begin with their tier."""
    return [pytest.param(*row, id=name, marks=marks) for name, (marks, *row) in table.items()]


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
    llama: Tier = EVERY
    gpt: Tier = EVERY
    """The tiers of the models."""

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

    one: ClassVar[dict[str, Result]] = {}  # the results of one process, by recipe

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.measured: dict[str, dict[str, Any]] = {}  # of each case

    def one_process(self, recipe: PretrainRecipe) -> Result:
        """Returns the results of one process that takes the global batch as one micro-batch, without what changes no result."""
        size, chunk = recipe.training.global_batch_size, Training().loss_chunk
        recipe = replace(
            recipe,
            run=replace(recipe.run, dir="", name="one"),
            parallelism=Parallelism(),
            training=replace(recipe.training, local_batch_size=size, loss_chunk=chunk),
            activation_checkpoint=ActivationCheckpoint(),
            compile=Compile(mode="none"),
        )
        key = repr(recipe)
        if key not in self.one:
            run = replace(recipe.run, dir=str(self.folder), name=f"one-{len(self.one)}")
            self.one[key] = train_unsaved(self.ranks(1), replace(recipe, run=run))
        return self.one[key]

    def __call__(self, recipe: PretrainRecipe, case: str = "", model: str = "", **tolerances: float) -> Result:
        """Asserts that the results of a recipe are those of one process, and returns them."""
        processes = world_size(recipe)
        found, expected = train_unsaved(self.ranks(processes), recipe), self.one_process(recipe)
        measured = {metric: worst for metric, (worst, _) in differences(found, expected).items()}
        self.measured.setdefault(case, {"processes": processes})[model] = measured
        if any(group.optimizer == "muon" for group in recipe.optimizer.groups):
            tolerances = {"weights": 1e-3} | tolerances
        assert_same(found, expected, **tolerances)
        return found


SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved_1f1b": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 1}


def pipeline(schedule: str, **layout: Any) -> dict[str, Any]:
    return dict(pipeline=2, pipeline_schedule=schedule, **layout)


CASES = [
    Case("FSDP", dict(shard=2), llama=DEFAULT),
    Case("DDP", dict(replicate=2, shard=1), llama=DEFAULT),
    Case("HSDP", dict(replicate=2, shard=2), gpt=DEFAULT),
    Case("TP", dict(tensor=2), llama=DEFAULT),
    Case("CP", dict(context=2), llama=DEFAULT),
    Case("PP gpipe", pipeline("gpipe"), llama=SLOW),
    Case("PP 1f1b", pipeline("1f1b"), gpt=DEFAULT),
    Case("PP interleaved_1f1b", pipeline("interleaved_1f1b"), llama=DEFAULT),
    Case("PP zero_bubble", pipeline("zero_bubble"), gpt=SLOW),
    Case("PP zbv", pipeline("zbv"), llama=DEFAULT),
    Case("PP dualpipev", pipeline("dualpipev"), local=1, gpt=SLOW),
    Case("PP 1f1b, 4 stages of 1 block", dict(pipeline=4), gpt=SLOW),
    Case("PP 1f1b, stages of 1 + 3 blocks", dict(pipeline=2, pipeline_split=(1, 3)), llama=SLOW),
    Case("TP x FSDP", dict(tensor=2, shard=2), llama=DEFAULT),
    Case("TP x HSDP", dict(tensor=2, replicate=2, shard=2), gpt=SLOW),
    Case("PP gpipe x FSDP", pipeline("gpipe", shard=2)),
    Case("PP 1f1b x FSDP", pipeline("1f1b", shard=2)),
    Case("PP interleaved_1f1b x FSDP", pipeline("interleaved_1f1b", shard=2), llama=SLOW),
    Case("PP zero_bubble x FSDP", pipeline("zero_bubble", shard=2)),
    Case("PP zbv x FSDP", pipeline("zbv", shard=2), gpt=DEFAULT),
    Case("PP dualpipev x FSDP", pipeline("dualpipev", shard=2), local=1),
    Case("PP 1f1b x HSDP", dict(pipeline=2, replicate=2, shard=2), local=1),
    Case("PP 1f1b x TP", dict(pipeline=2, tensor=2), llama=DEFAULT),
    Case("PP zbv x TP", pipeline("zbv", tensor=2)),
    Case("CP x FSDP", dict(context=2, shard=2), gpt=DEFAULT),
    Case("CP x HSDP", dict(context=2, replicate=2, shard=2)),
    Case("CP of 4", dict(context=4), gpt=SLOW),
    Case("CP x TP", dict(context=2, tensor=2), llama=DEFAULT),
    Case("PP 1f1b x CP", dict(pipeline=2, context=2), gpt=DEFAULT),
    Case("PP 1f1b x TP x FSDP", dict(pipeline=2, tensor=2, shard=2)),
    Case("PP zbv x CP x TP", pipeline("zbv", context=2, tensor=2), llama=SLOW),
    Case("CP x TP x FSDP", dict(context=2, tensor=2, shard=2)),
    Case("TP x FSDP, 4 micro-batches", dict(tensor=2, shard=2), local=1),
    Case("CP x FSDP, 4 micro-batches", dict(context=2, shard=2), local=1),
    Case("PP 1f1b x FSDP, 4 micro-batches", dict(pipeline=2, shard=2), local=1, llama=SLOW),
    Case("TP x FSDP, selective checkpointing", dict(tensor=2, shard=2), sections=SELECTIVE),
    Case("CP x FSDP, selective checkpointing", dict(context=2, shard=2), sections=SELECTIVE),
    Case("PP 1f1b x FSDP, selective checkpointing", dict(pipeline=2, shard=2), sections=SELECTIVE, gpt=SLOW),
    Case("PP zbv, full checkpointing", pipeline("zbv"), sections=FULL, llama=SLOW),
    Case("TP, compiled", dict(tensor=2), sections=COMPILED, gpt=DEFAULT),
    Case("TP x FSDP, compiled, selective", dict(tensor=2, shard=2), sections=COMPILED | SELECTIVE, gpt=SLOW),
    Case("TP, compiled, full", dict(tensor=2), sections=COMPILED | FULL),
    Case("CP x FSDP, compiled", dict(context=2, shard=2), sections=COMPILED, llama=SLOW),
    Case("PP zbv, compiled", pipeline("zbv"), sections=COMPILED),
    Case("FSDP, dropout", dict(shard=2), dropout=0.1, gpt=DEFAULT),
    Case("CP x TP, dropout", dict(context=2, tensor=2), dropout=0.1),
    Case("PP 1f1b x TP, dropout", dict(pipeline=2, tensor=2), dropout=0.1),
    Case("TP x FSDP, dropout, full checkpointing", dict(tensor=2, shard=2), sections=FULL, dropout=0.1, gpt=SLOW),
    Case("CP x TP, deterministic", dict(context=2, tensor=2), sections={"run": dict(deterministic=True)}, llama=SLOW),
]


def table(measured: dict[str, Any]) -> str:
    """Returns a row per case: the largest relative differences from one process in losses, gradient norms and weights."""
    lines = ["| Layout | Processes | Llama: loss / norm / weights | GPT: loss / norm / weights |", "|---|---|---|---|"]
    for name, case in measured["cases"].items():
        cells = [
            " / ".join(_short(case[model][metric]) for metric in ("loss", "gradient norm", "weights"))
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
        cells = " | ".join(_short(case[model][metric]) for metric in ("loss", "gradient norm", "weights"))
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
        f"A small Llama and GPT were trained on CPUs, in float32, under {len(cases)} combinations of layout, dropout and "
        f"activation checkpointing with 2 to {max(case['processes'] for case in cases)} processes. Relative to one process, "
        f"losses differ by at most {_rounded_up(loss)}, gradient norms by {_rounded_up(norm)} and weights by {_rounded_up(weights)}"
    )


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "")


def _rounded_up(value: float) -> str:
    """Returns a number with one digit that is not smaller."""
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit) * unit:.0e}"


if __name__ == "__main__":
    recorded = json.loads(Path(sys.argv[1]).read_text())
    is_dense = all("gpt" in case for case in recorded["cases"].values())
    print(f"{table(recorded)}\n\n{summary(recorded)}" if is_dense else moe_table(recorded))
