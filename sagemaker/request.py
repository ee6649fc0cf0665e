"""The request: all that SageMaker is told of a job, as its `CreateTrainingJob` takes it, made of what was asked alone.

Nothing here talks to anybody. What is printed by `--dry-run`, run by `--simulate` and sent is this one dictionary.

Where things of a run called RUN lie, below s3://BUCKET/PREFIX:

    code/JOB/            what this job runs, file by file, and `request.json`
    checkpoints/RUN/     written by the ranks themselves: a checkpoint is there when all of it is
    runs/RUN/            the run's folder (recipe, metrics, TensorBoard), which SageMaker carries to and fro
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from machines import Machine

OPT = "/opt/ml"  # where SageMaker puts things in a container
CODE = "code"  # the channel of the job's own files
ENTRY = ["python3", f"{OPT}/input/data/{CODE}/sagemaker/entry.py"]
ENDINGS = (".json", ".jsonl", ".txt", ".parquet", ".gz", ".zst", ".model", ".tiktoken")
STAMP = "%Y%m%d-%H%M%S"
SAFE = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-"

# What CloudWatch reads off the log lines that `titanlike/metrics/terminal.py` writes where there is no terminal.
NUMBER = r"([0-9.e+-]+)"
METRICS = {
    "loss": rf"step +\d+/\d+  loss {NUMBER}",
    "validation_loss": rf"step +\d+/\d+  val {NUMBER}",
    "tokens_per_second": rf"  {NUMBER} tok/s",
    "grad_norm": rf"  grad {NUMBER}",
    "learning_rate": rf"  lr {NUMBER}",
    "tflops_per_device": rf"  {NUMBER} TFLOP/s",
    "mfu_percent": rf"  MFU {NUMBER}%",
    "memory_gib": rf"  {NUMBER} GiB$",
    "save_seconds": rf"  saved  .* in {NUMBER} s;",
}


@dataclass(frozen=True)
class Channel:
    """Data that SageMaker lays before the job, in place of what a key of the recipe names."""

    key: str  # of the recipe: data.path
    address: str  # s3://bucket/prefix, or fsx://fs-0123/mount/folder
    mode: str = "File"
    number: int = 0  # of several for one key, from 1
    writes: bool = False

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9-]", "-", self.key) + (f"-{self.number}" if self.number else "")

    @property
    def is_file(self) -> bool:
        """S3 does not say: a name with an ending that text or a tokenizer has is taken for a file."""
        return self.address.startswith("s3://") and self.address.endswith(ENDINGS)

    @property
    def path(self) -> str:
        """Where it is in the container."""
        folder = f"{OPT}/input/data/{self.name}"
        return f"{folder}/{self.address.rsplit('/', 1)[1]}" if self.is_file else folder


@dataclass(frozen=True)
class Job:
    """What was asked, whole."""

    run: str
    stamp: str  # the time, which tells this job from others of its run
    words: tuple[str, ...]  # for ./run_train.sh: a recipe among the job's files, and overrides as they were given
    machine: Machine
    instances: int
    region: str
    role: str
    bucket: str
    image: str
    prefix: str = "titanlike"
    channels: tuple[Channel, ...] = ()
    checkpoints: Channel | None = None  # on FSx, in place of S3
    spot: bool = False
    max_hours: float = 24.0
    wait_hours: float = 0.0  # that spot capacity may be waited for besides
    volume_gb: int = 200
    keep_alive_minutes: int = 0
    training_plan: str = ""
    retries: int = 0
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    smoke: bool = False

    @property
    def name(self) -> str:
        """Of the job, which SageMaker wants in letters, digits and single dashes."""
        return f"{self.base_name}-{self.stamp}"

    @property
    def base_name(self) -> str:
        return base_name(self.prefix, self.run)

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def code(self) -> str:
        return f"{self.root}/code/{self.name}"

    @property
    def folder(self) -> str:
        return f"{self.root}/runs/{self.run}"


def base_name(prefix: str, run: str) -> str:
    """What the names of a run's jobs begin with, before the stamp."""
    plain = "".join(letter if letter in SAFE else "-" for letter in f"{prefix}-{run}")
    return re.sub("-+", "-", plain).strip("-")


def request_for(job: Job) -> dict[str, Any]:
    """The request of this job."""
    algorithm = {
        "TrainingImage": job.image,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ENTRY,
        "ContainerArguments": arguments(job),
        "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
    }
    resources: dict[str, Any] = {
        "InstanceType": job.machine.name,
        "InstanceCount": job.instances,
        "VolumeSizeInGB": job.volume_gb,
    }
    stopping = {"MaxRuntimeInSeconds": round(job.max_hours * 3600)}
    output = {"S3OutputPath": f"{job.root}/output"}
    if job.spot:
        stopping["MaxWaitTimeInSeconds"] = round((job.max_hours + job.wait_hours) * 3600)
    if job.keep_alive_minutes:
        resources["KeepAlivePeriodInSeconds"] = job.keep_alive_minutes * 60
    if job.training_plan:
        resources["TrainingPlanArn"] = job.training_plan
    if job.kms_key:
        resources["VolumeKmsKeyId"] = output["KmsKeyId"] = job.kms_key
    channels = [Channel(CODE, job.code), *job.channels, *([job.checkpoints] if job.checkpoints else [])]
    request: dict[str, Any] = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": algorithm,
        "RoleArn": job.role,
        "InputDataConfig": [_channel(channel) for channel in channels],
        "OutputDataConfig": output,
        "ResourceConfig": resources,
        "StoppingCondition": stopping,
        "CheckpointConfig": {"S3Uri": f"{job.folder}/", "LocalPath": f"{OPT}/checkpoints/{job.run}"},
        "Environment": environment(job),
        "Tags": [{"Key": k, "Value": v} for k, v in {"titanlike:run": job.run, **job.tags}.items()],
    }
    if job.spot:
        request["EnableManagedSpotTraining"] = True
    if job.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    if job.subnets:
        request["VpcConfig"] = {"SecurityGroupIds": list(job.security_groups), "Subnets": list(job.subnets)}
    return request


def arguments(job: Job) -> list[str]:
    """The recipe, where a run and its channels lie on SageMaker, and then the user's own words unchanged."""
    recipe, *overrides = job.words
    mode = ["--smoke"] if job.smoke else []
    kept = job.checkpoints.path if job.checkpoints else f"{job.root}/checkpoints"
    places = {
        "run.dir": f"{OPT}/checkpoints",
        "run.name": job.run,
        "checkpoint.dir": kept,
        "run.shutdown_timeout": "100",  # of the 120 seconds that SageMaker waits
    }
    several: dict[str, list[str]] = {}
    for channel in job.channels:
        several.setdefault(channel.key, []).append(channel.path)
    laid = {
        key: f"[{', '.join(repr(path) for path in paths)}]" if key == "data.mixture" else paths[0]
        for key, paths in several.items()
    }
    kept_words = [word for word in overrides if _key(word) not in laid]  # a channel stands in place of what a key names
    given = {_key(word) for word in kept_words}
    values = {key: value for key, value in places.items() if key not in given} | laid
    return [*mode, recipe, *(f"--{key}={value}" for key, value in values.items()), *kept_words]


def _key(word: str) -> str:
    """`run.name` of `--run.name=mine`."""
    return word.partition("=")[0].removeprefix("--")


def environment(job: Job) -> dict[str, str]:
    """Variables of the container; the user's own win."""
    variables = {"NCCL_DEBUG": "WARN"}
    if job.machine.efa and job.instances > 1:
        # Without EFA NCCL would go on over sockets, a hundred times as slow, and say nothing.
        variables["FI_PROVIDER"] = "efa"
        if job.machine.name.startswith("ml.p"):
            variables["FI_EFA_USE_DEVICE_RDMA"] = "1"  # from GPU to GPU, past the hosts' memory
    if job.smoke:
        variables |= {"SMOKE_GPUS": str(job.machine.num_gpus), "SMOKE_EFA": "1" if job.machine.efa else ""}
    return variables | job.environment


def _channel(channel: Channel) -> dict[str, Any]:
    if channel.address.startswith("fsx://"):
        where = urlsplit(channel.address)
        source: dict[str, Any] = {
            "FileSystemDataSource": {
                "FileSystemId": where.netloc,
                "FileSystemType": "FSxLustre",
                "FileSystemAccessMode": "rw" if channel.writes else "ro",
                "DirectoryPath": where.path,
            }
        }
        return {"ChannelName": channel.name, "DataSource": source}
    # With a slash at its end: else a prefix takes in its neighbours whose names begin with it.
    address = channel.address if channel.is_file else f"{channel.address.rstrip('/')}/"
    source = {
        "S3DataSource": {
            "S3DataType": "S3Prefix",
            "S3Uri": address,
            "S3DataDistributionType": "FullyReplicated",
        }
    }
    return {"ChannelName": channel.name, "InputMode": channel.mode, "DataSource": source}
