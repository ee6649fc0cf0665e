"""The `CreateTrainingJob` request of a job, built without contacting AWS.

`--dry-run` prints this dictionary, `--simulate` executes it locally, `submit.py` sends it. Layout below s3://BUCKET/PREFIX:

    code/JOB/            files of one job, and `request.json`
    checkpoints/RUN/     checkpoints, written to S3 by the ranks
    runs/RUN/            run directory (recipe, metrics, TensorBoard events), synchronized by SageMaker
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from titanlike.tools.planning.hardware import Hardware

OPT = "/opt/ml"  # SageMaker's directory in the container
CODE = "code"  # name of the channel with the job's files
ENTRY = ["python3", f"{OPT}/input/data/{CODE}/titanlike/tools/clusters/sagemaker/entry.py"]
FILE_SUFFIXES = (".json", ".jsonl", ".txt", ".parquet", ".gz", ".zst", ".model", ".tiktoken")
PREFIX = "titanlike"
TIMESTAMP = "%Y%m%d-%H%M%S"  # suffix of job names

# CloudWatch extracts these from the log lines of `titanlike/metrics/terminal.py`.
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
    """An input channel, whose mount path replaces the value of a recipe key."""

    key: str  # such as data.path
    uri: str  # s3://bucket/prefix, or fsx://fs-0123/mount/folder
    mode: str = "File"
    number: int = 0  # from 1, if the key has several channels
    writable: bool = False

    @property
    def name(self) -> str:
        # ModelTrainer's start script exports a shell variable of this name.
        return re.sub(r"[^A-Za-z0-9]", "_", self.key) + (f"_{self.number}" if self.number else "")

    @property
    def is_file(self) -> bool:
        """S3 prefixes have no type: a URI with the suffix of a text or tokenizer file counts as a file."""
        return self.uri.startswith("s3://") and self.uri.endswith(FILE_SUFFIXES)

    @property
    def path(self) -> str:
        """Path in the container."""
        folder = f"{OPT}/input/data/{self.name}"
        return f"{folder}/{self.uri.rsplit('/', 1)[1]}" if self.is_file else folder

    def request(self) -> dict[str, Any]:
        """Returns the channel's entry in `InputDataConfig`."""
        if self.uri.startswith("fsx://"):
            location = urlsplit(self.uri)
            file_system = {
                "FileSystemId": location.netloc,
                "FileSystemType": "FSxLustre",
                "FileSystemAccessMode": "rw" if self.writable else "ro",
                "DirectoryPath": location.path,
            }
            return {"ChannelName": self.name, "DataSource": {"FileSystemDataSource": file_system}}
        # Without the trailing slash, S3 also matches keys that continue the prefix's last name.
        uri = self.uri if self.is_file else f"{self.uri.rstrip('/')}/"
        source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
        return {"ChannelName": self.name, "InputMode": self.mode, "DataSource": {"S3DataSource": source}}


@dataclass(frozen=True)
class TrainingJob:
    """All settings of a job."""

    run: str
    timestamp: str
    arguments: Sequence[str]  # of ./run_train.sh: a recipe among the job's files, then overrides
    instance_type: str  # such as ml.p5.48xlarge
    hardware: Hardware  # of the instance type
    nodes: int
    region: str
    role: str
    bucket: str
    image: str
    prefix: str = PREFIX
    channels: Sequence[Channel] = ()
    checkpoints: Channel | None = None  # on FSx; None for S3
    spot: bool = False
    max_hours: float = 24.0
    wait_hours: float = 0.0  # time allowed for spot capacity, in addition to max_hours
    volume_gb: int = 200
    keep_alive: int = 0  # minutes
    training_plan: str = ""
    retries: int = 0
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    kms_key: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    doctor: bool = False

    @property
    def name(self) -> str:
        return f"{base_name(self.prefix, self.run)}-{self.timestamp}"

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def code(self) -> str:
        return f"{self.root}/code/{self.name}"

    @property
    def run_dir(self) -> str:
        return f"{self.root}/runs/{self.run}"


def base_name(prefix: str, run: str) -> str:
    """Returns the names of a run's jobs without the timestamp. SageMaker accepts letters, digits and single dashes."""
    return re.sub("[^a-zA-Z0-9]+", "-", f"{prefix}-{run}").strip("-")


def request_for(job: TrainingJob) -> dict[str, Any]:
    """Returns the `CreateTrainingJob` request of a job."""
    channels = [Channel(CODE, job.code), *job.channels, *([job.checkpoints] if job.checkpoints else [])]
    resources = {
        "InstanceType": job.instance_type,
        "InstanceCount": job.nodes,
        "VolumeSizeInGB": job.volume_gb,
        "KeepAlivePeriodInSeconds": job.keep_alive * 60,
        "TrainingPlanArn": job.training_plan,
    }
    stopping = {
        "MaxRuntimeInSeconds": round(job.max_hours * 3600),
        "MaxWaitTimeInSeconds": job.spot and round((job.max_hours + job.wait_hours) * 3600),
    }
    request = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ENTRY,
            "ContainerArguments": container_arguments(job),
            "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        },
        "RoleArn": job.role,
        "InputDataConfig": [channel.request() for channel in channels],
        "OutputDataConfig": _drop_empty({"S3OutputPath": f"{job.root}/output", "KmsKeyId": job.kms_key}),
        "ResourceConfig": _drop_empty(resources),
        "StoppingCondition": _drop_empty(stopping),
        "CheckpointConfig": {"S3Uri": f"{job.run_dir}/", "LocalPath": f"{OPT}/checkpoints/{job.run}"},
        "Environment": container_environment(job),
        "Tags": [{"Key": key, "Value": value} for key, value in {"titanlike:run": job.run, **job.tags}.items()],
        "EnableManagedSpotTraining": job.spot,
        "RetryStrategy": _drop_empty({"MaximumRetryAttempts": job.retries}),
        "VpcConfig": _drop_empty({"SecurityGroupIds": list(job.security_groups), "Subnets": list(job.subnets)}),
    }
    return _drop_empty(request)


def container_arguments(job: TrainingJob) -> list[str]:
    """Returns the recipe, the keys that depend on SageMaker's paths, and the user's overrides unchanged."""
    recipe, *overrides = job.arguments
    given = {key.removeprefix("--"): value for key, _, value in (override.partition("=") for override in overrides)}
    if job.doctor:
        return ["--doctor", job.instance_type]
    return [recipe, *(f"--{k}={v}" for k, v in with_job_keys(job, given).items())]


def with_job_keys(job: TrainingJob, overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns the keys that depend on SageMaker's paths, and the user's overrides, except for keys that a channel provides."""
    paths: dict[str, list[str]] = {}
    for channel in job.channels:
        paths.setdefault(channel.key, []).append(channel.path)
    mounted = {key: repr(values) if key == "data.mixture" else values[0] for key, values in paths.items()}
    if "data.mixture" in mounted:  # instead of the recipe's data
        mounted.setdefault("data.path", "")
    defaults = {
        "run.name": job.run,
        "run.dir": f"{OPT}/checkpoints",  # the job's CheckpointConfig synchronizes it
        "checkpoint.dir": job.checkpoints.path if job.checkpoints else f"{job.root}/checkpoints",
        "run.shutdown_timeout": "100",  # SageMaker sends SIGKILL after 120 seconds
    }
    given = {key: value for key, value in overrides.items() if key not in mounted}
    return {key: value for key, value in (defaults | mounted).items() if key not in given} | given


def container_environment(job: TrainingJob) -> dict[str, str]:
    """Returns the container's environment variables; the user's values take precedence."""
    variables = {"NCCL_DEBUG": "WARN"}
    if job.hardware.efa_interfaces and job.nodes > 1:
        # Without it, if EFA is unavailable, NCCL silently falls back to sockets, which are 100 times slower.
        variables["FI_PROVIDER"] = "efa"
        if job.instance_type.startswith("ml.p"):
            variables["FI_EFA_USE_DEVICE_RDMA"] = "1"  # GPUDirect RDMA
    return variables | job.environment


def _drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}
