"""Checkpoints that torchtitan and Megatron-Core wrote, continued here, and the reverse for torchtitan, on the CPU.

    python -m venv torchtitan && torchtitan/bin/pip install torch torchtitan==0.3.0
    python -m venv torchtitan_0_2 && torchtitan_0_2/bin/pip install torch torchtitan==0.2.2
    python -m venv megatron && megatron/bin/pip install torch megatron-core==0.16.1 psutil
    python -m benchmarks.other_checkpoints --torchtitan torchtitan/bin/python --torchtitan-0-2 torchtitan_0_2/bin/python \
        --megatron megatron/bin/python --out benchmarks/results/other_checkpoints.json

torchtitan trains its debug models, on two processes with FSDP unless the embedding is tied, and saves after 10 of 15 steps.
`titanlike import` converts that checkpoint, and the run continues under three layouts. Then the reverse: a run of titanlike on two
processes is exported after 10 steps, and torchtitan continues. All train on the same batches, in float32. Megatron-Core saves a
model with random weights and its logits, which are compared with those of the imported model.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, losses, parser_of, table, titanlike, train, write
from titanlike.data.batches.sources import open_sources
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.weights import load_weights, open_weights
from titanlike.models.registry import build_model
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.run_dir import versions

STEPS, SAVED = 15, 10
LAYOUTS = ["", "shard=2", "tensor=2,pipeline=2"]
MODELS = {
    "llama3": dict(
        name="llama", dim=256, num_layers=6, num_heads=16, num_kv_heads=16, ffn_dim=768, vocab_size=2048, rope_scaling=8.0
    ),
    "qwen3": dict(
        name="qwen3", dim=256, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=128, ffn_dim=3072, vocab_size=2048,
        tied_head=True,
    ),
}  # fmt: skip
MEGATRON = {
    "llama": dict(
        name="llama", dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320, max_seq_len=128
    ),
    "gpt": dict(name="gpt", dim=64, num_layers=2, num_heads=4, vocab_size=320, max_seq_len=128),
}
RECIPE = """\
program = "pretrain"
[model]
{model}
[tokenizer]
encoding = "bytes"
[data]
source = "python_stdlib"
document_masks = false
[training]
steps = {steps}
seq_len = 64
global_batch_size = 8
local_batch_size = 2
compute_dtype = "float32"
[optimizer]
lr = 1e-3
[[optimizer.groups]]
pattern = "*"
weight_decay = 0.1  # of norms too, as in torchtitan
[schedule]
warmup_steps = 2
decay = "none"
[compile]
mode = "none"
[validation]
interval = 0
[checkpoint]
interval = 5
keep = 10
[metrics]
interval = 1
[run]
dir = "{folder}"
device = "cpu"
"""
OPTIONS = {
    "optimizer.lr": 1e-3, "lr_scheduler.warmup_steps": 2, "lr_scheduler.decay_ratio": 0.0, "training.seq_len": 64,
    "training.global_batch_size": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Version:
    """A version of torchtitan."""

    number: str
    subject: str
    program: str  # of `titanlike import`
    format: str  # of `titanlike export`
    options: dict[str, Any]


VERSIONS = {
    "torchtitan": Version("0.3.0", "torchtitan_checkpoints", "torchtitan", "dcp", {}),
    "torchtitan_0_2": Version(
        "0.2.2", "torchtitan_0_2_checkpoints", "torchtitan_0_2", "dcp_0_2", {"model.flavor": "debugmodel"}
    ),
}


def continue_runs(
    model: str, peer: str, folder: Path, version: Version, layouts: Sequence[str] = LAYOUTS
) -> dict[str, Any]:
    """Runs both directions with one model. Returns the losses by step of all runs."""
    recipe = folder / "train.toml"
    fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in MODELS[model].items())
    recipe.write_text(RECIPE.format(model=fields, steps=STEPS, folder=folder))
    batches = folder / "batches.npy"
    np.save(batches, read_batches(recipe))
    results: dict[str, Any] = {}

    results["torchtitan"] = train_there(model, peer, batches, folder / "there", version)
    for layout in layouts:
        name = f"continued-{len(results)}"
        copy = folder / f"{name}.toml"
        copy.write_text(recipe.read_text() + f'name = "{name}"\n')
        titanlike("import", folder / f"there/checkpoint/step-{SAVED}", copy, "--from", version.program)
        results[f"torchtitan, then titanlike {layout or 'in one process'}"] = train_here(copy, folder / name, layout)

    first = folder / "first.toml"
    first.write_text(recipe.read_text() + 'name = "first"\n')
    results["titanlike"] = train_here(first, folder / "first", "shard=2")
    titanlike("export", folder / "first", folder / "exported", "--step", SAVED, "--format", version.format)
    options = {
        "checkpoint.initial_load_path": str(folder / "exported"), "checkpoint.initial_load_model_only": False,
        "checkpoint.exclude_from_loading": ["dataloader"],
    }  # fmt: skip
    results["titanlike, then torchtitan"] = train_there(model, peer, batches, folder / "back", version, options, SAVED)
    return results


def read_batches(recipe: Path) -> Any:
    """Returns the tokens that the recipe trains on, by step and sequence."""
    loaded = load(PretrainRecipe, recipe, {})
    training = loaded.training
    sources = open_sources(
        loaded.data, build_tokenizer(loaded.tokenizer, loaded.model.vocab_size), seq_len=training.seq_len,
        global_batch_size=training.global_batch_size, seed=loaded.run.seed, validate=False,
    )  # fmt: skip
    rows = range(training.global_batch_size)
    return np.stack([sources.training.read(step, rows).tokens for step in range(1, STEPS + 1)])


def train_there(
    model: str,
    peer: str,
    batches: Path,
    folder: Path,
    version: Version,
    options: dict[str, Any] | None = None,
    skip: int = 0,
) -> dict[int, float]:
    """Trains with torchtitan on two processes. Returns the losses by step."""
    folder.mkdir()
    task, losses = folder / "task.json", folder / "losses.json"
    # torch 2.14 refuses torchtitan's tied embedding under FSDP.
    processes = 1 if MODELS[model].get("tied_head") else 2
    options = OPTIONS | version.options | {"training.local_batch_size": 8 // processes} | (options or {})
    values = {
        "model": model,
        "folder": str(folder),
        "batches": str(batches),
        "steps": STEPS,
        "interval": SAVED,
        "skip": skip,
    }
    task.write_text(json.dumps(values | {"losses": str(losses), "options": options}))
    module = f"benchmarks.subjects.{version.subject}"
    launcher = [peer, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    subprocess.run([*launcher, "-m", module, str(task)], check=True, env=variables(), cwd=ROOT)
    return {int(step): loss for step, loss in json.loads(losses.read_text()).items()}


def train_here(recipe: Path, run: Path, layout: str) -> dict[int, float]:
    """Trains with titanlike. Returns the losses by step."""
    sizes = dict(item.split("=") for item in layout.split(",")) if layout else {}
    keys = {f"parallelism.{key}": size for key, size in sizes.items()} | {"run.name": run.name}
    processes = int(np.prod([int(size) for size in sizes.values()]))
    return losses(train(str(recipe), keys, processes=processes, folder=run.parent))


def variables() -> dict[str, str]:
    """Returns the environment of a process."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def compare_logits(kind: str, peer: str, folder: Path) -> dict[str, float]:
    """Imports a model that Megatron-Core saved. Returns the largest difference of a logit, and the largest logit."""
    subprocess.run(
        [peer, "-m", "benchmarks.subjects.megatron_checkpoint", kind, str(folder)], check=True, env=variables(), cwd=ROOT
    )  # fmt: skip
    recipe = folder / "train.toml"
    fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in MEGATRON[kind].items())
    recipe.write_text(RECIPE.format(model=fields, steps=STEPS, folder=folder) + 'name = "imported"\n')
    titanlike("import", folder / "iter_0000010", recipe)
    weights = open_weights(folder / "imported")
    model = build_model(weights.config)
    load_weights(model, weights)
    expected = np.load(folder / "logits.npy")
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
    with torch.no_grad():
        found = model(tokens).numpy()
    return {"largest_difference": float(np.abs(found - expected).max()), "largest_logit": float(np.abs(expected).max())}


def markdown(results: dict[str, Any]) -> str:
    """Returns a table of the losses after the checkpoint, and the largest difference."""
    tables = []
    steps = range(SAVED + 1, STEPS + 1)
    for model, runs in results["models"].items():
        rows = []
        for name, found in runs.items():
            reference = runs[name.partition(",")[0]]
            difference = max(abs(found[str(step)] - reference[str(step)]) for step in steps)
            cells = [f"{found[str(step)]:.6f}" for step in steps]
            rows.append((name, *cells, "" if found is reference else f"{difference:.1e}"))
        tables.append(table((model, *(f"step {step}" for step in steps), "largest difference"), rows))
    return "\n\n".join(tables)


def main() -> None:
    """Runs all models, and writes the results."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes, so that the machine is not overloaded
    parser = parser_of(__doc__)
    for name, version in VERSIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"Python with torchtitan {version.number}")
    parser.add_argument("--megatron", help="Python with megatron-core 0.16.1")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"models": {}, "megatron": {}}
    if arguments.out and arguments.out.exists():
        results |= json.loads(arguments.out.read_text())
    results["versions"] = versions() | {"torchtitan": "0.3.0 and 0.2.2", "megatron-core": "0.16.1"}
    for name, version in VERSIONS.items():
        for model in MODELS if (peer := getattr(arguments, name)) else ():
            with tempfile.TemporaryDirectory() as folder:
                runs = continue_runs(model, peer, Path(folder), version)
            results["models"][f"{model} of torchtitan {version.number}"] = runs
    for kind in MEGATRON if arguments.megatron else ():
        with tempfile.TemporaryDirectory() as folder:
            results["megatron"][kind] = compare_logits(kind, arguments.megatron, Path(folder))
    results = json.loads(json.dumps(results))
    print(markdown(results))
    print(results["megatron"])
    write(arguments.out, results)


if __name__ == "__main__":
    main()
