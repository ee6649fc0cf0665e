"""Trackers that are services: W&B and MLflow. The run directory's `trackers.json` has the ids with which a run is resumed."""

import json
import logging
import secrets
import threading
import time
from typing import Any

from titanlike.metrics.trackers import RunInfo, Values, tag
from titanlike.utils.atomic_io import atomic_write_text

_lock = threading.Lock()  # of trackers.json


class WandbTracker:
    """Logs to Weights & Biases, which reads its settings from the environment, such as WANDB_MODE=offline."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        key = f"wandb {run.project}"
        ids = _read_ids(run)
        if key not in ids:
            _write_id(run, key, secrets.token_hex(4))
            ids = _read_ids(run)
        # It must neither capture the terminal nor ask for an API key there.
        settings = wandb.Settings(console="off", silent=True, login_timeout=0.1)
        wandb.setup(settings)
        self._run: Any = wandb.init(
            project=run.project, id=ids[key], name=run.folder.name, resume="allow", dir=str(run.folder),
            config=dict(run.recipe), settings=settings,
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # records of saves come later than those of their steps
        self.location = self._run.url or f'offline; "wandb sync {run.folder}/wandb/offline-run-*" uploads it'

    def log(self, step: int, values: Values) -> None:
        """Logs the values of a step."""
        self._run.log({"step": step} | {tag(name): value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Waits for the upload."""
        self._run.finish()


def abandon_wandb() -> None:
    """Leaves the upload to W&B's process. Without this, the exit of this process waits for it."""
    import wandb

    wandb.teardown()


class MLflowTracker:
    """Logs to MLflow, at MLFLOW_TRACKING_URI, or to mlflow.db in the working directory."""

    def __init__(self, run: RunInfo) -> None:
        import mlflow

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client: Any = mlflow.MlflowClient()
        uri = mlflow.get_tracking_uri()
        key = f"mlflow {run.project} {uri}"
        self._run_id = _read_ids(run).get(key, "")
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(run.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            self._run_id = self._client.create_run(number, run_name=run.folder.name).info.run_id
            _write_id(run, key, self._run_id)
            params = [mlflow.entities.Param(name, str(value)[:500]) for name, value in run.hparams().items()]
            for first in range(0, len(params), 100):  # at most, in a request
                self._client.log_batch(self._run_id, params=params[first : first + 100])
            self._client.log_text(self._run_id, run.recipe_text(), "recipe.toml")
        self._metric = mlflow.entities.Metric
        self.location = f"run {self._run_id} at {uri}"

    def log(self, step: int, values: Values) -> None:
        """Logs the values of a step. Text is stored as an artifact."""
        now = int(1000 * time.time())
        numbers = {tag(name): value for name, value in values.items() if isinstance(value, int | float)}
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        for first in range(0, len(metrics), 1000):  # at most, in a request
            self._client.log_batch(self._run_id, metrics=metrics[first : first + 1000])
        for name, value in values.items():
            if isinstance(value, str):
                self._client.log_text(self._run_id, value, f"{tag(name)}/step-{step:08d}.txt")

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)


def _read_ids(run: RunInfo) -> dict[str, str]:
    path = run.folder / "trackers.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write_id(run: RunInfo, key: str, value: str) -> None:
    with _lock:
        atomic_write_text(run.folder / "trackers.json", json.dumps(_read_ids(run) | {key: value}, indent=1) + "\n")
