"""A SageMaker training job: its directories, and what they set in a recipe. Does not import torch."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.sections import Checkpoint
from titanlike.config.sections import Run as RunSection
from titanlike.distributed.environment import RankInfo

OBJECTIVE = "_tuning_objective_metric"  # the hyperparameter that SageMaker adds to the jobs of a tuner


@dataclass(frozen=True)
class SageMakerJob:
    """The directories of a SageMaker training job."""

    checkpoints: str
    """Synchronized with S3 during the job, and restored when a job with the same S3 location starts."""
    model: str
    """Uploaded to S3 after the job."""
    tensorboard: str = ""
    """Uploaded to S3 during the job, if it has a TensorBoardOutputConfig."""
    train: str = ""
    """The input channel `train` or `training`, if the job has one."""
    validation: str = ""
    """The input channel `validation`, if the job has one."""
    tuned: str = ""
    """The job's name, if a hyperparameter tuning job has started it. All jobs of a tuner have the same S3 location."""

    def defaults(self, name: str) -> dict[str, Any]:
        """Returns the run directory of a recipe of this name: one that outlives the job, and that the next job of the run finds."""
        return {"run": {"dir": self.checkpoints, "name": f"{name}-{self.tuned}" if self.tuned else name}}

    def data_paths(self, data: Any, overrides: Mapping[str, str]) -> dict[str, str]:
        """Returns the data paths that the input channels are, for the table `data` of a recipe. Like the command line, they belong
        to one start of the recipe."""
        is_mixed = "data.mixture" in overrides or (isinstance(data, dict) and data.get("mixture"))
        paths = {"data.path": "" if is_mixed else self.train, "data.validation_path": self.validation}
        return {key: path for key, path in paths.items() if path}

    def check_checkpoints(self, run: RunSection, checkpoint: Checkpoint, ranks: RankInfo) -> None:
        """Refuses to save to the disks of several hosts, where no host would have a complete checkpoint, and to resume the run of
        another job of the same tuner."""
        if not checkpoint.enabled:
            return
        if self.tuned and self.tuned not in f"{run.dir}/{run.name}":
            raise UserError(
                f"run.name = '{run.name}' is the same in all jobs of the tuner, which would resume each other's "
                "checkpoints; remove run.name, so that it is made of the names of the recipe and the job"
            )
        is_local = not checkpoint.dir and run.dir == self.checkpoints
        if is_local and ranks.world_size > ranks.local_world_size:
            raise UserError(
                f"checkpoint.dir is not set, and {run.dir} is a disk of each host: no host would have a complete "
                "checkpoint; set --checkpoint.dir=s3://BUCKET/PREFIX, or --checkpoint.enabled=false"
            )


def sagemaker_job(environ: Mapping[str, str] = os.environ) -> SageMakerJob | None:
    """Returns the directories of this training job, of which the toolkits of both SDKs set variables, or None elsewhere."""
    if not environ.get("SM_MODEL_DIR"):
        return None
    base = environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    config = f"{base}/input/config"
    output = _read_json(environ.get("TENSORBOARD_CONFIG_FILE_PATH") or f"{config}/tensorboardoutputconfig.json")
    is_tuned = OBJECTIVE in _read_json(f"{config}/hyperparameters.json")
    return SageMakerJob(
        checkpoints=f"{base}/checkpoints",
        model=environ["SM_MODEL_DIR"],
        tensorboard=(output.get("LocalPath") or f"{base}/output/tensorboard") if output else "",
        train=environ.get("SM_CHANNEL_TRAIN") or environ.get("SM_CHANNEL_TRAINING") or "",
        validation=environ.get("SM_CHANNEL_VALIDATION") or "",
        tuned=environ.get("TRAINING_JOB_NAME", "") if is_tuned else "",
    )


def _read_json(path: str) -> dict[str, Any]:
    """Returns the object of a JSON file, or an empty one if there is no such file."""
    try:
        return dict(json.loads(Path(path).read_text()) or {})
    except FileNotFoundError:
        return {}
