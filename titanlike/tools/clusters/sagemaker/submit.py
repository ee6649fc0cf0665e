"""Submits a job: uploads its files, and sends the request through ModelTrainer (SageMaker SDK v3), the PyTorch estimator (SDK v2),
or boto3.

The SDKs add defaults that an administrator has configured for the account, and their own entry point. All other keys of the request
are sent unchanged, which `tests/sdk` asserts for both.
"""

import importlib.util
import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from titanlike.config import UserError
from titanlike.tools.clusters.sagemaker.jobs import TIMESTAMP_SUFFIX, active_job
from titanlike.tools.clusters.sagemaker.request import TrainingJob, request_for
from titanlike.tools.clusters.sagemaker.service import Clients, NotFound, readable_errors
from titanlike.tools.clusters.sagemaker.validation import request_errors

if TYPE_CHECKING:
    from titanlike.tools.clusters.sagemaker.bundle import Bundle

NO_TELEMETRY = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
# Keys of the request that ModelTrainer accepts under the same name.
MODEL_TRAINER_KEYS = ("input_data_config", "output_data_config", "stopping_condition", "checkpoint_config", "tags")
# The module that each sender requires, and how to install it. Without --sender, the first one installed is used.
SENDERS = {
    "modeltrainer": ("sagemaker.train", 'pip install "sagemaker-train>=1.10"'),
    "estimator": ("sagemaker.pytorch", 'pip install "sagemaker>=2.250,<3"'),
    "boto3": ("boto3", 'pip install "boto3>=1.40"'),
}


def select_sender(name: str = "") -> str:
    """Returns `name` if its SDK is installed, or without a name the first sender whose SDK is."""
    if not name:
        return next((sender for sender, (module, _) in SENDERS.items() if _is_installed(module)), "boto3")
    module, install = SENDERS[name]
    if not _is_installed(module):
        raise UserError(f"--sender {name}: the module {module} is not installed; run: {install}")
    return name


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def upload_and_submit(clients: Clients, job: TrainingJob, bundle: "Bundle", sender: str) -> str:
    """Uploads the files, with the request beside them, and submits the request. Returns the job's name."""
    check_bucket(clients, job.bucket)
    if active := active_job(clients, job.run, job.prefix):
        raise UserError(
            f"run {job.run} has an active job, {active.name}; wait for its end, stop it, or choose another --run"
        )
    request = request_for(job)
    if errors := request_errors(request):
        raise UserError("\n".join(errors))
    contents = {**bundle.contents, "request.json": json.dumps(request, indent=1).encode()}
    prefix = job.code.removeprefix(f"s3://{job.bucket}/")
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key} if job.kms_key else {}

    def put(name: str) -> None:
        clients.s3.put_object(Bucket=job.bucket, Key=f"{prefix}/{name}", Body=contents[name], **encryption)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, contents))
    print(f"uploaded {len(contents)} files, {sum(map(len, contents.values())):,} bytes, to {job.code}")
    with readable_errors(clients.region):
        name = submit(sender, request, clients.session, f"{job.bucket}/{job.prefix}")
    print(f"submitted with {sender}: {name}")
    return name


def check_bucket(clients: Clients, bucket: str) -> None:
    """Refuses a bucket that does not exist, is not accessible, or is in another region."""
    try:
        found = clients.s3.head_bucket(Bucket=bucket)
    except NotFound:
        make = f"aws s3 mb s3://{bucket} --region {clients.region}"
        raise UserError(f"--bucket {bucket} does not exist; create it ({make}), or choose another") from None
    except UserError as error:
        raise UserError(f"--bucket {bucket}: {error}") from None
    region = found["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", clients.region)
    if region != clients.region:
        raise UserError(f"--bucket {bucket} is in {region}, but the job would run in {clients.region}; use one region")


def submit(sender: str, request: dict[str, Any], session: Any, prefix: str) -> str:
    """Submits a request with a boto3 session; an SDK's own files go to `prefix`, BUCKET/PREFIX. Returns the job's name."""
    if sender == "modeltrainer":
        return submit_with_model_trainer(request, session, prefix)
    if sender == "estimator":
        return submit_with_estimator(request, session, prefix)
    session.client("sagemaker").create_training_job(**request)
    return str(request["TrainingJobName"])


def submit_with_model_trainer(request: dict[str, Any], session: Any, prefix: str) -> str:
    """Submits through ModelTrainer, which replaces the timestamp of the job name and starts the entry point from a script."""
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.shapes import MetricDefinition, RetryStrategy
    from sagemaker.train import ModelTrainer

    bucket, _, folder = prefix.partition("/")
    algorithm, settings = request["AlgorithmSpecification"], snake_case(request)
    sdk_session = Session(boto_session=session, default_bucket=bucket, default_bucket_prefix=f"{folder}/code")
    sdk_session.sagemaker_config = NO_TELEMETRY
    # `exec` replaces the shell, which would not forward SageMaker's SIGTERM to the entry point.
    entry_point = f"exec {shlex.join(algorithm['ContainerEntrypoint'])}"
    trainer = ModelTrainer(
        sagemaker_session=sdk_session,
        base_job_name=TIMESTAMP_SUFFIX.sub("", request["TrainingJobName"]),
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        source_code={"command": entry_point, "args": algorithm["ContainerArguments"]},
        role=request["RoleArn"],
        compute=settings["resource_config"]
        | {"enable_managed_spot_training": settings.get("enable_managed_spot_training")},
        networking=settings.get("vpc_config"),
        environment=request["Environment"],
        **{key: settings[key] for key in MODEL_TRAINER_KEYS},
    ).with_metric_definitions([MetricDefinition(**snake_case(metric)) for metric in algorithm["MetricDefinitions"]])
    if "RetryStrategy" in request:
        trainer = trainer.with_retry_strategy(RetryStrategy(**settings["retry_strategy"]))
    trainer.train(wait=False, logs=False)
    return str(trainer._latest_training_job.training_job_name)


def submit_with_estimator(request: dict[str, Any], session: Any, prefix: str) -> str:
    """Submits through the PyTorch estimator. SDK v2 is supported by AWS until July 2027."""
    from sagemaker.inputs import FileSystemInput, TrainingInput
    from sagemaker.pytorch import PyTorch

    import sagemaker

    algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]
    output, network = request["OutputDataConfig"], request.get("VpcConfig", {})
    sdk_session = sagemaker.Session(boto_session=session, default_bucket=prefix.partition("/")[0])
    sdk_session.sagemaker_config = NO_TELEMETRY
    inputs = {}
    for channel in request["InputDataConfig"]:
        if s3 := channel["DataSource"].get("S3DataSource"):
            source = TrainingInput(s3["S3Uri"], distribution="FullyReplicated", input_mode=channel["InputMode"])
        else:
            fsx = channel["DataSource"]["FileSystemDataSource"]
            keys = ("FileSystemId", "FileSystemType", "DirectoryPath", "FileSystemAccessMode")
            source = FileSystemInput(*(fsx[key] for key in keys))
        inputs[channel["ChannelName"]] = source
    estimator = PyTorch(
        entry_point="entry.py",  # required, but not used: container_entry_point takes precedence
        source_dir=inputs["code"].config["DataSource"]["S3DataSource"]["S3Uri"] + "code.tar.gz",
        container_entry_point=algorithm["ContainerEntrypoint"],
        container_arguments=algorithm["ContainerArguments"],
        sagemaker_session=sdk_session,
        role=request["RoleArn"],
        image_uri=algorithm["TrainingImage"],
        metric_definitions=algorithm["MetricDefinitions"],
        instance_type=resources["InstanceType"],
        instance_count=resources["InstanceCount"],
        volume_size=resources["VolumeSizeInGB"],
        keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
        training_plan=resources.get("TrainingPlanArn"),
        max_run=request["StoppingCondition"]["MaxRuntimeInSeconds"],
        max_wait=request["StoppingCondition"].get("MaxWaitTimeInSeconds"),
        use_spot_instances=request.get("EnableManagedSpotTraining", False),
        output_path=output["S3OutputPath"],
        output_kms_key=output.get("KmsKeyId"),
        checkpoint_s3_uri=request["CheckpointConfig"]["S3Uri"],
        checkpoint_local_path=request["CheckpointConfig"]["LocalPath"],
        subnets=network.get("Subnets"),
        security_group_ids=network.get("SecurityGroupIds"),
        environment=request["Environment"],
        tags=request["Tags"],
        max_retry_attempts=request.get("RetryStrategy", {}).get("MaximumRetryAttempts"),
        disable_profiler=True,
        debugger_hook_config=False,
    )
    estimator.fit(inputs, wait=False, job_name=request["TrainingJobName"])
    return str(request["TrainingJobName"])


def snake_case(value: Any) -> Any:
    """Converts the keys of a part of the request to the SDK's names: `VolumeSizeInGB` to `volume_size_in_gb`."""
    if isinstance(value, list):
        return [snake_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    boundary = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return {re.sub(boundary, "_", key).lower(): snake_case(item) for key, item in value.items()}
