"""Published speeds of one machine, repeated with this toolkit on the same model, batch, precision and checkpointing.

    python -m benchmarks.published_gpu kempnerforge_8b --out FILE     trains it, on as many GPUs as the published run
    python -m benchmarks.published_gpu                                plans all of them

A result is the median speed after the first steps, with random weights and synthetic tokens.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, facts, parser_of, table, train, write
from benchmarks.planner_validation import ROWS, tokens_per_second
from benchmarks.published import Row
from titanlike.metrics.hardware import device_name
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.load import to_toml
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import Plan, make_plan
from titanlike.tools.programs import load_known, toml

RESULTS = ROOT / "benchmarks/results/gpu"
STEPS = 16
WARMUP = 6  # steps that are not counted
KEYS = {"training.steps": STEPS, "schedule.warmup_steps": 0, "data.source": "synthetic", "metrics.interval": 1}

# The same keys with a model that a CPU trains in seconds.
TINY = {
    "model.size": "debug", "model.dim": 64, "model.num_layers": 2, "model.num_heads": 4, "model.num_kv_heads": 2,
    "model.ffn_dim": 128, "model.vocab_size": 320, "training.seq_len": 32, "training.global_batch_size": 16,
    "training.local_batch_size": 2, "run.device": "cpu", "compile.mode": "none",
}  # fmt: skip
EMULATED = {"float8.emulate": True, "float8.layers": ["*"]}


@dataclass(frozen=True)
class Run:
    """A run that repeats a row, with keys beyond those of the row."""

    row: Row
    keys: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, folder: Path, keys: Mapping[str, Any] = {}) -> PretrainRecipe:
        """Returns the recipe, and writes it to a folder as `recipe.toml`."""
        file = folder / "recipe.toml"
        file.write_text(to_toml(self.row.recipe()))
        recipe = load_known(file, {key: toml(value) for key, value in {**self.keys, **keys}.items()})
        file.write_text(to_toml(recipe))
        return recipe

    def measure(self, *, rehearse: bool) -> dict[str, Any]:
        """Trains, and returns the speed of a GPU."""
        keys = TINY | (EMULATED if self.row.float8 != "none" else {}) if rehearse else {}
        with tempfile.TemporaryDirectory() as folder:
            self.recipe(Path(folder), KEYS | keys)
            records = train(str(Path(folder, "recipe.toml")), {}, processes=self.row.gpus)
        steps = [record for record in records if "tokens_per_second" in record]
        device = torch.device("cpu" if rehearse else "cuda")
        return facts() | {
            "row": self.row.name, "steps": STEPS, "warmup": WARMUP, "device": device_name(device),
            "tokens_per_second": statistics.median(each["tokens_per_second"] for each in steps[WARMUP:]) / self.row.gpus,
            "peak_memory_gib": max(each["memory_gib"] for each in steps), "losses": [each["loss"] for each in steps],
        }  # fmt: skip

    def plan(self) -> Plan:
        """Returns the plan of this toolkit's run on the hardware of the row."""
        with tempfile.TemporaryDirectory() as folder:
            return make_plan(Job(self.recipe(Path(folder)), self.row.gpus), load_hardware(self.row.hardware))


def published(**values: Any) -> Row:
    """Returns the only row that has these values."""
    (row,) = (row for row in ROWS if all(getattr(row, name) == value for name, value in values.items()))
    return row


RUNS = {
    "kempnerforge_8b": Run(published(table="KempnerForge 7B", gpus=1)),
    "llmq_1_5b_bfloat16": Run(published(table="LLMQ", model="Qwen2.5 1.5B", float8="none")),
    "llmq_1_5b_float8": Run(published(table="LLMQ", model="Qwen2.5 1.5B", float8="tensorwise")),
    "llmq_7b_bfloat16": Run(published(table="LLMQ", model="Qwen2.5 7B", float8="none")),
    "llmq_7b_float8": Run(published(table="LLMQ", model="Qwen2.5 7B", float8="tensorwise")),
    "automodel_8b_lora": Run(published(table="AutoModel LoRA", gpus=1)),
    "megatron_8b_float8": Run(published(table="NeMo 8B", float8="tensorwise")),
    # All blocks on one GPU, which nobody has published.
    "8b_float8_full_depth": Run(
        Row(
            "titanlike", "h200", "Llama 3 8B", 1, 2, 0.0, 4, checkpoint="none", float8="tensorwise", all_gather=False,
            master_dtype="bfloat16",
        ),
        {"optimizer.stochastic_rounding": True},
    ),
}  # fmt: skip


def plans() -> dict[str, dict[str, Any]]:
    """Returns the published speed of each run, its plan, that of this toolkit, and what has been measured."""
    found = {}
    for name, run in RUNS.items():
        row, plan, file = run.row, run.plan(), RESULTS / f"{name}.json"
        speed = plan.tokens_per_second / row.gpus
        measured = json.loads(file.read_text()) if file.exists() else {}
        found[name] = {
            "gpus": f"{row.gpus} x {row.hardware}", "batch": f"{row.microbatches} x {row.batch} x {row.seq_len:,}",
            "published": row.tokens_per_second or None,
            "plan_of_published": round(tokens_per_second(row)) if row.tokens_per_second else None,
            "plan": round(speed), "low": round(speed * plan.range.low), "high": round(speed * plan.range.high),
            "reserved_gib": round(plan.reserved / 2**30, 1), "device": measured.get("device"),
            "measured": measured.get("tokens_per_second"), "peak_memory_gib": measured.get("peak_memory_gib"),
        }  # fmt: skip
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Returns the runs as a table. Speeds are tokens/s of a GPU."""
    rows = []
    for name, run in record["runs"].items():
        speeds = (f"{value:,.0f}" if value else "-" for value in (run["published"], run["plan_of_published"]))
        plan = f"{run['plan']:,} ({run['low']:,} to {run['high']:,})"
        measured = f"{run['measured']:,.0f}, {run['device']}" if run["measured"] else "not measured"
        rows.append((f"`{name}`", run["gpus"], run["batch"], *speeds, plan, run["reserved_gib"], measured))
    heads = ("Part", "GPUs", "Batch of a GPU", "Published", "Its plan", "Plan of titanlike", "GiB reserved", "Measured")
    return table(heads, rows)


def main() -> None:
    """Measures a run, or plans all."""
    parser = parser_of(__doc__)
    parser.add_argument("run", nargs="?", choices=RUNS)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    arguments = parser.parse_args()
    if arguments.run is None:
        record = facts() | {"runs": plans()}
        write(arguments.out, record)
        print(markdown(record))
        return
    measured = RUNS[arguments.run].measure(rehearse=arguments.rehearse)
    write(arguments.out, measured)
    print(f"{measured['tokens_per_second']:,.0f} tokens/s of a GPU, {measured['peak_memory_gib']:.2f} GiB")


if __name__ == "__main__":
    main()
