"""Sending the request: by version 3 of SageMaker's SDK, by version 2, or, where neither is installed, by boto3 as it is.

The SDKs put in what an administrator has set for all jobs of an account, and their own way into the container; all else is the
request's, key for key, which `tests/sdk` asserts for both.
"""

import importlib.util
import re
import shlex
from collections.abc import Callable
from typing import Any

# Nobody else has to hear of the job.
QUIET = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}


def sender() -> tuple[str, Callable[[dict[str, Any], Any, str], str]]:
    """What is installed to send with, by name, and what sends by it: the request, a boto3 session, a prefix of S3 -> the job's
    name."""
    for name, module, send in (
        ("the SageMaker SDK, version 3", "sagemaker.train", by_model_trainer),
        ("the SageMaker SDK, version 2", "sagemaker.pytorch", by_estimator),
    ):
        try:
            if importlib.util.find_spec(module):
                return name, send
        except ModuleNotFoundError:  # its parent
            continue
    return "boto3", by_boto3


def by_boto3(request: dict[str, Any], session: Any, prefix: str) -> str:
    """The request as it is."""
    session.client("sagemaker").create_training_job(**request)
    return str(request["TrainingJobName"])


def by_model_trainer(request: dict[str, Any], session: Any, prefix: str) -> str:
    """Through ModelTrainer, which puts a time of its own to the name, and its own script before the entry."""
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.shapes import Channel, CheckpointConfig, MetricDefinition, OutputDataConfig, RetryStrategy, Tag
    from sagemaker.core.training.configs import Compute, Networking, SourceCode, StoppingCondition
    from sagemaker.train import ModelTrainer

    bucket, _, folder = prefix.partition("/")
    algorithm = request["AlgorithmSpecification"]
    helper = Session(boto_session=session, default_bucket=bucket, default_bucket_prefix=f"{folder}/code")
    helper.sagemaker_config = QUIET
    network = request.get("VpcConfig")
    trainer = ModelTrainer(
        sagemaker_session=helper,
        base_job_name=re.sub(r"-\d{8}-\d{6}$", "", request["TrainingJobName"]),
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        # `exec`: without it a shell stands between SageMaker's SIGTERM and the entry, and does not pass it on.
        source_code=SourceCode(
            command=f"exec {shlex.join(algorithm['ContainerEntrypoint'])}", args=algorithm["ContainerArguments"]
        ),
        role=request["RoleArn"],
        input_data_config=[Channel(**snake(channel)) for channel in request["InputDataConfig"]],
        output_data_config=OutputDataConfig(**snake(request["OutputDataConfig"])),
        compute=Compute(
            **snake(request["ResourceConfig"]), enable_managed_spot_training=request.get("EnableManagedSpotTraining")
        ),
        networking=Networking(**snake(network)) if network else None,
        stopping_condition=StoppingCondition(**snake(request["StoppingCondition"])),
        checkpoint_config=CheckpointConfig(**snake(request["CheckpointConfig"])),
        environment=request["Environment"],
        tags=[Tag(**snake(tag)) for tag in request["Tags"]],
    ).with_metric_definitions([MetricDefinition(**snake(one)) for one in algorithm["MetricDefinitions"]])
    if "RetryStrategy" in request:
        trainer = trainer.with_retry_strategy(RetryStrategy(**snake(request["RetryStrategy"])))
    trainer.train(wait=False, logs=False)
    return str(trainer._latest_training_job.training_job_name)


def by_estimator(request: dict[str, Any], session: Any, prefix: str) -> str:
    """Through the PyTorch estimator of version 2, which ends in 2027."""
    from sagemaker.inputs import FileSystemInput, TrainingInput
    from sagemaker.pytorch import PyTorch

    import sagemaker

    bucket = prefix.partition("/")[0]
    algorithm, resources, stopping = (
        request[part] for part in ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition")
    )
    output, kept, network = request["OutputDataConfig"], request["CheckpointConfig"], request.get("VpcConfig", {})
    helper = sagemaker.Session(boto_session=session, default_bucket=bucket)
    helper.sagemaker_config = QUIET
    inputs = {}
    for channel in request["InputDataConfig"]:
        source = channel["DataSource"]
        if "S3DataSource" in source:
            inputs[channel["ChannelName"]] = TrainingInput(
                source["S3DataSource"]["S3Uri"], distribution="FullyReplicated", input_mode=channel["InputMode"]
            )
        else:
            mounted = source["FileSystemDataSource"]
            inputs[channel["ChannelName"]] = FileSystemInput(
                mounted["FileSystemId"],
                mounted["FileSystemType"],
                mounted["DirectoryPath"],
                mounted["FileSystemAccessMode"],
            )
    estimator = PyTorch(
        entry_point="entry.py",  # the container is told what to run below: the estimator wants this all the same
        source_dir=inputs["code"].config["DataSource"]["S3DataSource"]["S3Uri"] + "code.tar.gz",
        container_entry_point=algorithm["ContainerEntrypoint"],
        container_arguments=algorithm["ContainerArguments"],
        sagemaker_session=helper,
        role=request["RoleArn"],
        image_uri=algorithm["TrainingImage"],
        metric_definitions=algorithm["MetricDefinitions"],
        instance_type=resources["InstanceType"],
        instance_count=resources["InstanceCount"],
        volume_size=resources["VolumeSizeInGB"],
        volume_kms_key=resources.get("VolumeKmsKeyId"),
        keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
        training_plan=resources.get("TrainingPlanArn"),
        max_run=stopping["MaxRuntimeInSeconds"],
        max_wait=stopping.get("MaxWaitTimeInSeconds"),
        use_spot_instances=request.get("EnableManagedSpotTraining", False),
        output_path=output["S3OutputPath"],
        output_kms_key=output.get("KmsKeyId"),
        checkpoint_s3_uri=kept["S3Uri"],
        checkpoint_local_path=kept["LocalPath"],
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


def snake(value: Any) -> Any:
    """A part of the request with the SDK's names for its keys: `VolumeSizeInGB` is `volume_size_in_gb`."""
    if isinstance(value, list):
        return [snake(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key).lower(): snake(one)
        for key, one in value.items()
    }
