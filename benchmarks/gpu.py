"""Runs all single-GPU benchmarks, in stages of less than ten minutes that each write JSON files.

    python -m benchmarks.gpu limits --out benchmarks/results/h200
    python -m benchmarks.gpu 1b --out benchmarks/results/h200 --python torchtitan=peer/bin/python --path nanochat=nanochat

Further arguments are passed to benchmarks/run.py. `--list` prints the commands of each stage.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 570  # time limit of a stage; results so far are kept
PEERS = "plain,titanlike,torchtitan,litgpt,nanochat"


def run(model: str, precision: str, subjects: str, rows: str = "best", **options: str) -> str:
    """Returns a command of benchmarks/run.py."""
    arguments = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    return (
        f"benchmarks.run --device cuda --model {model} --precision {precision} --subject {subjects} --rows {rows} "
        + " ".join(arguments)
    )


# Each command writes a JSON file of its name. The most important commands of a stage come first.
STAGES = {
    "limits": {
        f"limits_{model}": f"benchmarks.limits --device cuda --model {model}"
        for model in ("llama3_1b", "llama3_8b_8layers", "gpt2_124m")
    },
    "tests": {"float8_kernels": "pytest tests/gpu -o addopts= -p no:cacheprovider --record"},
    "ladder": {
        "ladder_8b": run("llama3_8b_8layers", "bfloat16", "titanlike", "baseline,compile,float8,float8_all_gather", steps="30"),
    },
    "1b": {"1b_bfloat16": run("llama3_1b", "bfloat16", PEERS, steps="30")},
    "1b_float8": {"1b_float8": run("llama3_1b", "float8", "plain,titanlike,torchtitan,nanochat", steps="30")},
    "8b": {"8b_bfloat16": run("llama3_8b_8layers", "bfloat16", PEERS, steps="20", warmup="10")},
    "gpt2": {"gpt2_bfloat16": run("gpt2_124m", "bfloat16", "plain,titanlike,nanogpt,hf,nanochat")},
    "shipped": {"1b_shipped": run("llama3_1b", "bfloat16", "titanlike,torchtitan,litgpt,hf", "shipped", steps="20")},
}  # fmt: skip


def main() -> None:
    """Runs a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=list(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    parser.add_argument("--list", action="store_true")
    arguments, others = parser.parse_known_args()
    if arguments.list or not arguments.stage:
        for stage, commands in STAGES.items():
            print(stage, *(f"    python -m {command}" for command in commands.values()), sep="\n")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + SECONDS
    for name, command in STAGES[arguments.stage].items():
        file = str(arguments.out.absolute() / f"{name}.json")
        argv = [*shlex.split(command), *([file] if command.endswith("--record") else ["--out", file])]
        if argv[0] == "benchmarks.run":
            argv += others
        try:
            subprocess.run(
                [sys.executable, "-m", *argv], cwd=ROOT, timeout=max(1.0, end - time.monotonic()), check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {SECONDS} seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
