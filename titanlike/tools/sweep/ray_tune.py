"""Runs the trials of a sweep with Ray Tune, which places them on the nodes of a Ray cluster that share a file system.

Ray Tune schedules; suggestions, pruning and the storage are the same as with other backends.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.tools.metrics_file import read_records
from titanlike.tools.sweep.config import SweepPlan
from titanlike.tools.sweep.processes import start_run, values_of
from titanlike.tools.sweep.results import settings_text, trial_line, write_results
from titanlike.tools.sweep.study import Study

try:
    import ray
    from ray import tune
    from ray.tune.schedulers import FIFOScheduler, TrialScheduler
    from ray.tune.search import Searcher
except ImportError:
    raise UserError(
        'backend = "ray" requires Ray Tune, which is not installed; run: pip install "titanlike[ray]"'
    ) from None

POLL_INTERVAL = 0.5  # seconds


def run_on_ray(plan: SweepPlan, study: Study) -> None:
    """Runs all trials that have not ended, then new ones, on the Ray cluster of this machine or of RAY_ADDRESS."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        except ConnectionError:
            raise UserError("no Ray cluster was found; start one with `ray start --head`, or set RAY_ADDRESS") from None
    resources = plan.sweep.resources
    num_gpus = resources.gpus_per_trial if ray.cluster_resources().get("GPU") else 0
    processes = resources.processes_per_trial or max(1, num_gpus)
    absolute = replace(plan, sweep=replace(plan.sweep, dir=str(Path(plan.sweep.dir).absolute())))
    trainable = partial(_train, plan=absolute, folder=str(Path.cwd()), variables={"NPROC": str(processes)})
    remaining = plan.sweep.trials - sum(trial.state != "running" for trial in study.trials())
    if remaining < 1:
        return
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": processes, "gpu": num_gpus}),
        tune_config=tune.TuneConfig(
            search_alg=StudySearcher(study),
            scheduler=StudyScheduler(study),
            num_samples=remaining,
            max_concurrent_trials=max(1, resources.parallel),
        ),
        run_config=tune.RunConfig(name="ray", storage_path=str(absolute.path), verbose=0),
    )
    tuner.fit()


class StudySearcher(Searcher):
    """Gives Ray Tune the trials of a study: those that have not ended, then new ones."""

    def __init__(self, study: Study) -> None:
        super().__init__(metric="value", mode="min")
        self.study = study
        self._unfinished = [trial for trial in study.trials() if trial.state == "running"]
        self._numbers: dict[str, int] = {}  # by Ray Tune's id

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Returns the configuration of the next trial."""
        trial = self._unfinished.pop(0) if self._unfinished else self.study.create_trial()
        self._numbers[trial_id] = trial.number
        print(f"trial {trial.number} starts: {settings_text(trial.settings)}", flush=True)
        return {"number": trial.number, "settings": dict(trial.settings)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Ends the trial in the study. A trial that was interrupted is not ended."""
        number, result = self._numbers.pop(trial_id), result or {}
        if result.get("code") == 0:
            self.study.complete(number)
        elif result.get("code") is not None or error:
            self.study.fail(number, result.get("error") or "the worker of Ray failed")
        plan, trials = self.study.plan, self.study.trials()
        if trials[number].state != "running":
            print(trial_line(trials[number], trials, plan.sweep), flush=True)
        write_results(plan, trials, self.study.importance())


class StudyScheduler(FIFOScheduler):
    """Stops the trials that the study prunes."""

    def __init__(self, study: Study) -> None:
        super().__init__()
        self.study = study

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Reports the values of a trial so far. Returns whether it continues."""
        reason = self.study.report(trial.config["number"], result["values"])
        return TrialScheduler.STOP if reason else TrialScheduler.CONTINUE


def _train(config: dict[str, Any], plan: SweepPlan, folder: str, variables: Mapping[str, str]) -> None:
    """Runs a trial on a node of the cluster. Ray ends this worker to stop it, and the run then saves a checkpoint."""
    number = config["number"]
    run = start_run(plan, number, config["settings"], variables, folder)
    reported: list[tuple[int, float]] = []
    code = None
    while code is None:
        time.sleep(POLL_INTERVAL)
        code = run.poll()  # before the metrics are read
        values = values_of(read_records(plan.run_path(number) / "metrics.jsonl"), plan.sweep.metric)
        if values != reported or code is not None:
            error = run.error() if code else ""
            tune.report({"values": values, "value": values[-1][1] if values else 0.0, "code": code, "error": error})
            reported = values
