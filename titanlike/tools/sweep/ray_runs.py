"""Places the runs of a sweep's trials on the nodes of a Ray cluster that share a file system."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.tools.sweep.config import SweepPlan
from titanlike.tools.sweep.processes import start_run

try:
    import ray
except ImportError:
    raise UserError('backend = "ray" requires Ray, which is not installed; run: pip install "titanlike[ray]"') from None


def connect() -> None:
    """Connects to the Ray cluster of this machine or of RAY_ADDRESS."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        except ConnectionError:
            raise UserError("no Ray cluster was found; start one with `ray start --head`, or set RAY_ADDRESS") from None


class RayRun:
    """A run that an actor starts on a node with free resources. Ray ends the actor if this process dies."""

    def __init__(self, plan: SweepPlan, number: int, settings: Mapping[str, str]) -> None:
        resources = plan.sweep.resources
        num_gpus = resources.gpus_per_trial if ray.cluster_resources().get("GPU") else 0
        processes = resources.processes_per_trial or max(1, num_gpus)
        absolute = replace(plan, sweep=replace(plan.sweep, dir=str(Path(plan.sweep.dir).absolute())))
        actor = ray.remote(num_cpus=processes, num_gpus=num_gpus)(_Node)
        variables = {"NPROC": str(processes)}
        self._node: Any = actor.remote(absolute, number, dict(settings), variables, str(Path.cwd()))
        self._state = self._node.state.remote()
        self._error = "the worker of Ray failed"

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs or waits for a node."""
        if not ray.wait([self._state], timeout=0)[0]:
            return None
        try:
            code, self._error = ray.get(self._state)
        except ray.exceptions.RayError:
            return 1
        if code is None:
            self._state = self._node.state.remote()
        return code

    def stop(self) -> None:
        """Requests that the run saves a checkpoint and ends."""
        self._node.stop.remote()

    def kill(self) -> None:
        """Ends all processes of the run."""
        self._node.kill.remote()

    def error(self) -> str:
        """Returns why the run failed."""
        return self._error


class _Node:
    """The run on its node."""

    def __init__(self, *arguments: Any) -> None:
        self._run = start_run(*arguments)

    def state(self) -> tuple[int | None, str]:
        code = self._run.poll()
        return code, self._run.error() if code else ""

    def stop(self) -> None:
        self._run.stop()

    def kill(self) -> None:
        self._run.kill()
