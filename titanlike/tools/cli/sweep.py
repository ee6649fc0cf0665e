"""`titanlike sweep`: hyperparameter search over the keys of a recipe. Imports Optuna late, to start fast."""

import argparse
import shlex
import subprocess
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.shipped import train_command
from titanlike.tools.cli.command import ANY_KEYS, add_command

DESCRIPTION = """\
Searches over keys of a recipe with Optuna. TPE suggests values, and trials that are worse than the median are pruned. Each trial is
an ordinary run. The same command resumes a sweep that was stopped or killed, and prints the results of one that is complete.

  titanlike sweep SWEEP.toml
  titanlike sweep SWEEP.toml --trials=20 --resources.parallel=2    keys of the sweep file can be overridden
  titanlike sweep SWEEP.toml --dry-run                             check it, and print the first command
  titanlike sweep runs/SWEEP                                       print the table of a sweep's directory"""


def add(commands: Any) -> None:
    """Adds `sweep` to the commands of `titanlike`."""
    parser = add_command(commands, "sweep", DESCRIPTION, run, overrides=ANY_KEYS)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml|FOLDER", help="sweep file, or folder of a sweep")
    parser.add_argument("--dry-run", action="store_true", help="check the sweep and its space, and start nothing")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from titanlike.run.start import Arguments
    from titanlike.tools.sweep.config import load_sweep
    from titanlike.tools.sweep.results import read_results, table

    overrides = Arguments([str(arguments.sweep), *arguments.overrides]).overrides
    if arguments.sweep.is_dir() and (overrides or arguments.dry_run):
        raise UserError(
            f"{arguments.sweep} is the folder of a sweep, whose table is printed; give its .toml file to change or run it"
        )
    if arguments.sweep.is_dir():
        print(table(read_results(arguments.sweep)))
        return 0
    plan = load_sweep(arguments.sweep, overrides)
    from titanlike.tools.sweep.scheduler import Interrupted, run_command, run_sweep, slots

    parallel = len(slots(plan))
    number = f"{plan.sweep.trials} trials, {parallel} at a time"
    print(f"sweep   {plan.path}: {number}, {plan.sweep.direction} {plan.sweep.metric}")
    for key, dimension in plan.dimensions.items():
        print(f"search  {key}: {dimension.describe()}")
    if arguments.dry_run:
        settings = {key: dimension.extremes()[0] for key, dimension in plan.dimensions.items()}
        command = run_command(plan, 0, settings)
        print(f"command {shlex.join(command)}", flush=True)  # before what it prints
        if plan.sweep.resources.backend == "sagemaker":
            command[command.index(str(plan.path / "recipe.toml"))] = str(plan.recipe)
            return subprocess.run([*command, "--dry-run"], check=False).returncode
        return 0
    repeat = shlex.join(["titanlike", "sweep", str(arguments.sweep), *(f"--{k}={v}" for k, v in overrides.items())])
    try:
        run_sweep(plan)
    except Interrupted as stopped:
        print(f"stopped by {stopped}; to resume the sweep: {repeat}")
        return stopped.code
    results = read_results(plan.path)
    print(f"\n{table(results)}\n\nresults {plan.path / 'sweep.json'}")
    if all(trial["state"] == "failed" for trial in results["trials"]):
        raise UserError(
            f"all {len(results['trials'])} trials failed, the last one because: {results['trials'][-1]['reason']}; correct this, "
            f"delete {plan.path} and start the sweep again"
        )
    best = plan.path / "best.toml"
    if best.exists():
        print(f"best    {best}; to train it: {train_command()} {shlex.quote(str(best))}")
    return 0
