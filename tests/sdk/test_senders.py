"""The SDKs send the request unchanged. Requires one of the SDKs, but not torch:

python -m pytest --noconftest -o addopts= -o filterwarnings= tests/sdk
"""

import copy
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import submit
from moto.server import ThreadedMotoServer

ROLE = "arn:aws:iam::123456789012:role/training"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/example"
CODE = "s3://example/titanlike/code/titanlike-run-20261122-101112/"


def s3(name: str, uri: str, mode: str = "File") -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": source}}


REQUEST: dict[str, Any] = {
    "TrainingJobName": "titanlike-run-20261122-101112",
    "AlgorithmSpecification": {
        "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["python3", "/opt/ml/input/data/code/sagemaker/entry.py"],
        "ContainerArguments": ["recipe.toml", "--run.name=run", "--sample.prompt=it's a $HOME"],
        "MetricDefinitions": [{"Name": "loss", "Regex": r"step +\d+/\d+  loss ([0-9.e+-]+)"}],
    },
    "RoleArn": ROLE,
    "InputDataConfig": [s3("code", CODE), s3("data_path", "s3://tokens/c4/", "FastFile")],
    "OutputDataConfig": {"S3OutputPath": "s3://example/titanlike/output"},
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4, "VolumeSizeInGB": 200},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "CheckpointConfig": {"S3Uri": "s3://example/titanlike/runs/run/", "LocalPath": "/opt/ml/checkpoints/run"},
    "Environment": {"NCCL_DEBUG": "WARN", "FI_PROVIDER": "efa"},
    "Tags": [{"Key": "titanlike:run", "Value": "run"}],
}
FSX = {
    "ChannelName": "checkpoints",
    "DataSource": {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789abcdef0",
            "FileSystemType": "FSxLustre",
            "FileSystemAccessMode": "rw",
            "DirectoryPath": "/mount/checkpoints",
        }
    },
}


def with_everything() -> dict[str, Any]:
    """A request with all optional keys that can be combined."""
    request = copy.deepcopy(REQUEST)
    request["ResourceConfig"] |= {"TrainingPlanArn": PLAN, "VolumeKmsKeyId": "key"}
    request["OutputDataConfig"]["KmsKeyId"] = "key"
    request["InputDataConfig"].append(FSX)
    request["VpcConfig"] = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1", "subnet-2"]}
    request["RetryStrategy"] = {"MaximumRetryAttempts": 3}
    return request


def spot() -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    request["EnableManagedSpotTraining"] = True
    request["StoppingCondition"]["MaxWaitTimeInSeconds"] = 172800
    return request


def warm() -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = 1800
    return request


CASES = {"plain": REQUEST, "spot": spot(), "warm pool": warm(), "FSx, VPC, KMS, plan, retries": with_everything()}
SDKS = {"v3": "sagemaker.train", "v2": "sagemaker.pytorch"}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def session(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.Session]:
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
        "SAGEMAKER_VALIDATE_ROLE": "false",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    session = boto3.Session(region_name="us-east-1")
    session.client("s3").create_bucket(Bucket="example")
    session.events.register(
        "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: REQUESTS.append(params)
    )
    REQUESTS.clear()
    yield session


REQUESTS: list[dict[str, Any]] = []


@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_boto3_sends_the_request(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.submit("boto3", request_, session, "example/titanlike") == "titanlike-run-20261122-101112"
    assert [request_] == REQUESTS


@pytest.mark.skipif(not installed(SDKS["v3"]), reason="version 3 of the SageMaker SDK is not installed")
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_model_trainer_sends_the_request_with_its_own_script(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.select_sender() == submit.select_sender("modeltrainer") == "modeltrainer"
    name = submit.submit("modeltrainer", request_, session, "example/titanlike")
    (submitted,) = REQUESTS
    assert submitted["TrainingJobName"] == name and name.startswith("titanlike-run-2")
    # Its script, in an additional channel, executes our entry point with the same arguments.
    channels = {channel["ChannelName"]: channel for channel in submitted["InputDataConfig"]}
    drivers = channels["sm_drivers"]["DataSource"]["S3DataSource"]["S3Uri"]
    key = drivers.removeprefix("s3://example/").rstrip("/")
    assert key.startswith("titanlike/code/")
    script = session.client("s3").get_object(Bucket="example", Key=f"{key}/sm_train.sh")["Body"].read().decode()
    arguments = "recipe.toml --run.name=run '--sample.prompt=it'\"'\"'s a $HOME'"
    assert f"exec python3 /opt/ml/input/data/code/sagemaker/entry.py {arguments}\n" in script
    expected = copy.deepcopy(request_)
    for side in (submitted, expected):
        side.pop("TrainingJobName")
        side["AlgorithmSpecification"].pop("ContainerEntrypoint")
        side["AlgorithmSpecification"].pop("ContainerArguments")
    submitted["InputDataConfig"] = [
        channel for channel in submitted["InputDataConfig"] if channel["ChannelName"] != "sm_drivers"
    ]
    assert json.loads(json.dumps(submitted)) == expected | (
        {"HyperParameters": {}} if "HyperParameters" in submitted else {}
    )


@pytest.mark.skipif(not installed(SDKS["v2"]), reason="version 2 of the SageMaker SDK is not installed")
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_estimator_sends_the_request_with_unused_hyperparameters(
    session: boto3.Session, request_: dict[str, Any]
) -> None:
    assert submit.select_sender() == submit.select_sender("estimator") == "estimator"
    assert submit.submit("estimator", request_, session, "example/titanlike") == request_["TrainingJobName"]
    (submitted,) = REQUESTS
    assert all(key.startswith("sagemaker_") for key in submitted.pop("HyperParameters"))
    assert submitted.pop("ProfilerConfig") == {"DisableProfiler": True}
    assert json.loads(json.dumps(submitted)) == request_


def test_boto3_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert submit.select_sender() == "boto3"
