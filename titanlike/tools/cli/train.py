"""`titanlike train A B ...`: trains recipes one after the other, each from the last weights of the one before."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TextIO

import tomli

from titanlike.config import UserError
from titanlike.config.shipped import train_command
from titanlike.distributed import environment, launch_config
from titanlike.recipe import to_toml
from titanlike.run.checks import check_recipe
from titanlike.run.start import Arguments
from titanlike.tools.programs import load_known, options_of
from titanlike.tools.stages import Stage, load_stages
from titanlike.utils import system
from titanlike.utils.live_line import print_line


def train_stages(argv: Sequence[str]) -> int:
    """Trains what is missing of the stages on a command line. Returns the exit code of the stage that stopped, otherwise 0."""
    arguments = Arguments(argv, many=True)
    overrides = dict(arguments.overrides)
    if arguments.resolved or "program" in overrides or "checkpoint.resume_from" in overrides:
        raise UserError(
            "--resolved, --program and --checkpoint.resume_from are for one recipe; train the stages one by one"
        )
    if environment.rank_info().started_by_launcher:
        raise UserError(
            f"several recipes: each stage starts its own processes; start {train_command()} without torchrun"
        )
    slurm = launch_config.rank_variables_from_slurm()
    config = launch_config.launch_config()
    num_processes = int(slurm["WORLD_SIZE"]) if slurm else config.world_size
    is_main = slurm["RANK"] == "0" if slurm else config.node_rank == 0

    def say(line: str, file: TextIO | None = None) -> None:
        if is_main:
            print_line(line, file)

    name = overrides.pop("run.name", "") or load_known(arguments.recipes[0], overrides).run.name
    if not name and (slurm or config.num_nodes > 1 or config.max_nodes):
        raise UserError("several recipes on several nodes need a name that all nodes know; give --run.name")
    name = name or environment.new_launch_id()
    stages = load_stages(arguments.recipes, overrides, name)
    for stage in stages:  # before hours of the first
        check_recipe(stage.recipe, arguments.check or num_processes)
    if arguments.check:
        return max(_run([str(stage.path), *options_of(overrides), f"--check={arguments.check}"]) for stage in stages)
    initial: dict[str, str] = {}
    for number, stage in enumerate(stages):
        values = overrides | initial | {"run.name": stage.run_name}
        heading = f"stage {number + 1} of {len(stages)}: {stage.path}"
        if stage.is_trained and _is_recipe_of_run(stage, values):
            say(f"{heading} is trained: {stage.folder}")
        else:
            if later := next((each for each in stages[number + 1 :] if each.newest_checkpoint), None):
                raise UserError(
                    f"{later.folder} continues {stage.folder}, which is not the finished run of {stage.path}; give another "
                    f"--run.name, or remove {later.folder}"
                )
            say(heading)
            if code := _run([str(stage.path), *options_of(values)]):
                recipes = (str(path) for path in arguments.recipes)
                again = shlex.join([*recipes, *options_of(overrides | {"run.name": name})])
                say(f"to resume all stages: titanlike train {again}", sys.stderr)
                return code
        initial = {"checkpoint.initial": str(stage.newest_checkpoint)}
    return 0


def _is_recipe_of_run(stage: Stage, values: Mapping[str, str]) -> bool:
    """Whether the run was trained with exactly this recipe."""
    stored = stage.folder / "recipe.toml"
    recipe = load_known(stage.path, values)
    checkpoint = replace(recipe.checkpoint, resume_from=0, allow_changed=())  # not in the file of a run
    resolved = to_toml(replace(recipe, checkpoint=checkpoint))
    return stored.exists() and tomli.loads(stored.read_text()) == tomli.loads(resolved)


def _run(arguments: Sequence[str]) -> int:
    """Trains one recipe in a process of its own, to which it forwards signals. Returns the exit code, or 128 + a signal that came
    when the process had no more to stop."""
    stop_with_parent = partial(system.signal_at_parent_death, os.getpid(), signal.SIGTERM)
    command = [sys.executable, "-m", "titanlike", "train", *arguments]
    process = subprocess.Popen(command, preexec_fn=stop_with_parent)
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:  # a terminal sends it to both
            process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *([] if system.ignores_hangup() else [signal.SIGHUP]))
    previous = {number: signal.signal(number, forward) for number in signals}
    code = process.wait()
    for number, handler in previous.items():
        signal.signal(number, handler)
    if code < 0:
        return 128 - code
    return code or (128 + received[0] if received else 0)
