"""Speedrun: time and tokens until the validation loss of a recipe reaches a target, side by side with other choices.

    python -m benchmarks.speedrun --runs 5 --out benchmarks/results/speedrun_cpu.json     measures all subjects, in turns
    python -m benchmarks.speedrun --ingredients --out benchmarks/results/speedrun_cpu.json   adds each ingredient, on and off
    python -m benchmarks.speedrun --variants --runs 5 --out benchmarks/results/speedrun_cpu.json   adds variants of Muon
    python -m benchmarks.speedrun --table benchmarks/results/speedrun_cpu.json            prints the tables
    python -m benchmarks.speedrun --model init --out benchmarks/results/speedrun_init_cpu.json   the recipe of `titanlike init`
    python -m benchmarks.speedrun --model gpt2_124m --out speedrun_gpu.json               GPT-2 124M on the GPUs of this machine

Every run is the shipped training program with one recipe, by default `train_configs/debug.toml`, its data, its held-out part and
its validation batches. A subject is a set of overrides. Run n of each subject has seed n, which selects the validation batches,
too: the target of a seed is the final loss of AdamW with it. The subjects take turns, so that other load on the machine slows all
of them. Time is that of the training steps with data wait, without start-up and validation.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from benchmarks import common
from benchmarks.common import table as table_of

QUERIES_AND_KEYS = '{pattern = "attention.w[qk]*", optimizer = "muon", lr_scale = 3.0}'
MUON = '{pattern = "layers", optimizer = "muon"}'
OTHERS = '{pattern = "*", lr_scale = 6.0}'
QWEN3 = {"model.name": "qwen3", "model.head_dim": "48"}  # a Llama with QK-norm
# The other subjects have a batch size of their own. The sequences of 4 validation batches of 16 are those of 8 of 8.
OTHER_SETTINGS = {
    "training.steps": "400", "training.global_batch_size": "16", "validation.batches": "4", "training.max_norm": "1",
    "optimizer.lr": "1.5e-3", "optimizer.groups": "[]", "schedule.warmup_steps": "20", "schedule.decay": "cosine",
    "schedule.min_ratio": "0.1",
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Choices whose effect is measured."""

    label: str
    overrides: dict[str, str]


@dataclass(frozen=True)
class Speedrun:
    """A recipe, what it is compared with, and the loss to reach."""

    recipe: str
    target: float | None  # None: the final loss of `adamw` with the same seed
    validation_interval: int
    subjects: dict[str, Subject]


DEBUG_SUBJECTS = {
    "adamw": Subject("AdamW with cosine decay to 10%", OTHER_SETTINGS),
    "debug": Subject("`train_configs/debug.toml`: Muon", {}),
    "nanochat": Subject(
        "nanochat's optimizers, learning rates and schedule, with QK-norm",
        OTHER_SETTINGS | {
            **QWEN3, "optimizer.lr": "0.02", "optimizer.muon_momentum": "0.95",
            "optimizer.muon_lr_scaling": "spectral", "optimizer.beta1": "0.8", "optimizer.beta2": "0.95", "optimizer.eps": "1e-10",
            "optimizer.weight_decay": "0", "schedule.warmup_steps": "0", "schedule.decay": "linear", "schedule.decay_ratio": "0.2",
            "schedule.min_ratio": "0",
            # 0.2 and 0.004 at dimension 768, times (192 / 768)^-0.5; norms have no weights there, and here those of the LM head.
            "optimizer.groups": f'[{MUON}, {{pattern = "tok_embeddings", lr_scale = 20.0}}, {{pattern = "*", lr_scale = 0.4}}]',
        },
    ),
    "nanogpt": Subject(
        "a plain GPT-2 with nanoGPT's settings for small models",
        OTHER_SETTINGS | {
            "model.name": "gpt", "model.dim": "192", "model.num_layers": "4", "model.num_heads": "4", "training.steps": "800",
            "optimizer.lr": "1e-3", "optimizer.beta2": "0.99", "schedule.warmup_steps": "100",
        },
    ),
}  # fmt: skip
GPT2_SUBJECTS = {
    "adamw": Subject(
        "AdamW with cosine decay to 10%",
        {
            "training.steps": "19000", "optimizer.lr": "6e-4", "optimizer.groups": "[]", "schedule.warmup_steps": "700",
            "schedule.decay": "cosine", "schedule.decay_ratio": "0", "schedule.min_ratio": "0.1",
        },
    ),
    "muon": Subject("`train_configs/gpt2_124m_speedrun.toml`: Muon", {}),
}  # fmt: skip
INIT_SUBJECTS = {
    "adamw": Subject(
        "what `titanlike init` wrote before: AdamW, 16 sequences of 256 tokens",
        OTHER_SETTINGS | {
            "training.steps": "1000", "training.seq_len": "256", "optimizer.lr": "3e-3", "optimizer.muon_momentum": "0.95",
            "schedule.warmup_steps": "100", "validation.batches": "8",
        },
    ),
    "init": Subject("what it writes", {"training.steps": "1000", "validation.batches": "32"}),
}  # fmt: skip
MODELS = {
    "init": Speedrun("debug", None, 50, INIT_SUBJECTS),
    "debug": Speedrun("debug", None, 5, DEBUG_SUBJECTS),
    "gpt2_124m": Speedrun("gpt2_124m_speedrun", 3.28, 125, GPT2_SUBJECTS),
}


def train(speedrun: Speedrun, overrides: dict[str, str], seed: int) -> dict[str, Any]:
    """Trains once. Returns the validation losses with the steps, tokens and seconds of training until each."""
    keys = {"metrics.interval": 1, "validation.interval": speedrun.validation_interval, "run.seed": seed}
    seconds, curve, tokens = 0.0, [], 0
    for record in common.train(speedrun.recipe, keys | overrides):
        if "step_seconds" in record:  # each step has a record
            seconds, tokens = seconds + record["step_seconds"], record["tokens"]
        elif "validation_loss" in record:
            curve.append([record["step"], tokens, round(seconds, 3), record["validation_loss"]])
    return {"seed": seed, "curve": curve}


def until(run: dict[str, Any], target: float) -> float:
    """Returns the tokens at the first validation that reached the target, or infinity."""
    return next((tokens for _, tokens, _, loss in run["curve"] if loss <= target), math.inf)


def seconds_per_token(runs: list[dict[str, Any]]) -> float:
    """Returns the median over the validations of all runs: since the one before."""
    return statistics.median(
        (later[2] - earlier[2]) / (later[1] - earlier[1])
        for run in runs
        for earlier, later in itertools.pairwise(run["curve"])
    )


def measure(speedrun: Speedrun, names: list[str], runs: int, out: Path) -> None:
    """Runs the subjects in turns, and writes the result after each run."""
    found = json.loads(out.read_text()) if out.exists() else {}
    found |= {"target": speedrun.target} | common.facts()
    # Subjects of an earlier call remain in the file.
    found["subjects"] = {name: subject for name, subject in found.get("subjects", {}).items() if name not in names}
    found["subjects"] |= {name: {"label": speedrun.subjects[name].label, "runs": []} for name in names}
    for seed in range(runs):
        for name in names:
            run = train(speedrun, speedrun.subjects[name].overrides, seed)
            found["subjects"][name]["runs"].append(run)
            out.write_text(json.dumps(found) + "\n")
            print(f"{name}, seed {seed}: final {run['curve'][-1]}", flush=True)


# What is changed in `train_configs/debug.toml`, each alone and for the same number of tokens.
INGREDIENTS = {
    "AdamW with its learning rate, 1.5e-3": {"optimizer.groups": "[]", "optimizer.lr": "1.5e-3"},
    "AdamW, 3e-3": {"optimizer.groups": "[]", "optimizer.lr": "3e-3"},
    "half of the learning rate": {"optimizer.lr": "5e-3"},
    "twice the learning rate": {"optimizer.lr": "2e-2"},
    "queries and keys: the learning rate of the other matrices": {"optimizer.groups": f"[{MUON}, {OTHERS}]"},
    "queries and keys: 6 times the learning rate of the other matrices": {
        "optimizer.groups": f"[{QUERIES_AND_KEYS.replace('3.0', '6.0')}, {MUON}, {OTHERS}]"
    },
    "embeddings, LM head, norms: Muon's learning rate": {"optimizer.groups": f"[{QUERIES_AND_KEYS}, {MUON}]"},
    "QK-norm, and one learning rate of the matrices": {**QWEN3, "optimizer.groups": f"[{MUON}, {OTHERS}]"},
    "RoPE base of 100": {"model.rope_theta": "100"},
    "gradient norm clipped at 1": {"training.max_norm": "1"},
    "Muon's momentum 0.95": {"optimizer.muon_momentum": "0.95"},
    "Muon's momentum 0.8": {"optimizer.muon_momentum": "0.8"},
    "warmup of 20 steps": {"schedule.warmup_steps": "20"},
    "decay to 10% instead of 0": {"schedule.min_ratio": "0.1"},
    "cosine instead of linear decay": {"schedule.decay": "cosine"},
    "decay in the last half only": {"schedule.decay_ratio": "0.5"},
    "no weight decay": {"optimizer.weight_decay": "0"},
    "60 steps with half of the batch size": {
        "training.batch_ramp": "[[60, 4]]", "training.local_batch_size": "4", "training.steps": "200",
    },
    "tied LM head": {"model.tied_head": "true"},
}  # fmt: skip


def matrices_at(factor: float) -> dict[str, str]:
    """Returns the change of the learning rate of the matrices, queries and keys included, alone."""
    groups = (QUERIES_AND_KEYS.replace("3.0", f"{3.0 * factor}"), MUON.replace("}", f", lr_scale = {factor}}}"), OTHERS)
    return {"optimizer.groups": f"[{', '.join(groups)}]"}


POLAR_EXPRESS = {"program": str(common.ROOT / "benchmarks/muon_variants.py"), "variant.polar_express": "true"}
NORMUON = {"program": str(common.ROOT / "benchmarks/muon_variants.py"), "variant.second_moment": "0.95"}
VARIANTS = {
    "matrices: 1.001 times the learning rate": matrices_at(1.001),  # how far rounding alone would bring the loss
    "matrices: 1.2 times the learning rate": matrices_at(1.2),
    "Polar Express": POLAR_EXPRESS,
    "Polar Express, matrices: 0.9 times the learning rate": POLAR_EXPRESS | matrices_at(0.9),
    "Polar Express, matrices: 1.2 times the learning rate": POLAR_EXPRESS | matrices_at(1.2),
    "NorMuon": NORMUON,
    "NorMuon, matrices: 0.8 times the learning rate": NORMUON | matrices_at(0.8),
    "NorMuon, matrices: 1.2 times the learning rate": NORMUON | matrices_at(1.2),
}


def measure_changes(key: str, changes: dict[str, dict[str, str]], runs: int, out: Path) -> None:
    """Runs the debug recipe and each change of it, and writes the result after each run. Does not repeat runs of the file."""
    found = json.loads(out.read_text())
    measured = found.setdefault(key, {})
    speedrun = replace(MODELS["debug"], validation_interval=100_000)  # validates at the last step
    for seed in range(runs):
        for name, overrides in ({"as it is": {}} | changes).items():
            if len(measured.setdefault(name, [])) <= seed:
                measured[name].append(train(speedrun, overrides, seed))
                out.write_text(json.dumps(found) + "\n")
                print(f"{name}, seed {seed}: final {measured[name][-1]['curve'][-1]}", flush=True)


def batches() -> dict[str, dict[str, str]]:
    """Returns the changes of the batch size that keep the number of tokens."""
    with (common.ROOT / "train_configs/debug.toml").open("rb") as file:
        recipe = tomli.load(file)
    size, steps = recipe["training"]["global_batch_size"], recipe["training"]["steps"]
    batches = recipe["validation"]["batches"]
    return {
        f"{name} batch size": {
            "training.global_batch_size": str(int(size * factor)), "training.steps": str(int(steps / factor)),
            "training.local_batch_size": str(min(8, int(size * factor))),
            "validation.batches": str(int(batches / factor)),  # the same sequences
        }
        for name, factor in (("half of the", 0.5), ("twice the", 2.0))
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Returns the tables of the documentation: medians over the seeds. A run that does not reach the target counts as longest.

    The tokens to the target depend on the seed only. Other load on the machine changes the speed of whole runs by half, so that of
    a subject is the median over all its runs, between validations."""
    rows = []
    adamw = {run["seed"]: run for run in found["subjects"]["adamw"]["runs"]}
    targets = {seed: found["target"] or run["curve"][-1][3] for seed, run in adamw.items()}
    baseline = math.nan
    for subject in found["subjects"].values():
        runs = subject["runs"]
        hits = [until(run, targets[run["seed"]]) for run in runs]
        tokens = statistics.median(hits)
        seconds = tokens * seconds_per_token(runs)
        baseline = seconds if runs == list(adamw.values()) else baseline
        cells = ["not reached", "", ""]
        if seconds < math.inf:
            cells = [f"{seconds:.1f}", f"{seconds / baseline:.2f}", f"{tokens:,.0f}"]
        reached = f"{sum(map(math.isfinite, hits))} of {len(hits)}"
        final = statistics.median(run["curve"][-1][3] for run in runs)
        rows.append((subject["label"], *cells, reached, f"{final:.3f}", runs[0]["curve"][-1][0]))
    heads = ("", "Seconds to the target", "Relative", "Tokens to the target", "Reached by", "Final loss", "Steps")
    changes = [
        (name, f"{statistics.median(losses):.3f}", f"{statistics.median(differences):+.3f}")
        for name, losses, differences in changes_of(found.get("ingredients", {}))
    ]
    variants = [
        (name, f"{statistics.median(each):+.3f}", f"{min(each):+.3f} to {max(each):+.3f}", len(each))
        for name, _, each in changes_of(found.get("variants", {}))
        if any(each)
    ]
    return "\n\n".join(
        [
            table_of(heads, rows),
            table_of(("Change", "Final loss", "Difference"), changes),
            table_of(("Change", "Difference", "Lowest to highest", "Seeds"), variants),
        ]
    )


def changes_of(measured: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yields each change with its final losses, and their differences from the same seeds without a change."""
    losses = {name: [run["curve"][-1][3] for run in runs] for name, runs in measured.items()}
    for name, values in losses.items():
        yield name, values, [changed - loss for changed, loss in zip(values, losses["as it is"], strict=False)]


def main() -> None:
    """Measures, or prints the tables of a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="debug", help="model and recipe (default: debug)")
    parser.add_argument("--subjects", default="", help="names separated by commas (default: all of the model)")
    parser.add_argument(
        "--runs", type=int, default=1, help="runs of each subject, with the seeds 0, 1, ... (default: 1)"
    )
    parser.add_argument("--ingredients", action="store_true", help="measure changes of the debug recipe, one at a time")
    parser.add_argument("--variants", action="store_true", help="measure variants of Muon beside noise")
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the tables of an existing result")
    arguments = parser.parse_args()
    if arguments.table is None:
        if arguments.out is None:
            parser.error("--out or --table is required")
        speedrun = MODELS[arguments.model]
        names = arguments.subjects.split(",") if arguments.subjects else list(speedrun.subjects)
        if unknown := set(names) - set(speedrun.subjects):
            parser.error(f"--subjects: unknown {', '.join(unknown)}; use {', '.join(speedrun.subjects)}")
        if arguments.ingredients:
            measure_changes("ingredients", INGREDIENTS | batches(), arguments.runs, arguments.out)
        elif arguments.variants:
            measure_changes("variants", VARIANTS, arguments.runs, arguments.out)
        else:
            measure(speedrun, names, arguments.runs, arguments.out)
    print(table(json.loads((arguments.table or arguments.out).read_text())))


if __name__ == "__main__":
    main()
