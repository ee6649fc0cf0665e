"""TensorBoard, W&B and MLflow.

The run directory's `trackers.json` has the ids with which a run of a service is resumed, and the name of the run that they belong
to: a copy of the directory under another name is another run.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from titanlike.distributed.sagemaker import sagemaker_job
from titanlike.metrics.trackers import BackgroundTracker, Retried, RunInfo, Tracker, Values, tag
from titanlike.utils.atomic_write import atomic_write_text

UPLOAD_INTERVAL = 30.0  # seconds between two uploads of TensorBoard's events
MAX_EVENT_FILE = 8 * 2**20  # bytes; a larger file is uploaded a last time, and another one is begun

_lock = threading.Lock()  # of trackers.json


class TensorBoardTracker:
    """Writes TensorBoard events: numbers as scalars, strings as text, and the recipe as text and as hyperparameters."""

    location = ""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        self._directory = run.folder / "tensorboard"
        self._upload: EventUpload | None = None
        job = sagemaker_job()
        if "://" in run.tensorboard_dir:
            self._upload = EventUpload(self._directory, f"{run.tensorboard_dir.rstrip('/')}/{run.folder.name}")
        elif parent := run.tensorboard_dir or (job and job.tensorboard):
            self._directory = Path(parent, run.folder.name)
        self._writer = cast(Any, SummaryWriter(str(self._directory), purge_step=run.first_step))
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in run.recipe_text().splitlines()))
        for summary in hparams(run.hparams(), {"train/loss": None, "validation/loss": None}):
            self._writer.file_writer.add_summary(summary)

    def log(self, step: int, values: Values) -> None:
        """Writes the values of a step, except for `tokens`, a multiple of the step."""
        if not self._directory.exists():
            self._directory.mkdir(parents=True)
            self._writer.close()  # it opens another file for the next event
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(tag(name), value, step)
            elif value is not None and name != "tokens":
                self._writer.add_scalar(tag(name), value, step)
        if self._upload and self._upload.is_due():
            self._writer.flush()
            if self._upload.upload() > MAX_EVENT_FILE:
                self._writer.close()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
        if self._upload:
            self._upload.finish()


class EventUpload:
    """Copies the files of a directory to a store whenever they have changed. TensorBoard reads them there during the run."""

    def __init__(self, directory: Path, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # slow to import, and unused by most runs

        self._directory, self._url = directory, url
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._uploaded: dict[str, int] = {}  # sizes
        self._is_failing = False
        self._last = 0.0

    def is_due(self) -> bool:
        """Tells whether the interval between two uploads has passed."""
        return time.monotonic() - self._last >= UPLOAD_INTERVAL

    def upload(self) -> int:
        """Uploads the files that have grown. Returns the size of the newest. The first failure of several raises `Retried`."""
        self._last = time.monotonic()
        sizes = {path.name: path.stat().st_size for path in sorted(self._directory.iterdir())}
        try:
            for name, size in sizes.items():
                if self._uploaded.get(name) != size:
                    self._files.pipe_file(f"{self._root}/{name}", (self._directory / name).read_bytes())
                    self._uploaded[name] = size
        except Exception as error:  # noqa: BLE001  each file system has its own errors
            if self._is_failing:
                return 0
            self._is_failing = True
            raise Retried(f"cannot write to {self._url}, and tries again until it can: {error!r}") from None
        self._is_failing = False
        return list(sizes.values())[-1]

    def finish(self) -> None:
        """Uploads what is left. Raises `Retried`, with where the events are, if that fails."""
        self._is_failing = False
        try:
            self.upload()
        except Retried:
            raise Retried(
                f"could not write its last events to {self._url}; {self._directory} has all of them"
            ) from None


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
        self._run.define_metric("*", step_metric="step")  # a record of a save comes later than its step's
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


TRACKERS: dict[str, tuple[str, Callable[[RunInfo], Tracker], str]] = {
    "tensorboard": ("TensorBoard", TensorBoardTracker, "torch.utils.tensorboard"),
    "wandb": ("W&B", WandbTracker, "wandb"),
    "mlflow": ("MLflow", MLflowTracker, "mlflow"),
}


def start_tracker(tracker: str, run: RunInfo) -> BackgroundTracker:
    """Starts a tracker in a thread of its own."""
    name, build, package = TRACKERS[tracker]
    abandon = abandon_wandb if tracker == "wandb" else lambda: None
    return BackgroundTracker(name, partial(build, run), package, abandon)


def _read_ids(run: RunInfo) -> dict[str, str]:
    path = run.folder / "trackers.json"
    ids: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return ids if ids.get("run", run.folder.name) == run.folder.name else {}


def _write_id(run: RunInfo, key: str, value: str) -> None:
    with _lock:
        atomic_write_text(
            run.folder / "trackers.json",
            json.dumps(_read_ids(run) | {"run": run.folder.name, key: value}, indent=1) + "\n",
        )
